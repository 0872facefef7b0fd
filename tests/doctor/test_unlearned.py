"""Parameters that are unused, left out or frozen, refused by a Function, and losses without a graph."""

import torch
from torch import nn

from tests.doctor.programs import X, faulty, healthy, two


@faulty("GG102")
def a_layer_never_called():
    m = two()
    m["spare"] = nn.Linear(4, 4)
    return lambda: m.head(m.encoder(X)).mean(), m


@faulty("GG102")
def a_parameter_never_read():
    m = two()
    m.register_parameter("scale", nn.Parameter(torch.ones(())))
    return lambda: m.head(m.encoder(X)).mean(), m


@faulty("GG102")
def a_layer_only_initialised_in_the_step():
    m = two()
    m["spare"] = nn.Linear(4, 4)

    def step():
        nn.init.trunc_normal_(m.spare.weight)
        nn.init.zeros_(m.spare.bias)
        return m.head(m.encoder(X)).mean()

    return step, m


@faulty("GG102")
def a_branch_not_taken():
    m = two()

    def step():
        h = m.encoder(X) if X.numel() == 0 else X
        return m.head(h).mean()

    return step, m


@faulty("GG103")
def an_auxiliary_output_left_out():
    m = two()

    def step():
        m.encoder(X).pow(2).mean()  # HERE
        return m.head(X).mean()

    return step, m


@faulty("GG103")
def overwritten_by_name():
    m = two()

    def step():
        h = m.encoder(X).relu()  # HERE
        h = X
        return m.head(h).mean()

    return step, m


@faulty("GG103")
def only_kept_for_later():
    m = two()
    kept = []

    def step():
        kept.append(m.encoder(X))  # HERE
        return m.head(X).mean()

    return step, m


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # HERE
        return None


class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, gradient):  # HERE
        return gradient, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(2).sum().sqrt()

    @staticmethod
    def backward(ctx, gradient):  # HERE
        assert ctx.saved_tensors
        return


@faulty("GG105")
def function_gives_none():
    m = two()
    return lambda: m.head(Nothing.apply(m.encoder(X))).mean(), m


@faulty("GG105")
def function_gives_none_for_one():
    m = two()
    return lambda: First.apply(m.head(X), m.encoder(X)).mean(), m


@faulty("GG105")
def function_with_a_reduction():
    m = two()
    return lambda: m.head(X).mean() + Norm.apply(m.encoder(X)), m


function_gives_none.__wrapped__ = Nothing
function_gives_none_for_one.__wrapped__ = First
function_with_a_reduction.__wrapped__ = Norm


@faulty("GG201")
def a_loss_of_a_number():
    m = two()

    def step():
        loss = m.head(m.encoder(X)).mean()
        return torch.tensor(loss.item())  # HERE

    return step, m


@faulty("GG201")
def a_detached_loss():
    m = two()

    def step():
        loss = m.head(m.encoder(X)).mean().detach()  # HERE
        loss.backward()

    return step, m


@faulty("GG201")
def accuracy_as_a_loss():
    m = two()

    def step():
        hits = m.head(m.encoder(X)).squeeze(1) > 0  # HERE
        hits.float().mean().backward()

    return step, m


@faulty("GG201")
def everything_frozen():
    m = two().requires_grad_(False)

    def step():
        m.head(m.encoder(X)).mean().backward()  # HERE

    return step, m


@faulty("GG104")
def frozen_in_the_step():
    m = two()

    def step():
        m.encoder.weight.requires_grad_(False)  # HERE
        return m.head(m.encoder(X)).mean()

    return step, m


@faulty("GG104")
def frozen_by_the_attribute():
    m = two()

    def step():
        m.encoder.weight.requires_grad = False  # HERE
        return m.head(m.encoder(X)).mean()

    return step, m


@faulty("GG104")
def frozen_before():
    m = two()
    m.encoder.requires_grad_(False)
    return lambda: m.head(m.encoder(X)).mean(), m


@healthy("GG105", "GG103")
def a_function_that_gives_gradients():
    m = two()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2, None

    return lambda: m.head(Double.apply(m.encoder(X), 2)).mean(), m


@healthy("GG102", "GG104")
def a_frozen_part_is_only_a_note():
    m = two()
    m.encoder.requires_grad_(False)
    return lambda: m.head(m.encoder(X)).mean(), m


@healthy("GG104", "GG201")
def thawed_again():
    m = two().requires_grad_(False)
    m.requires_grad_(True)
    return lambda: m.head(m.encoder(X)).mean(), m


class Chain(nn.Module):
    def __init__(self, layers, head=None):
        super().__init__()
        self.layers = layers
        self.head = head or nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers.values() if isinstance(self.layers, (dict, nn.ModuleDict)) else self.layers:
            x = layer(x)
        return self.head(x)


@faulty("GG908")
def layers_in_a_list():
    m = Chain([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step():
        m(X).mean().backward()  # HERE
        optimizer.step()

    return step, m


@faulty("GG908")
def layers_in_a_dict():
    m = Chain({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step():
        m(X).mean().backward()  # HERE
        optimizer.step()

    return step, m


@faulty("GG908")
def layers_in_a_list_without_an_optimizer_in_sight():
    m = Chain([nn.Linear(4, 4), nn.Linear(4, 4)])
    return (lambda: m(X).mean()), m


@healthy("GG908")
def layers_in_a_module_list():
    m = Chain(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    return (lambda: m(X).mean()), m


@healthy("GG908")
def layers_in_a_list_that_the_optimizer_is_given():
    m = Chain([nn.Linear(4, 4), nn.Linear(4, 4)])
    parameters = [*m.parameters(), *(p for layer in m.layers for p in layer.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step():
        m(X).mean().backward()
        optimizer.step()

    return step, m
