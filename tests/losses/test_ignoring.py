"""Where torch's own `ignore_index` is exact it sees the whole batch; where it is not, the loss sees what is kept."""

import math

import pytest
import torch
from torch.nn import functional as F

from gradgate.losses import masked_loss

LEFT_OUT = torch.tensor([1, 4])
TARGET = torch.tensor([0, 255, 2, 1, 255, 3])
KEPT = TARGET != 255
LOSSES = {
    "plain": {},
    "weighted": {"weight": torch.tensor([0.5, 1.0, 2.0, 3.0])},
    "smoothed": {"label_smoothing": 0.1},
    "weighted and smoothed": {"weight": torch.tensor([0.5, 1.0, 2.0, 3.0]), "label_smoothing": 0.1},
    "sum": {"reduction": "sum"},
}
each_loss = pytest.mark.parametrize("kw", LOSSES.values(), ids=LOSSES.keys())


class Seen(torch.nn.CrossEntropyLoss):
    """Cross entropy that remembers how many positions it was shown."""

    def forward(self, input, target):
        self.positions = target.numel()
        return super().forward(input, target)


def loss_and_gradient(logits, kw):
    logits = logits.clone().requires_grad_()
    seen = Seen(**kw)
    loss = masked_loss(seen, logits, TARGET, exclude=255)
    loss.backward()
    return seen.positions, loss.detach(), logits.grad


@each_loss
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_left_out_and_not_finite_is_not_shown_to_the_loss(kw, garbage):
    logits = torch.randn(6, 4)
    _, expected, gradient = loss_and_gradient(logits, kw)
    logits[LEFT_OUT, 1:] = garbage  # two of 3e38 are infinite together: a false alarm, and right all the same
    positions, loss, ours = loss_and_gradient(logits, kw)
    assert positions == 4
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, gradient)
    assert (ours[LEFT_OUT] == 0).all()


@each_loss
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_kept_may_be_anything(kw, garbage):
    """As in the batch without the rest; and what is left out gets exactly 0, though its neighbour is NaN."""
    logits = torch.randn(6, 4)
    logits[0, 3] = garbage
    positions, loss, ours = loss_and_gradient(logits, kw)
    assert positions == 6
    alone = logits[KEPT].requires_grad_()
    expected = F.cross_entropy(alone, TARGET[KEPT], **kw)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    torch.testing.assert_close(ours[KEPT], alone.grad, equal_nan=True)
    assert (ours[LEFT_OUT] == 0).all()


@each_loss
def test_a_nan_that_comes_back_stays_with_what_is_kept(kw):
    logits = torch.randn(6, 4, requires_grad=True)
    masked_loss(F.cross_entropy, logits, TARGET, exclude=255, **kw).backward(torch.tensor(math.nan))
    assert logits.grad[KEPT].isnan().any(1).all()
    assert (logits.grad[LEFT_OUT] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_precision(dtype):
    logits = torch.randn(6, 4, dtype=dtype)
    positions, loss, gradient = loss_and_gradient(logits, {})
    assert positions == 6
    torch.testing.assert_close(loss, F.cross_entropy(logits[KEPT], TARGET[KEPT]))
    logits[LEFT_OUT, 2] = math.nan
    positions, _, ours = loss_and_gradient(logits, {})
    assert positions == 4
    torch.testing.assert_close(ours, gradient)


def test_inside_torch_func():
    logits = torch.randn(6, 4)
    _, _, gradient = loss_and_gradient(logits, {})
    logits[LEFT_OUT, 2] = math.nan
    sloped = torch.func.grad(lambda x: masked_loss(F.cross_entropy, x, TARGET, exclude=255))
    torch.testing.assert_close(sloped(logits), gradient)
    torch.testing.assert_close(sloped(logits.nan_to_num()), gradient)


def test_positions_of_pictures():
    logits = torch.randn(1, 4, 2, 3)
    target = TARGET.reshape(1, 2, 3)
    seen = Seen()
    plain = masked_loss(seen, logits, target, exclude=255)
    assert seen.positions == 6
    logits.movedim(1, -1)[target == 255] = math.nan
    assert torch.isclose(masked_loss(seen, logits, target, exclude=255), plain)
    assert seen.positions == 4


@pytest.mark.parametrize("left_out", [0, 6])
def test_nothing_or_everything_left_out(left_out):
    target = TARGET.clamp(max=3)
    target[:left_out] = 255
    logits = torch.randn(6, 4, requires_grad=True)
    loss = masked_loss(F.cross_entropy, logits, target, exclude=255)
    loss.backward()
    assert torch.equal(loss, torch.zeros(()) if left_out else F.cross_entropy(logits, target))
    assert (logits.grad == 0).all() == bool(left_out)


def of_torch(logits, target, kept, **kw):
    """Give loss and gradient of the batch without the rest, and zeros for that."""
    alone = logits.detach().movedim(1, -1)[kept].requires_grad_()
    loss = F.cross_entropy(alone, target[kept], **kw)
    loss.backward()
    gradient = torch.zeros_like(logits).movedim(1, -1)
    gradient[kept] = alone.grad
    return loss.detach(), gradient.movedim(-1, 1)


def check_function(logits, target, kept, equal_nan=False, **kw):
    expected, gradient = of_torch(logits, target, kept, **kw)
    logits = logits.clone().requires_grad_()
    loss = masked_loss(F.cross_entropy, logits, target, exclude=255, **kw)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, equal_nan=equal_nan)
    torch.testing.assert_close(logits.grad, gradient, equal_nan=equal_nan)
    assert (logits.grad.movedim(1, -1)[~kept] == 0).all()


@each_loss
@pytest.mark.parametrize("place", [0, 2, slice(None)])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38, -3e38])
def test_the_function_with_anything_left_out(kw, garbage, place):
    logits = torch.randn(6, 4)
    logits[LEFT_OUT, place] = garbage
    check_function(logits, TARGET, KEPT, **kw)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_the_function_with_anything_kept(garbage):
    logits = torch.randn(6, 4)
    logits[0, 0] = garbage
    check_function(logits, TARGET, KEPT, equal_nan=True)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, F.nll_loss])
def test_the_loss_has_the_bits_of_torch(loss_fn):
    scores = torch.randn(50, 7).log_softmax(1)
    target = torch.randint(0, 7, (50,))
    target[::3] = 255
    for kw in ({}, {"reduction": "sum"}, {"weight": torch.rand(7)}):
        results = []
        for loss_of in (
            lambda x, kw=kw: loss_fn(x, target, ignore_index=255, **kw),
            lambda x, kw=kw: masked_loss(loss_fn, x, target, exclude=255, **kw),
        ):
            x = scores.clone().requires_grad_()
            loss = loss_of(x)
            loss.backward()
            results.append((loss.detach(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(6, 4), (1, 4, 2, 3)])
def test_the_ignored_index_besides_the_excluded_label(shape):
    target = TARGET.clone()
    target[0] = -100
    places = shape[:1] + shape[2:]
    check_function(torch.randn(shape), target.reshape(places), ((target != 255) & (target >= 0)).reshape(places))


def test_a_label_that_is_no_class_is_still_an_error():
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        masked_loss(F.cross_entropy, torch.randn(6, 4), torch.tensor([0, 255, 4, 1, 255, 3]), exclude=255)


def test_nll_loss_may_have_anything_at_what_is_left_out():
    scores = torch.randn(6, 4).log_softmax(1)
    scores[LEFT_OUT] = math.nan
    scores.requires_grad_()
    masked_loss(F.nll_loss, scores, TARGET, exclude=255).backward()
    assert torch.equal(scores.grad[LEFT_OUT], torch.zeros(2, 4))
    torch.testing.assert_close(scores.grad[KEPT].sum(), torch.tensor(-1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_what_it_casts_for_torch(dtype):
    logits = torch.randn(6, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = masked_loss(F.cross_entropy, logits, TARGET, exclude=255)
        assert torch.equal(ours, F.cross_entropy(logits, TARGET, ignore_index=255))
        assert ours.dtype is F.cross_entropy(logits, TARGET, ignore_index=255).dtype


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [0, 3])
def test_nothing_kept_gives_what_is_asked_for(reduction, size):
    logits = torch.randn(size, 4, requires_grad=True)
    target = torch.full((size,), 255)
    for empty in (0.0, 7.0):
        loss = masked_loss(F.cross_entropy, logits, target, exclude=255, reduction=reduction, empty=empty)
        assert loss.item() == empty
        assert (torch.autograd.grad(loss, logits)[0] == 0).all()


def test_one_sample_without_a_batch():
    logits = torch.randn(4, requires_grad=True)
    assert torch.equal(
        masked_loss(F.cross_entropy, logits, torch.tensor(2), exclude=255), F.cross_entropy(logits, torch.tensor(2))
    )
    assert masked_loss(F.cross_entropy, logits, torch.tensor(255), exclude=255).item() == 0
