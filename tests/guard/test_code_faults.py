"""Never hide a bug: if every sample fails, the user's own exception is raised, at once and with evidence."""

import copy
import traceback
from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn

import gradgate as gg

Named = namedtuple("Named", "inputs")


class Counting(nn.Module):
    """Counts its calls, the calls that a search makes included."""

    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)
        self.calls = 0
        self.rows = 0

    def forward(self, x):
        self.calls += 1
        self.rows += len(x)
        return self.inner(x)


def state_of(model):
    return [t.clone() for t in (*model.parameters(), *model.buffers())]


def misspelt(model):
    return lambda x: model(x).meen()


def wrong_shape(model):
    return lambda x: (model(x) @ torch.ones(7, 1)).mean()


def wrong_device(model):
    return lambda x: (model(x) + torch.ones(4, device="meta")).mean()


def wrong_type(model):
    return lambda x: nn.functional.cross_entropy(model(x), torch.ones(len(x), 4, 4))


def without_graph(model):
    return lambda x: model(x).detach().mean()


@pytest.mark.parametrize("make", [misspelt, wrong_shape, wrong_device, wrong_type, without_graph])
def test_a_fault_of_the_code_is_raised_as_it_is(make):
    model = Counting(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    loss_fn = make(model)
    x = torch.randn(64, 3)
    before, random_before = state_of(model), torch.get_rng_state()
    with pytest.raises(Exception) as plain:  # noqa: PT011 - any exception, the same one
        loss_fn(x).backward()
    for tensor, value in zip((*model.parameters(), *model.buffers()), before, strict=True):
        tensor.data.copy_(value)
    torch.set_rng_state(random_before)
    model.calls = 0
    with pytest.raises(type(plain.value)) as caught:
        gg.Guard(model).backward(x, loss_fn)
    assert str(caught.value) == str(plain.value)
    assert model.calls <= 20, "a handful of probes"
    assert all(map(torch.equal, state_of(model), before))
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_evidence_stands_behind_the_traceback_of_the_user():
    model = nn.Linear(3, 1)

    def loss_fn(x):
        return model(x).meen()

    with pytest.raises(AttributeError) as caught:
        gg.Guard(model).backward(torch.randn(32, 3), loss_fn)
    assert isinstance(caught.value.__cause__, gg.GradgateError)
    assert "every sample that was tried fails in the same way" in str(caught.value.__cause__)
    assert "no sample was dropped" in caught.value.__notes__[-1]
    text = "".join(traceback.format_exception(caught.value))
    assert text.index("return model(x).meen()") < text.index("gradgate: every sample")


def test_an_exception_that_has_a_cause_keeps_it():
    model = nn.Linear(3, 1)

    def loss_fn(x):
        try:
            return {}["loss"]
        except KeyError as error:
            raise ValueError("no loss") from error

    with pytest.raises(ValueError, match="no loss") as caught:
        gg.Guard(model).backward(torch.randn(8, 3), loss_fn)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


def test_a_nan_of_every_sample_is_never_accepted():
    model = nn.Linear(3, 1)
    model.weight.data[0, 0] = float("nan")
    with pytest.raises(gg.TooManyBadSamples, match="non-finite loss: nan in a batch of 16 samples; every sample"):
        gg.Guard(model).backward(torch.randn(16, 3), lambda x: model(x).mean())
    assert model.weight.grad is None


def test_a_mean_over_nothing_is_explained():
    """The loss is NaN although every gradient is finite: no label is valid, so no sample is to blame."""
    model = nn.Linear(3, 4)
    y = torch.full((8,), -100)
    with pytest.raises(gg.TooManyBadSamples, match="a mean over nothing"):
        gg.Guard(model).backward((torch.randn(8, 3), y), lambda b: nn.functional.cross_entropy(model(b[0]), b[1]))


def test_a_batch_of_one_bad_sample_is_everyone():
    model = nn.Linear(3, 1)
    with pytest.raises(gg.TooManyBadSamples):
        gg.Guard(model).backward(torch.full((1, 3), float("nan")), lambda x: model(x).mean())


def test_a_reduced_batch_that_cannot_run_is_raised_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    x = torch.randn(2, 2)
    x[0] = float("nan")
    before = state_of(model)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        gg.Guard(model).backward(x, lambda x: model(x).square().mean())
    assert r"without the bad samples (rows 0) the batch cannot run either" in caught.value.__notes__[-1]
    assert all(map(torch.equal, state_of(model), before))


def test_a_hard_coded_batch_size_is_raised_with_the_error_of_the_reduced_batch():
    model = nn.Linear(3, 1)
    x = torch.randn(8, 3)
    x[1] = float("nan")
    with pytest.raises(RuntimeError, match="shape"):
        gg.Guard(model).backward(x, lambda x: model(x.reshape(8, 3)).mean())


def test_a_fault_that_no_row_explains_is_raised():
    """It depends on how often the function has been called: it comes again, but not with the rows."""
    model = nn.Linear(3, 1)
    calls = []

    def loss_fn(x):
        calls.append(len(x))
        if len(x) >= 8:
            raise MemoryLimit("more than I can take")
        return model(x).mean()

    class MemoryLimit(Exception):
        pass

    with pytest.raises(MemoryLimit) as caught:
        gg.Guard(model).backward(torch.randn(8, 3), loss_fn)
    assert "no sample can be blamed for it" in caught.value.__notes__[-1]


@pytest.mark.parametrize("kind", [list, lambda x: {"inputs": x}, lambda x: UserDict(inputs=x), Named])
def test_a_loss_that_writes_into_the_batch_cannot_be_tried_again(kind):
    """Trying again would normalise twice: a silently wrong gradient."""
    model = nn.Linear(3, 1)
    x = torch.randn(8, 3)
    x[2] = float("nan")
    batch = kind([x])

    def loss_fn(batch):
        return model(x.div_(2)).mean()

    with pytest.raises(gg.TooManyBadSamples, match="the batch was written to in place, so nothing can be tried again"):
        gg.Guard(model).backward(batch, loss_fn)
    assert model.weight.grad is None


def test_a_loss_that_does_not_use_its_batch_is_told():
    model = nn.Linear(3, 1)
    x = torch.randn(8, 3)
    x[2] = 1e9

    def loss_fn(batch):
        if bool((x > 1e6).any()):
            raise ValueError("too large")
        return model(x).mean()

    with pytest.raises(ValueError, match="too large") as caught:
        gg.Guard(model).backward(x.clone(), loss_fn)
    assert "must use the batch that it is given" in str(caught.value.__cause__)


def test_a_step_while_recording_is_switched_off_is_told_as_it_is():
    model = nn.Linear(3, 1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad") as caught:
        gg.Guard(model).backward(torch.randn(8, 3), lambda x: model(x).mean())
    assert "every sample that was tried fails in the same way" in caught.value.__notes__[-1]


def test_an_empty_batch():
    model = nn.Linear(3, 1)
    assert gg.Guard(model).backward(torch.zeros(0, 3), lambda x: model(x).sum()).kept == []
    with pytest.raises(gg.TooManyBadSamples, match="in a batch of 0 samples"):
        gg.Guard(model).backward(torch.zeros(0, 3), lambda x: model(x).mean())


def test_a_batch_that_carries_a_graph_of_its_own_is_raised_not_blamed():
    """What was computed before the step can be walked back once only."""
    encoder, model = nn.Linear(3, 3), nn.Linear(3, 1)
    zero = torch.ones(6)
    zero[1] = 0
    with pytest.raises(RuntimeError, match="second time"):
        gg.Guard(model).backward(
            (encoder(torch.randn(6, 3)).tanh(), zero), lambda b: (model(b[0]).square().sum(1) * b[1]).sqrt().mean()
        )


def test_a_copy_of_the_training_goes_on_after_the_error():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    twin = copy.deepcopy(model)
    guard = gg.Guard(model)
    x = torch.randn(8, 3)
    with pytest.raises(AttributeError):
        guard.backward(x, lambda x: model(x).meen())
    guard.backward(x, lambda x: model(x).square().mean())
    twin(x).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))
