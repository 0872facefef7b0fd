"""The optimizer and the model."""

import torch
from torch import nn

from tests.doctor.programs import X, faulty, healthy, two


def sgd(m):
    return torch.optim.SGD(m.parameters(), lr=0.1)


def trained(m, optimizer, line=None):
    """One ordinary step."""

    def step():
        optimizer.zero_grad()
        m.head(m.encoder(X)).mean().backward()
        optimizer.step()

    return step, m


@faulty("GG901")
def a_layer_added_later():
    m = two()
    optimizer = sgd(m)
    m["extra"] = nn.Linear(1, 1)

    def step():
        optimizer.zero_grad()
        m.extra(m.head(m.encoder(X))).mean().backward()
        optimizer.step()  # HERE

    return step, m


@faulty("GG901")
def only_the_head():
    m = two()
    return trained(m, sgd(m.head))


@faulty("GG901")
def a_parameter_left_out():
    m = two()
    optimizer = torch.optim.AdamW([p for name, p in m.named_parameters() if "bias" not in name])
    return trained(m, optimizer)


@faulty("GG902")
def the_old_model():
    old, m = two(), two()
    optimizer = sgd(old)

    def step():
        optimizer.zero_grad()
        m.head(m.encoder(X)).mean().backward()
        optimizer.step()  # HERE

    return step, m


@faulty("GG902")
def a_replaced_head():
    m = two()
    optimizer = sgd(m)
    m["head"] = nn.Linear(4, 1)
    optimizer.add_param_group({"params": m.head.parameters()})
    return trained(m, optimizer)


@faulty("GG902")
def parameters_made_anew():
    m = two()
    optimizer = sgd(m)
    for name, parameter in list(m.encoder.named_parameters()):
        m.encoder.register_parameter(name, nn.Parameter(parameter.detach().clone()))
    return trained(m, optimizer)


@faulty("GG903")
def zero_grad_forgotten():
    m = two()
    optimizer = sgd(m)

    def step():
        for _ in range(2):
            m.head(m.encoder(X)).mean().backward()
            optimizer.step()  # HERE

    return step, m


@faulty("GG903")
def zero_grad_forgotten_before():
    m = two()
    optimizer = torch.optim.Adam(m.parameters())
    m.head(m.encoder(X)).mean().backward()
    optimizer.step()

    def step():
        m.head(m.encoder(X)).mean().backward()
        optimizer.step()  # HERE

    return step, m


@faulty("GG903")
def the_wrong_model_zeroed():
    m, other = two(), two()
    optimizer = sgd(m)

    def step():
        for _ in range(3):
            other.zero_grad()
            m.head(m.encoder(X)).mean().backward()
            optimizer.step()

    return step, m


@faulty("GG904")
def step_before_backward():
    m = two()
    optimizer = sgd(m)

    def step():
        loss = m.head(m.encoder(X)).mean()
        optimizer.zero_grad()
        optimizer.step()  # HERE
        loss.backward()  # ALSO

    return step, m


@faulty("GG904")
def zero_grad_between():
    m = two()
    optimizer = sgd(m)

    def step():
        m.head(m.encoder(X)).mean().backward()
        optimizer.zero_grad()
        optimizer.step()  # HERE

    return step, m


@faulty("GG904")
def backward_of_another_model():
    m, other = two(), two()
    optimizer = sgd(m)

    def step():
        other.head(other.encoder(X)).mean().backward()
        optimizer.step()  # HERE

    return step, m


@healthy("GG901", "GG903", "GG904", "GG902")
def an_ordinary_step():
    m = two()
    return trained(m, sgd(m))


@healthy("GG903", "GG904")
def accumulation():
    m = two()
    optimizer = sgd(m)

    def step():
        for _ in range(2):
            for scale in (1.0, 2.0, 3.0):
                m.head(m.encoder(X * scale)).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return step, m


@healthy("GG901", "GG903", "GG902")
def two_optimizers():
    m = two()
    first, second = sgd(m.encoder), torch.optim.Adam(m.head.parameters())

    def step():
        for optimizer in (first, second):
            first.zero_grad()
            second.zero_grad()
            m.head(m.encoder(X)).mean().backward()
            optimizer.step()

    return step, m


@healthy("GG904", "GG903")
def a_closure():
    m = two()
    optimizer = torch.optim.LBFGS(m.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = m.head(m.encoder(X)).pow(2).mean()
        loss.backward()
        return loss

    def step():
        optimizer.step(closure)

    return step, m
