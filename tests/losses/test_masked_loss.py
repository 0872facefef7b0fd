"""losses.masked_loss: equal to the loss of the batch without what is left out, for every loss of torch."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg
from gradgate.losses import masked_loss
from tests.witness import value_and_gradients, witness

NAN = math.nan
N, C, D = 6, 4, 3
KEEP = torch.tensor([True, False, True, True, False, True])


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def labels(*shape):
    return torch.randint(0, C, shape)


CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)

# name: (loss, keywords, makes input and target and more, keep of the samples or of the elements, garbage for the input)
ELEMENTWISE = {
    "mse": (F.mse_loss, {}),
    "l1": (F.l1_loss, {}),
    "huber": (F.huber_loss, {"delta": 0.7}),
    "smooth_l1": (F.smooth_l1_loss, {}),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, {}),
    "soft_margin": (F.soft_margin_loss, {}),
    "poisson_nll": (F.poisson_nll_loss, {}),
    "kl_div": (F.kl_div, {"log_target": True, "reduction": "sum"}),
    "mse sum": (F.mse_loss, {"reduction": "sum"}),
    "module": (nn.SmoothL1Loss(beta=0.5), {}),
    "own": (lambda x, t: ((x - t).abs() ** 3).mean(), {}),
}
CLASSES = {
    "cross_entropy": (F.cross_entropy, {}),
    "weighted": (F.cross_entropy, {"weight": CLASS_WEIGHT}),
    "smoothed": (F.cross_entropy, {"label_smoothing": 0.1}),
    "weighted and smoothed": (F.cross_entropy, {"weight": CLASS_WEIGHT, "label_smoothing": 0.1}),
    "sum": (F.cross_entropy, {"reduction": "sum"}),
    "module": (nn.CrossEntropyLoss(weight=CLASS_WEIGHT), {}),
    "nll": (lambda x, t, **kw: F.nll_loss(x, t, **kw), {}),
}
SAMPLES = {
    "triplet": (F.triplet_margin_loss, lambda: (rand(N, D), rand(N, D), rand(N, D)), {}),
    "cosine": (F.cosine_embedding_loss, lambda: (rand(N, D), rand(N, D), torch.tensor([1, -1] * 3)), {"margin": 0.2}),
    "multi_margin": (F.multi_margin_loss, lambda: (rand(N, C), labels(N)), {}),
    "multilabel_margin": (F.multilabel_margin_loss, lambda: (rand(N, C), labels(N, C)), {}),
    "margin_ranking": (F.margin_ranking_loss, lambda: (rand(N), rand(N), torch.tensor([1.0, -1.0] * 3)), {}),
    "hinge": (F.hinge_embedding_loss, lambda: (rand(N), torch.tensor([1.0, -1.0] * 3)), {}),
    "gaussian_nll": (F.gaussian_nll_loss, lambda: (rand(N, D), rand(N, D), rand(N, D).exp()), {}),
    "kl_div batchmean": (
        F.kl_div,
        lambda: (rand(N, C).log_softmax(1), rand(N, C).softmax(1)),
        {"reduction": "batchmean"},
    ),
    "mse of samples": (F.mse_loss, lambda: (rand(N, D, 2), rand(N, D, 2)), {}),
}


def spoil(tensor, where):
    """Put garbage where nobody should look."""
    return torch.where(where.expand(tensor.shape), NAN, tensor) if tensor.is_floating_point() else tensor


def assert_equal_without(ours, theirs, inputs, left_out):
    """Value and gradient are those of the batch without, and exactly 0 goes to what is left out."""
    value, (gradient,) = value_and_gradients(ours, [inputs])
    expected, (their_gradient,) = value_and_gradients(theirs, [torch.where(left_out, 0, inputs)])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, their_gradient)
    assert (gradient[left_out] == 0).all()


@pytest.mark.parametrize(("loss", "kw"), ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_losses(loss, kw):
    keep = torch.rand(N, D) < 0.6
    x, target = rand(N, D), rand(N, D).sigmoid()
    spoiled = spoil(target, ~keep)
    assert_equal_without(
        lambda x: masked_loss(loss, x, spoiled, keep=keep, **kw),
        lambda x: loss(x[keep], target[keep], **kw),
        spoil(x, ~keep),
        ~keep,
    )
    assert_equal_without(
        lambda x: masked_loss(loss, x, spoiled, exclude=NAN, **kw),
        lambda x: loss(x[keep], target[keep], **kw),
        spoil(x, ~keep),
        ~keep,
    )


@pytest.mark.parametrize("shape", [(N,), (N, D), (2, 3, D)], ids=str)
@pytest.mark.parametrize(("loss", "kw"), CLASSES.values(), ids=CLASSES)
def test_losses_with_classes(loss, kw, shape):
    if loss is CLASSES["nll"][0]:
        loss = F.nll_loss
    keep = torch.rand(shape) < 0.6
    keep.view(-1)[0] = True
    target = torch.where(keep, labels(*shape), 255)
    x = rand(shape[0], C, *shape[1:])
    left_out = (~keep).unsqueeze(1).expand(x.shape)
    behind = x.dim() > 2

    def without(x):
        flat = x.movedim(1, -1)[keep] if behind else x[keep]
        return loss(flat, target[keep], **kw)

    for how in ({"exclude": 255}, {"keep": keep}, {"exclude": [255, -1], "keep": keep}):
        assert_equal_without(
            lambda x, how=how: masked_loss(loss, x, target, **how, **kw), without, spoil(x, left_out), left_out
        )


@pytest.mark.parametrize(("loss", "make", "kw"), SAMPLES.values(), ids=SAMPLES)
def test_whole_samples(loss, make, kw):
    first, *rest = make()
    spoiled = [spoil(r, ~KEEP.reshape(-1, *[1] * (r.dim() - 1))) for r in rest]
    left_out = (~KEEP).reshape(-1, *[1] * (first.dim() - 1)).expand(first.shape)
    assert_equal_without(
        lambda x: masked_loss(loss, x, *spoiled, keep=KEEP, **kw),
        lambda x: loss(x[KEEP], *[r[KEEP] for r in rest], **kw),
        spoil(first, left_out),
        left_out,
    )


def test_probabilities_as_targets():
    x, target = rand(N, C, D), rand(N, C, D).softmax(1)
    keep = torch.rand(N, D) < 0.6
    left_out = (~keep).unsqueeze(1).expand(x.shape)
    assert_equal_without(
        lambda x: masked_loss(F.cross_entropy, x, spoil(target, left_out), keep=keep),
        lambda x: F.cross_entropy(x.movedim(1, -1)[keep], target.movedim(1, -1)[keep]),
        spoil(x, left_out),
        left_out,
    )


@pytest.mark.parametrize("joined", [False, True], ids=["padded targets", "joined targets"])
@pytest.mark.parametrize("lengths", [torch.tensor, tuple], ids=["tensor", "tuple"])
def test_an_impossible_ctc_sample(joined, lengths):
    """Three labels in two frames cannot be: an infinite loss, which zero_infinity would count as a sample of 0."""
    x = rand(5, 3, C).log_softmax(2)
    target = torch.randint(1, C, (3, 3))
    frames, sizes = [5, 2, 5], [2, 3, 1]
    given = torch.cat([t[:n] for t, n in zip(target, sizes, strict=True)]) if joined else target
    keep = F.ctc_loss(x, given, tuple(frames), tuple(sizes), reduction="none").isfinite()
    assert keep.tolist() == [True, False, True]
    left_out = (~keep).reshape(1, 3, 1).expand(x.shape)
    assert_equal_without(
        lambda x: masked_loss(F.ctc_loss, x, given, lengths(frames), lengths(sizes), keep=keep),
        lambda x: F.ctc_loss(x[:, keep], target[keep], torch.tensor([5, 5]), torch.tensor([2, 1])),
        x,
        left_out,
    )


def test_ignore_index_keeps_a_nan_row_out_also_by_default():
    x = rand(3, C)
    x[1] = NAN
    for target, kw in (
        (torch.tensor([0, 7, 2]), {"ignore_index": 7}),
        (torch.tensor([0, -100, 2]), {}),
    ):
        leaf = x.clone().requires_grad_()
        loss = masked_loss(F.cross_entropy, leaf, target, **kw)
        loss.backward()
        torch.testing.assert_close(loss, F.cross_entropy(x[[0, 2]], target[[0, 2]]))
        assert torch.equal(leaf.grad[1], torch.zeros(C, dtype=torch.float64))
    module = nn.CrossEntropyLoss(ignore_index=7)
    torch.testing.assert_close(
        masked_loss(module, x, torch.tensor([0, 7, 2])), F.cross_entropy(x[[0, 2]], torch.tensor([0, 2]))
    )


def test_all_ignored_is_zero_with_zero_gradient():
    x = torch.full((2, C), NAN, requires_grad=True)
    loss = masked_loss(F.cross_entropy, x, torch.tensor([255, 255]), exclude=255)
    loss.backward()
    assert loss == 0
    assert torch.equal(x.grad, torch.zeros(2, C))
    assert masked_loss(F.mse_loss, x, x.detach(), exclude=NAN, empty=3.0) == 3
    none = masked_loss(F.mse_loss, x, x.detach(), exclude=NAN, reduction="none")
    assert torch.equal(none, torch.zeros(2, C))


def test_nothing_left_out_is_the_plain_loss():
    x, target = rand(N, C).requires_grad_(), labels(N)
    assert torch.equal(masked_loss(F.cross_entropy, x, target), F.cross_entropy(x, target))
    assert torch.equal(masked_loss(F.mse_loss, x, x.detach() + 1), F.mse_loss(x, x.detach() + 1))
    everything = torch.ones(N, dtype=torch.bool)
    assert torch.equal(masked_loss(F.cross_entropy, x, target, keep=everything), F.cross_entropy(x, target))


@pytest.mark.parametrize(
    "kw", [{}, {"weight": CLASS_WEIGHT}, {"weight": CLASS_WEIGHT, "label_smoothing": 0.2}], ids=str
)
def test_a_weight_of_two_is_the_sample_twice(kw):
    x, target = rand(N, C), labels(N)
    weights = torch.tensor([1, 0, 2, 3, 0, 1])
    spoiled = torch.where((weights == 0)[:, None], NAN, x).requires_grad_()
    ours = masked_loss(F.cross_entropy, spoiled, target, weights=weights.double(), **kw)
    rows = torch.repeat_interleave(torch.arange(N), weights)
    torch.testing.assert_close(ours, F.cross_entropy(x[rows], target[rows], **kw))
    ours.backward()
    assert (spoiled.grad[weights == 0] == 0).all()
    pairs = rand(N, D), rand(N, D)
    torch.testing.assert_close(
        masked_loss(F.mse_loss, *pairs, weights=weights.double()), F.mse_loss(*[p[rows] for p in pairs])
    )
    torch.testing.assert_close(
        masked_loss(nn.MSELoss(reduction="sum"), *pairs, weights=weights.double()),
        F.mse_loss(*[p[rows] for p in pairs], reduction="sum"),
    )


def test_unreduced_has_zeros_in_the_gaps():
    x, target = rand(2, C, D), torch.tensor([[0, 255, 1], [255, 2, 3]])
    ours = masked_loss(F.cross_entropy, x, target, exclude=255, reduction="none")
    assert torch.equal(ours, F.cross_entropy(x, target, ignore_index=255, reduction="none"))


def test_weights_of_the_loss_that_broadcast_are_picked_along():
    x, target, keep = rand(N, C), rand(N, C).sigmoid(), torch.rand(N, C) < 0.5
    pos_weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    full = F.binary_cross_entropy_with_logits(x, target, pos_weight=pos_weight, reduction="none")
    ours = masked_loss(F.binary_cross_entropy_with_logits, x, target, keep=keep, pos_weight=pos_weight)
    torch.testing.assert_close(ours, full[keep].mean())
    variance = rand(N).exp()
    full = F.gaussian_nll_loss(x, target, variance[:, None].expand(N, C), reduction="none")
    torch.testing.assert_close(masked_loss(F.gaussian_nll_loss, x, target, variance, keep=keep), full[keep].mean())


@pytest.mark.slow
@pytest.mark.parametrize("kw", [{}, {"weight": CLASS_WEIGHT}, {"label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
def test_compiled_mapped_and_without_data(kw):
    """There a harmless value stands in for what is left out; everything else stays as it is."""
    target = torch.tensor([0, 255, 2])
    x = rand(3, C)
    x[1] = NAN
    witness(
        lambda x: masked_loss(F.cross_entropy, x, target, exclude=255, **kw),
        lambda x: F.cross_entropy(x[[0, 2]], target[[0, 2]], **kw),
        x,
        promises={"compile", "fake", "func_grad", "jvp", "noncontiguous"},
    )
    keep = torch.tensor([True, False, True])
    witness(
        lambda x, k: masked_loss(F.mse_loss, x, torch.ones(3, dtype=x.dtype), keep=k),
        lambda x, k: ((x - 1) ** 2 * k).sum() / k.sum(),
        rand(3),
        keep,
        promises={"compile", "fake", "func_grad", "vmap", "jvp", "bfloat16", "float16", "gradcheck", "gradgradcheck"},
    )


@pytest.mark.slow
def test_wrong_arguments():
    x = torch.ones(2, 3)
    with pytest.raises(gg.errors.ArgumentTypeError, match="`target` is the list"):
        masked_loss(F.mse_loss, x, [1, 2])
    with pytest.raises(gg.errors.ArgumentValueError, match=r"`keep` has shape \(4,\)"):
        masked_loss(F.mse_loss, x, x, keep=torch.ones(4, dtype=torch.bool))
    with pytest.raises(gg.errors.ArgumentTypeError, match="`keep` is a float32 tensor"):
        masked_loss(F.mse_loss, x, x, keep=x)
    with pytest.raises(
        gg.errors.ArgumentValueError, match=r'(?s)"batchmean" with single elements.*keep of shape \(n,\)'
    ):
        masked_loss(F.kl_div, x, x, keep=torch.ones(2, 3, dtype=torch.bool), reduction="batchmean")
    compiled = torch.compile(masked_loss, backend="eager")
    with pytest.raises(gg.errors.ArgumentValueError, match="triplet_margin_loss takes whole samples"):
        compiled(F.triplet_margin_loss, x, x, x, keep=torch.tensor([True, False]))
    torch._dynamo.reset()


def test_wrong_functions_masks_and_weights():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    for wrong, kw in (
        (r"(?s)`loss_fn` is the str 'mse'.*exclude=-100", {"loss_fn": "mse"}),
        (r"(?s)`keep` is the list.*keep=torch.as_tensor", {"keep": [True, False]}),
        ("`weights` is the list", {"weights": [1.0, 0.0]}),
        (r"(?s)`weights` is a complex64 tensor.*weights.abs", {"weights": torch.ones(2, dtype=torch.complex64)}),
    ):
        with pytest.raises(gg.errors.ArgumentTypeError, match=wrong):
            masked_loss(**{"loss_fn": F.mse_loss, "input": x, "target": y} | kw)
    with pytest.raises(gg.errors.ArgumentValueError, match=r"`weights` has shape \(4,\)"):
        masked_loss(F.mse_loss, x, y, weights=torch.ones(4))
