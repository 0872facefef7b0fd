"""What cannot be exact is said: each limit of the guard, as LIMITATIONS.md states it."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import GradgateWarning


def spoilt(*rows):
    x = torch.randn(8, 3)
    x[list(rows)] = float("nan")
    return x


def test_a_loss_that_mixes_samples_is_the_loss_of_the_reduced_batch():
    """In-batch negatives: the dropped sample is nobody's negative any more, and that is exact."""
    model = nn.Linear(3, 3)
    twin = copy.deepcopy(model)

    def loss_of(m, x):
        h = nn.functional.normalize(m(x), dim=1)
        return nn.functional.cross_entropy(h @ h.T * 5, torch.arange(len(x)))

    x = spoilt(4)
    result = gg.Guard(model).backward(x, lambda x: loss_of(model, x))
    loss_of(twin, x[result.kept]).backward()
    assert result.kept == [0, 1, 2, 3, 5, 6, 7]
    assert result.exact
    assert torch.equal(model.weight.grad, twin.weight.grad)


def test_a_model_that_writes_its_parameters_is_not_exact_and_says_so():
    class Moving(nn.Module):
        """Keeps an average of its weights as a parameter and moves it in forward, as momentum encoders do."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.average = nn.Parameter(torch.zeros(1, 3), requires_grad=False)

        def forward(self, x):
            self.average.mul_(0.9).add_(self.linear.weight.detach(), alpha=0.1)
            return self.linear(x)

    model = Moving()
    result = gg.Guard(model).backward(spoilt(1), lambda x: model(x).mean())
    assert not result.exact
    assert result.reason == "parameters are written inside the step: average"


def test_a_module_with_buffers_that_is_not_under_guard_is_said():
    model, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    x = spoilt(1)
    with pytest.warns(GradgateWarning, match="not under guard"):
        result = gg.Guard(model).backward(x, lambda x: norm(model(x)).square().mean())
    assert not result.exact
    assert result.reason == (
        "modules that are not under guard wrote buffers: `norm` (BatchNorm1d); use gg.Guard([model, norm])"
    )
    assert gg.Guard([model, norm]).backward(x, lambda x: norm(model(x)).square().mean()).exact


def test_a_buffer_that_appears_in_the_step_is_said():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            self.register_buffer("seen", torch.tensor(len(x)))
            return self.linear(x)

    model = Growing()
    result = gg.Guard(model).backward(spoilt(1), lambda x: model(x).mean())
    assert result.reason == "buffers appeared inside the step: seen"
    assert gg.Guard(model).backward(spoilt(1), lambda x: model(x).mean()).exact


def test_a_buffer_that_is_assigned_anew_is_put_back():
    class Assigning(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.linear(x - self.mean)

    model = Assigning()
    twin = copy.deepcopy(model)
    guard = gg.Guard(model)
    for x in (spoilt(), spoilt(1), spoilt(), spoilt(2, 3)):
        result = guard.backward(x, lambda x: model(x).square().mean())
        twin(x[result.kept]).square().mean().backward()
        assert torch.equal(model.mean, twin.mean)
    assert torch.equal(model.linear.weight.grad, twin.linear.weight.grad)


def test_an_expanded_buffer_is_put_back():
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("shift", torch.zeros(1).expand(3))

        def forward(self, x):
            return self.linear(x + self.shift)

    model = Expanded()
    assert gg.Guard(model).backward(spoilt(1), lambda x: model(x).mean()).exact


def test_what_a_model_keeps_in_plain_attributes_is_not_put_back():
    """A hidden state or a counter that is no buffer has seen the tries that do not count."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 1), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    model = Counting()
    gg.Guard(model).backward(spoilt(1), lambda x: model(x).mean())
    assert model.calls > 1


def test_a_generator_of_the_users_own_is_not_put_back():
    model, generator = nn.Linear(3, 1), torch.Generator().manual_seed(0)
    before = generator.get_state()

    def loss_fn(x):
        return (model(x) + torch.rand(len(x), 1, generator=generator)).mean()

    result = gg.Guard(model).backward(spoilt(1), loss_fn)
    found = generator.get_state()
    generator.set_state(before)
    torch.rand(len(result.kept), 1, generator=generator)
    assert not torch.equal(generator.get_state(), found)


def test_what_is_written_into_an_array_of_the_batch_is_not_put_back():
    model = nn.Linear(3, 1)
    array = spoilt(1).numpy()
    written = array * 4

    def loss_fn(array):
        array *= 2
        return model(torch.from_numpy(array)).mean()

    result = gg.Guard(model).backward(array, loss_fn)
    assert not np.allclose(result.loss.item(), model(torch.from_numpy(written[result.kept] / 2)).mean().item())


def test_a_loss_of_a_fixed_number_of_samples_costs_only_the_bad_one():
    """A NaN that the loss leaves out of a large batch, but not its gradient, is in the loss of a small group."""
    model = nn.Linear(3, 1)
    result = gg.Guard(model).backward(spoilt(3), lambda x: model(x)[:, 0].sort().values[:5].mean())
    assert result.kept == [0, 1, 2, 4, 5, 6, 7]


def test_an_optimizer_in_backward_hooks_has_already_stepped():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    zero = torch.ones(8)
    zero[2] = 0
    with pytest.raises(gg.TooManyBadSamples, match="parameters are not finite themselves: weight"):
        gg.Guard(model).backward((torch.randn(8, 3), zero), lambda b: (model(b[0]).square()[:, 0] * b[1]).sqrt().mean())


def test_another_thread_is_not_seen_by_the_replay():
    model, other = nn.Linear(3, 1), nn.BatchNorm1d(3)
    stop, seen = threading.Event(), []

    def busy():
        while not stop.is_set():
            seen.append(other(torch.randn(4, 3)))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            assert gg.Guard(model).backward(spoilt(1), lambda x: model(x).mean()).exact
    finally:
        stop.set()
        thread.join()
    assert seen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 3}, r"`model` is the int 3"),
        ({"model": []}, r"`model` is the list \[\]"),
        ({"catch": "all"}, r"`catch` is the str 'all'"),
        ({"catch": ()}, r"`catch` is the tuple \(\)"),
        ({"max_bad": 1.5}, r"`max_bad` is the float 1.5"),
        ({"patience": 0}, r"`patience` is the int 0"),
        ({"batch_dim": -1}, r"`batch_dim` is the int -1"),
        ({"min_kept": 0}, r"`min_kept` is the int 0"),
        ({"sink": print}, r"`sink` is the builtin_function_or_method"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(gg.GradgateError, match=words) as caught:
        gg.Guard(**{"model": nn.Linear(1, 1), **arguments})
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda x: 3.0, r"`loss_fn` returned the float 3.0"),
        (lambda x: None, r"`loss_fn` returned None"),
        (lambda x: x.mean() * 1j, r"(?s)`loss_fn` returned a complex64 tensor.*loss.abs\(\)"),
        (lambda x: x, r"`loss_fn` returned a float32 tensor of shape \(8, 3\) for a batch of 8 samples"),
        (lambda x: x[:5, 0], r"of shape \(5,\) for a batch of 8 samples"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_refused(loss_fn, words):
    with pytest.raises(gg.GradgateError, match=words):
        gg.Guard(nn.Linear(3, 1)).backward(torch.randn(8, 3), loss_fn)


def test_a_loss_of_one_element_is_a_scalar():
    model = nn.Linear(3, 1)
    result = gg.Guard(model).backward(torch.randn(8, 3), lambda x: model(x).mean().reshape(1))
    assert result.loss.shape == ()
    assert result.losses is None
    assert not result.loss.requires_grad
