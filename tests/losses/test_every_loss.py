"""losses.masked_loss for every loss of torch: all reductions, batched, unbatched and 0-dim, with and without masks.

There are as many samples as classes and columns, so that a mix-up of the two raises nothing and must show in the value.
"""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradgate.errors import ArgumentValueError
from gradgate.losses import masked_loss

# torch says that "mean" will change one day
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
N = C = 4
KEEP = torch.tensor([True, False, True, False])
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
HAS_LINEAR = hasattr(nn, "LinearCrossEntropyLoss")


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def labels(*shape):
    return torch.randint(0, C, shape)


def signs(*shape):
    return torch.randint(0, 2, shape).double() * 2 - 1


def pair(*batch):
    return rand(*batch, C), rand(*batch, C)


def probabilities(*batch):
    return rand(*batch, C).sigmoid(), rand(*batch, C).sigmoid()


def classes(*batch):
    return rand(*batch, C).log_softmax(-1), labels(*batch)


# name: (function, module, keywords of both, arguments of a batch shape)
ELEMENTS = {
    "mse": (F.mse_loss, nn.MSELoss, {}, pair),
    "l1": (F.l1_loss, nn.L1Loss, {}, pair),
    "huber": (F.huber_loss, nn.HuberLoss, {"delta": 0.7}, pair),
    "smooth_l1": (F.smooth_l1_loss, nn.SmoothL1Loss, {"beta": 0.7}, pair),
    "bce": (F.binary_cross_entropy, nn.BCELoss, {}, probabilities),
    "bce weighted": (F.binary_cross_entropy, nn.BCELoss, {"weight": CLASS_WEIGHT}, probabilities),
    "bce_with_logits": (
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss,
        {"pos_weight": CLASS_WEIGHT},
        probabilities,
    ),
    "soft_margin": (F.soft_margin_loss, nn.SoftMarginLoss, {}, lambda *b: (rand(*b, C), signs(*b, C))),
    "poisson_nll": (F.poisson_nll_loss, nn.PoissonNLLLoss, {"full": True}, probabilities),
    "kl_div": (F.kl_div, nn.KLDivLoss, {}, probabilities),
    "gaussian_nll": (F.gaussian_nll_loss, nn.GaussianNLLLoss, {}, lambda *b: (*pair(*b), rand(*b, C).exp())),
    "hinge": (F.hinge_embedding_loss, nn.HingeEmbeddingLoss, {}, lambda *b: (rand(*b, C), signs(*b, C))),
    "margin_ranking": (F.margin_ranking_loss, nn.MarginRankingLoss, {}, lambda *b: (*pair(*b), signs(*b, C))),
}
SAMPLES = {
    "cross_entropy": (F.cross_entropy, nn.CrossEntropyLoss, {"label_smoothing": 0.1}, classes),
    "cross_entropy weighted": (F.cross_entropy, nn.CrossEntropyLoss, {"weight": CLASS_WEIGHT}, classes),
    "cross_entropy of probabilities": (
        F.cross_entropy,
        nn.CrossEntropyLoss,
        {},
        lambda *b: (rand(*b, C), rand(*b, C).softmax(-1)),
    ),
    "nll": (F.nll_loss, nn.NLLLoss, {"weight": CLASS_WEIGHT}, classes),
    "triplet": (F.triplet_margin_loss, nn.TripletMarginLoss, {}, lambda *b: (*pair(*b), rand(*b, C))),
    "triplet with distance": (
        F.triplet_margin_with_distance_loss,
        nn.TripletMarginWithDistanceLoss,
        {},
        lambda *b: (*pair(*b), rand(*b, C)),
    ),
    "cosine": (F.cosine_embedding_loss, nn.CosineEmbeddingLoss, {"margin": 0.2}, lambda *b: (*pair(*b), signs(*b))),
    "multi_margin": (F.multi_margin_loss, nn.MultiMarginLoss, {"weight": CLASS_WEIGHT}, classes),
    "multilabel_margin": (
        F.multilabel_margin_loss,
        nn.MultiLabelMarginLoss,
        {},
        lambda *b: (rand(*b, C), labels(*b, C)),
    ),
    "multilabel_soft_margin": (
        F.multilabel_soft_margin_loss,
        nn.MultiLabelSoftMarginLoss,
        {"weight": CLASS_WEIGHT},
        probabilities,
    ),
}
BATCHES = {"batched": (N,), "unbatched": ()}
REDUCTIONS = ("mean", "sum", "none")


def test_every_loss_of_torch_is_in_the_table():
    tested = {entry[0].__name__ for entry in (*ELEMENTS.values(), *SAMPLES.values())}
    tested |= {"ctc_loss", "linear_cross_entropy"}  # below
    there = {name for name in dir(F) if name.endswith(("_loss", "_entropy", "kl_div", "_with_logits"))}
    assert tested >= there - {"adaptive_log_softmax_with_loss"}


def value_and_gradients(loss, arguments):
    leaves = [a.clone().requires_grad_() if a.is_floating_point() else a for a in arguments]
    if leaves[1].is_floating_point() and leaves[1].detach().abs().eq(1).all():
        leaves[1].requires_grad_(False)  # soft_margin_loss takes no target with a gradient
    value = loss(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
    return value.detach(), gradients


def assert_same(ours, theirs, arguments, spoiled=None):
    value, gradients = value_and_gradients(ours, arguments if spoiled is None else spoiled)
    expected, their_gradients = value_and_gradients(theirs, arguments)
    torch.testing.assert_close(value, expected)
    for gradient, their_gradient in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(gradient, their_gradient)


def spoil(argument, kept):
    """Put NaN where nobody should look; signs stay signs."""
    if not argument.is_floating_point() or argument.abs().eq(1).all():
        return argument
    return torch.where(kept.reshape([*kept.shape, *[1] * (argument.dim() - kept.dim())]), argument, math.nan)


def forms(table):
    return [
        pytest.param(*entry, reduction, as_module, id=f"{name}-{reduction}-{'module' if as_module else 'function'}")
        for name, entry in table.items()
        for reduction in (*REDUCTIONS, *(["batchmean"] if name == "kl_div" else []))
        for as_module in (False, True)
    ]


def called(function, module, kw, reduction, as_module):
    """Give a loss, and the keywords to call it with."""
    return (module(reduction=reduction, **kw), {}) if as_module else (function, {"reduction": reduction, **kw})


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("function", "module", "kw", "make", "reduction", "as_module"), forms(ELEMENTS | SAMPLES))
def test_with_nothing_left_out_it_is_the_loss_itself(function, module, kw, make, reduction, as_module, batch):
    loss, kw = called(function, module, kw, reduction, as_module)
    arguments = make(*batch)
    unreduced = (module(reduction="none") if as_module else function)(
        *arguments, **({} if as_module else kw | {"reduction": "none"})
    )
    everything = torch.ones(unreduced.shape, dtype=torch.bool)
    hows = [{}, {"exclude": 77}]
    if reduction != "batchmean" or not batch:
        hows += [{"keep": everything}, {"exclude": [77, 78], "keep": everything}]
        hows += [{"weights": everything.double()}] if reduction != "batchmean" else []
    if batch and reduction != "batchmean":
        hows += [{"keep": torch.ones(N, dtype=torch.bool)}, {"weights": torch.ones(N)}]
    if batch and reduction == "batchmean":
        hows = [{}, {"keep": torch.ones(N, dtype=torch.bool)}]
    for how in hows:
        assert_same(lambda *a, how=how: masked_loss(loss, *a, **how, **kw), lambda *a: loss(*a, **kw), arguments)


@pytest.mark.parametrize(("function", "module", "kw", "make", "reduction", "as_module"), forms(ELEMENTS | SAMPLES))
def test_left_out_samples_are_as_if_they_had_not_been_there(function, module, kw, make, reduction, as_module):
    loss, kw = called(function, module, kw, reduction, as_module)
    arguments = make(N)
    spoiled = [spoil(argument, KEEP) for argument in arguments]
    elementwise = any(entry[0] is function for entry in ELEMENTS.values())

    def without(*arguments):
        kept = loss(*[argument[KEEP] for argument in arguments], **kw)
        if reduction != "none":
            return kept
        whole = torch.zeros(N, *kept.shape[1:], dtype=kept.dtype)
        return whole.index_put((KEEP.nonzero().squeeze(1),), kept)

    hows = [{"keep": KEEP}]
    if reduction != "batchmean":
        hows += [{"weights": KEEP.double()}]
    if elementwise and reduction != "batchmean":
        hows += [{"keep": KEEP.unsqueeze(1).expand(N, C)}]
    for how in hows:
        assert_same(lambda *a, how=how: masked_loss(loss, *a, **how, **kw), without, arguments, spoiled)


@pytest.mark.parametrize(("function", "module", "kw", "make", "reduction", "as_module"), forms(SAMPLES))
def test_one_sample_without_a_batch_may_be_left_out(function, module, kw, make, reduction, as_module):
    loss, kw = called(function, module, kw, reduction, as_module)
    arguments = [spoil(argument, torch.tensor(False)) for argument in make()]
    for how in ({"keep": torch.tensor(False)}, {"weights": torch.tensor(0.0)}):
        value, gradients = value_and_gradients(lambda *a, how=how: masked_loss(loss, *a, **how, **kw), arguments)
        assert torch.equal(value, torch.zeros((), dtype=value.dtype))
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", [*ELEMENTS, "multi_margin", "multilabel_margin"])
def test_numbers_without_a_dimension(name, reduction):
    function, module, kw, make = (ELEMENTS | SAMPLES)[name]
    kw = {key: value[0] if key == "pos_weight" else value for key, value in kw.items() if key != "weight"}
    arguments = [a if a.dim() == 0 else a[0] for a in make()]
    if name in ("multi_margin", "multilabel_margin"):
        arguments = [arguments[0], torch.tensor(0)]
    for loss, more in ((function, {"reduction": reduction, **kw}), (module(reduction=reduction, **kw), {})):
        for how in ({}, {"keep": torch.tensor(True)}, {"weights": torch.tensor(1.0)}, {"exclude": 77}):
            assert_same(
                lambda *a, how=how, loss=loss, more=more: masked_loss(loss, *a, **how, **more),
                lambda *a, loss=loss, more=more: loss(*a, **more),
                arguments,
            )
        gone, gradients = value_and_gradients(
            lambda *a, loss=loss, more=more: masked_loss(loss, *a, keep=torch.tensor(False), **more),
            [spoil(argument, torch.tensor(False)) for argument in arguments],
        )
        assert gone.shape == ()
        assert gone == 0
        assert not any(gradient.any() for gradient in gradients)


def test_arguments_by_position_are_those_by_name():
    """A weight of the classes is not one of the samples, also where there are as many of both."""
    for name in ("bce weighted", "cross_entropy weighted", "nll", "multi_margin", "multilabel_soft_margin"):
        function, _, kw, make = (ELEMENTS | SAMPLES)[name]
        arguments = make(N)
        settings = (1, 1.0) if function is F.multi_margin_loss else ()
        for how in ({"keep": KEEP}, {"weights": KEEP.double() * 2}):
            ours = masked_loss(function, *arguments, *settings, kw["weight"], **how)
            torch.testing.assert_close(ours, masked_loss(function, *arguments, **how, **kw))
            torch.testing.assert_close(ours, function(*[a[KEEP] for a in arguments], **kw))
    x, y, z = rand(N, C), rand(N, C), rand(N, C)
    expected = F.triplet_margin_loss(x[KEEP], y[KEEP], z[KEEP], margin=0.5)
    for ours in (
        masked_loss(F.triplet_margin_loss, x, y, z, 0.5, keep=KEEP),
        masked_loss(F.triplet_margin_loss, x, y, negative=z, margin=0.5, keep=KEEP),
        masked_loss(nn.TripletMarginLoss(margin=0.5), x, y, negative=z, keep=KEEP),
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_the_old_names_of_reductions():
    x, y = pair(N)
    twos = torch.full((N,), 2.0)
    torch.testing.assert_close(
        masked_loss(F.mse_loss, x, y, weights=twos, size_average=False), F.mse_loss(x, y, reduction="sum") * 2
    )
    torch.testing.assert_close(
        masked_loss(F.mse_loss, x, y, False, weights=twos), F.mse_loss(x, y, reduction="sum") * 2
    )
    assert masked_loss(F.mse_loss, x, y, weights=twos, reduce=False).shape == (N, C)


@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_weights_beside_the_weight_of_the_loss(function):
    if "weight" not in inspect.signature(function).parameters:
        pytest.skip("this torch has no weight here")
    x, y = pair(N)
    own = rand(N, C).exp()
    rows = torch.tensor([0, 0, 2])
    ours = masked_loss(function, x, y, weight=own, weights=torch.tensor([2.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(ours, function(x[rows], y[rows], weight=own[rows]))


@pytest.mark.parametrize("function", [F.margin_ranking_loss, F.cosine_embedding_loss])
def test_exclude_is_about_the_target_where_that_comes_third(function):
    x, y = pair(N) if function is F.cosine_embedding_loss else (rand(N), rand(N))
    target = torch.tensor([1.0, 0.0, -1.0, 0.0])
    y[0] = 0.0
    ours = masked_loss(function, x, y, target, exclude=0)
    torch.testing.assert_close(ours, function(x[KEEP], y[KEEP], target[KEEP]))


# --- a loss of one's own, whose input and target do not broadcast -----------------------------------------------------


def focal(logits, target, reduction="mean"):
    each = F.cross_entropy(logits, target, reduction="none")
    each = (1 - torch.exp(-each)) ** 2 * each
    return each if reduction == "none" else getattr(each, reduction)()


@pytest.mark.parametrize("classes", [C, C + 3])
def test_a_loss_of_logits_and_labels(classes):
    logits, target = rand(N, classes), labels(N)
    assert torch.equal(masked_loss(focal, logits, target), focal(logits, target))
    spoiled = torch.where(KEEP, target, 255)
    expected = focal(logits[KEEP], target[KEEP])
    for how in ({"exclude": 255}, {"keep": KEEP}, {"weights": KEEP.double()}):
        torch.testing.assert_close(masked_loss(focal, logits, spoiled, **how), expected)


def test_positions_of_a_loss_that_is_not_known_are_refused_with_a_way_out():
    logits, target = rand(2, 5, 3), torch.tensor([[0, 1, 2], [0, 255, 2]])
    assert torch.equal(masked_loss(F.cross_entropy, logits[:1], target[:1]), F.cross_entropy(logits[:1], target[:1]))
    with pytest.raises(
        ArgumentValueError, match=r"(?s)focal have shapes \(2, 5, 3\), \(2, 3\).*keep=\(target != 255\)"
    ):
        masked_loss(focal, logits, target, exclude=255)
    ours = masked_loss(focal, logits, target, keep=(target != 255).flatten(1).all(1))
    torch.testing.assert_close(ours, focal(logits[:1], target[:1]))


# --- linear_cross_entropy ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_LINEAR, reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probable", [False, True], ids=["labels", "probabilities"])
@pytest.mark.parametrize("outputs", [(), (3,), (2, 3)], ids=str)
def test_linear_cross_entropy(outputs, probable, reduction):
    weight = None if probable else CLASS_WEIGHT
    module = nn.LinearCrossEntropyLoss(
        C, C, out_features=outputs, bias=True, dtype=torch.float64, reduction=reduction, weight=weight
    )
    x = rand(N, C)
    target = rand(N, C, *outputs).softmax(1) if probable else labels(N, *outputs)
    linear_weight, bias = module.linear.weight.reshape(C, *outputs, C), module.linear.bias.reshape(C, *outputs)

    def function(x, target, **how):
        settings = {"linear_bias": bias, "reduction": reduction, "weight": weight}
        return masked_loss(F.linear_cross_entropy, x, linear_weight, target, **settings, **how)

    def alone(loss, x):
        value = loss(x)
        return value.detach(), *torch.autograd.grad(value.sum(), (x, *module.parameters()))

    def without(x):
        kept = module(x[KEEP], target[KEEP])
        return (
            torch.zeros(N, *outputs).double().index_put((KEEP.nonzero()[:, 0],), kept) if reduction == "none" else kept
        )

    for how, expected in (({}, lambda x: module(x, target)), ({"keep": KEEP}, without)):
        given = x if not how else spoil(x, KEEP)
        wanted = alone(expected, x.clone().requires_grad_())
        for ours in (
            lambda x, how=how: masked_loss(module, x, target, **how),
            lambda x, how=how: function(x, target, **how),
        ):
            torch.testing.assert_close(alone(ours, given.clone().requires_grad_()), wanted)
    if not probable:
        left_out = torch.rand(N, *outputs) < 0.5
        labelled = torch.where(left_out, 255, target)
        logits = module.linear(x).unflatten(1, (C, *outputs))
        settings = {"ignore_index": 255, "reduction": reduction, "weight": weight}
        expected = F.cross_entropy(logits, labelled, **settings)
        torch.testing.assert_close(masked_loss(module, x, labelled, exclude=255), expected)
        torch.testing.assert_close(function(x, labelled, exclude=255), expected)
    if not outputs:
        assert torch.equal(masked_loss(module, x[0], target[0]), module(x[0], target[0]))
        assert masked_loss(module, x[0], target[0], keep=torch.tensor(False)) == 0


# --- ctc --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lengths", [torch.tensor, int], ids=["tensors", "numbers"])
def test_ctc_without_a_batch(reduction, lengths):
    scores, target = rand(6, 5).log_softmax(-1), torch.tensor([1, 2, 1])
    size = (lengths(6), lengths(3)) if lengths is torch.tensor else ((6,), (3,))
    for loss, kw in ((F.ctc_loss, {"reduction": reduction}), (nn.CTCLoss(reduction=reduction), {})):
        expected = loss(scores, target, *size, **kw)
        for how in ({}, {"keep": torch.tensor(True)}, {"weights": torch.tensor(1.0)}):
            torch.testing.assert_close(masked_loss(loss, scores, target, *size, **how, **kw), expected)
        gone = masked_loss(loss, spoil(scores, torch.tensor(False)), target, *size, keep=torch.tensor(False), **kw)
        assert gone == 0
        assert gone.shape == ()


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_one_sample_each_under_vmap(name):
    function, _, kw, make = SAMPLES[name]
    x, target = make(N)
    spoiled, labelled = spoil(x, KEEP), torch.where(KEEP, target, 255)
    ours = torch.vmap(lambda x, t: masked_loss(function, x, t, exclude=255, reduction="none", **kw))(spoiled, labelled)
    torch.testing.assert_close(ours[KEEP], function(x[KEEP], target[KEEP], reduction="none", **kw))
    assert torch.equal(ours[~KEEP], torch.zeros(2, dtype=torch.float64))
