"""One answer and one weight for each sample, where a sample has several losses; and tensors that the loss has."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradgate.losses import masked_loss

NAN = math.nan
KEEP = torch.tensor([True, False, True, True, False])
WEIGHTS = torch.tensor([0.5, 9.0, 0.0, 2.0, 1.0])
COLUMNS = torch.tensor([1.0, 2.0, 3.0])


def arguments():
    """Three samples are kept and there are three columns, so that a mix-up of the two raises nothing."""
    x, target = torch.randn(5, 3), torch.rand(5, 3).round()
    x[1], target[4] = NAN, NAN
    return x.requires_grad_(), target


def cubed(x, target, reduction="mean"):
    losses = (x - target).abs() ** 3
    return losses if reduction == "none" else getattr(losses, reduction)()


@pytest.mark.parametrize("way", ["eager", "vmap"])
@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS[:, None].expand(5, 3)], ids=["", "samples", "elements"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss_fn", [F.mse_loss, cubed, nn.L1Loss()], ids=["function", "own", "module"])
def test_it_is_the_loss_of_the_kept_samples(loss_fn, reduction, weights, way):
    if isinstance(loss_fn, nn.Module):
        loss_fn = nn.L1Loss(reduction=reduction)
        options, plain = {}, lambda x, t: nn.L1Loss(reduction="none")(x, t)
    else:
        options, plain = {"reduction": reduction}, lambda x, t: loss_fn(x, t, reduction="none")
    x, target = arguments()

    def evaluate(x):
        return masked_loss(loss_fn, x, target, keep=KEEP, weights=weights, **options)

    loss = torch.vmap(evaluate)(x.unsqueeze(0)).squeeze(0) if way == "vmap" else evaluate(x)
    each = torch.ones(5, 3) if weights is None else WEIGHTS[:, None].expand(5, 3)
    unreduced = torch.zeros(5, 3)
    unreduced[KEEP] = plain(x[KEEP], target[KEEP]) * each[KEEP]
    expected = unreduced if reduction == "none" else unreduced.sum()
    expected = expected / each[KEEP].sum() if reduction == "mean" else expected
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(value.sum(), x)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, torch.where(KEEP[:, None], theirs, 0))


@pytest.mark.slow
def test_samples_are_left_out_of_a_compiled_loss():
    x, target = arguments()
    compiled = torch.compile(lambda x: masked_loss(F.mse_loss, x, target, keep=KEEP, weights=WEIGHTS), fullgraph=True)
    ours, eager = compiled(x), masked_loss(F.mse_loss, x, target, keep=KEEP, weights=WEIGHTS)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(eager, x))


def test_nothing_kept_has_the_shape_of_the_unreduced_loss():
    x, target = arguments()
    loss = masked_loss(F.mse_loss, x, target, keep=torch.zeros(5, dtype=torch.bool), reduction="none")
    assert torch.equal(loss, torch.zeros(5, 3))
    assert torch.equal(torch.autograd.grad(loss.sum(), x)[0], torch.zeros(5, 3))


def test_batchmean_counts_samples():
    x, target = torch.randn(5, 3).log_softmax(1), torch.rand(5, 3).softmax(1)
    loss = masked_loss(F.kl_div, x, target, keep=KEEP, weights=torch.full((5,), 2.0), reduction="batchmean")
    torch.testing.assert_close(loss, F.kl_div(x[KEEP], target[KEEP], reduction="batchmean"))


@pytest.mark.parametrize("keep", [KEEP, KEEP[:, None] & torch.tensor([True, False, False])], ids=["rows", "elements"])
@pytest.mark.parametrize("weight", [COLUMNS, torch.rand(5, 1), torch.rand(5, 3)], ids=["columns", "rows", "elements"])
@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_tensors_of_the_loss_stay_beside_their_elements(name, weight, keep):
    x, target = arguments()
    kept = keep if keep.dim() == 2 else keep[:, None].expand(5, 3)
    function, module = F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(**{name: weight})
    expected = function(x, target, reduction="none", **{name: weight})[kept].mean()
    torch.testing.assert_close(masked_loss(module, x, target, keep=keep), expected)
    torch.testing.assert_close(masked_loss(function, x, target, keep=keep, **{name: weight}), expected)
    if name == "weight":
        probabilities = x.sigmoid()
        torch.testing.assert_close(masked_loss(nn.BCELoss(weight), probabilities, target, keep=keep), expected)


def test_a_variance_is_picked_as_a_keyword_too():
    x, target = arguments()
    for variance in (torch.rand(5, 1) + 0.1, torch.rand(5, 3) + 0.1):
        expected = F.gaussian_nll_loss(x[KEEP], target[KEEP], variance[KEEP])
        torch.testing.assert_close(masked_loss(F.gaussian_nll_loss, x, target, keep=KEEP, var=variance), expected)


def test_ctc_with_weights_divides_by_lengths_and_takes_keywords():
    scores, target = torch.randn(6, 4, 5).log_softmax(2), torch.randint(1, 5, (4, 3))
    lengths = {"input_lengths": torch.tensor([6, 6, 5, 6]), "target_lengths": torch.tensor([3, 2, 0, 3])}
    plain = F.ctc_loss(scores, target, **lengths)
    torch.testing.assert_close(masked_loss(F.ctc_loss, scores, target, weights=torch.ones(4), **lengths), plain)
    first = {name: value[:2] for name, value in lengths.items()}
    expected = F.ctc_loss(scores[:, :2], target[:2], **first)
    for without in ({"keep": torch.arange(4) < 2}, {"weights": torch.tensor([3.0, 3.0, 0.0, 0.0])}):
        torch.testing.assert_close(masked_loss(nn.CTCLoss(), scores, target, *lengths.values(), **without), expected)
        torch.testing.assert_close(masked_loss(F.ctc_loss, scores, target, **lengths, **without), expected)
