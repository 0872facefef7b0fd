"""gg.route: each parameter gets the gradients of the losses that may train it; conflicts are measured and resolved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateWarning, NothingMatchedError

LOSSES = ("size", "class", "rank")
PARTS = ("encoder", "head", "scale")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def losses(self, x):
        code = self.encoder(x)
        out = self.head(code) * self.scale
        return {"size": code.square().mean(), "class": out.exp().mean(), "rank": (out[:, 0] - code[:, 0]).mean()}


def make(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(6, 3)


def gradients_of(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def oracle(model, x, allowed):
    """Each loss by itself, for each parameter by itself."""
    gradients = {}
    for name, parameter in model.named_parameters():
        total = None
        for loss in LOSSES:
            if loss in allowed.get(name.split(".")[0], ()):
                (one,) = torch.autograd.grad(model.losses(x)[loss], parameter, allow_unused=True)
                total = total if one is None else one if total is None else total + one
        gradients[name] = total
    return gradients


@given(st.fixed_dictionaries({part: st.lists(st.sampled_from(LOSSES), unique=True) for part in PARTS}), st.booleans())
def test_gradients_are_the_sums_of_the_allowed_losses(allowed, measure):
    model, x = make()
    used = {loss for names in allowed.values() for loss in names}
    losses = {name: loss for name, loss in model.losses(x).items() if name in used}
    routes = {"encoder.*": allowed["encoder"], model.head: allowed["head"], "scale": allowed["scale"]}
    routing = gg.route(routes, losses, model, measure=measure)
    expected, got = oracle(model, x, allowed), gradients_of(model)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])
    assert routing.backwards <= len(losses)


def test_losses_with_the_same_parameters_share_a_backward_and_the_graph_is_freed():
    model, x = make()
    losses = model.losses(x)
    assert gg.route({"*": LOSSES}, losses, model).backwards == 1
    with pytest.raises(RuntimeError, match="second time"):
        losses["class"].backward()
    losses = model.losses(x)
    gg.route({"encoder.*": ["size"], "*": ["class", "rank"]}, losses, model, retain_graph=True)
    assert gg.route({"encoder.*": ["size"], "head.*": ["class", "rank"], "scale": []}, losses, model).backwards == 2


def test_gradients_are_added_to_those_that_are_there():
    model, x = make()
    gg.route({"*": LOSSES}, model.losses(x), model)
    once = gradients_of(model)
    for options in ({}, {"measure": True}, {"measure": True, "retain_graph": True}):
        before = gradients_of(model)
        gg.route({"*": LOSSES}, model.losses(x), model, **options)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, before[name] + once[name])


def vector_losses(*directions, bias=None):
    """Losses whose gradients are these vectors."""
    model = nn.Linear(len(directions[0]), 1, bias=False).double()
    vectors = [torch.tensor(direction, dtype=torch.float64) for direction in directions]
    return model, {name: (model.weight[0] * v).sum() for name, v in zip("abc", vectors, strict=False)}, vectors


def test_the_cosine_of_two_losses():
    model, losses, (a, b) = vector_losses([3.0, 4.0], [1.0, -1.0])
    routing = gg.route({"*": ["a", "b"]}, losses, model, measure=True)
    (conflict,) = routing.conflicts
    assert (conflict.layer, conflict.losses) == ("", ("a", "b"))
    assert conflict.cosine == pytest.approx((a @ b / (a.norm() * b.norm())).item())
    assert repr(routing) == "Routing(a: 1 parameters; b: 1 parameters; lowest cosine -0.14, a and b in model)"
    assert torch.equal(model.weight.grad[0], a + b)


def test_pcgrad_of_two_losses_in_closed_form():
    model, losses, (a, b) = vector_losses([1.0, 0.0, 2.0], [-1.0, 1.0, 0.0])
    gg.route({"*": ["a", "b"]}, losses, model, resolve="pcgrad")
    torch.testing.assert_close(model.weight.grad[0], a - (a @ b) / (b @ b) * b + b - (a @ b) / (a @ a) * a)
    model, losses, (a, b) = vector_losses([1.0, 0.0, 2.0], [1.0, 1.0, 0.0])  # no conflict
    gg.route({"*": ["a", "b"]}, losses, model, resolve="pcgrad")
    assert torch.equal(model.weight.grad[0], a + b)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=3, max_size=3))
def test_pcgrad_of_three_losses_against_a_loop(vectors):
    model, losses, vectors = vector_losses(*[[float(v) for v in vector] for vector in vectors])
    gg.route({"*": ["a", "b", "c"]}, losses, model, resolve="pcgrad")
    expected = torch.zeros(3, dtype=torch.float64)
    for i, one in enumerate(vectors):
        for j, other in enumerate(vectors):
            if i != j and one @ other < 0:
                one = one - (one @ other) / (other @ other) * other
        expected += one
    torch.testing.assert_close(model.weight.grad[0], expected)


def test_pcgrad_keeps_to_the_routes():
    """A loss changes nothing in what it does not train: outside, gradients are those of the others alone."""
    model, x = make()
    routes = {"encoder.*": ["size", "class"], "head.*": ["class"], "scale": ["rank"]}
    gg.route(routes, model.losses(x), model, resolve="pcgrad")
    resolved = gradients_of(model)
    expected = oracle(model, x, {"head": ["class"], "scale": ["rank"]})
    for name in ("head.weight", "head.bias", "scale"):
        torch.testing.assert_close(resolved[name], expected[name])
    parts = [oracle(model, x, {"encoder": [loss]}) for loss in ("size", "class")]
    a, b = (torch.cat([part["encoder.weight"].flatten(), part["encoder.bias"]]) for part in parts)
    if a @ b < 0:
        a, b = a - (a @ b) / (b @ b) * b, b - (a @ b) / (a @ a) * a
    got = torch.cat([resolved["encoder.weight"].flatten(), resolved["encoder.bias"]])
    torch.testing.assert_close(got, a + b)


def test_frozen_pinned_tied_and_unreached_parameters():
    model, x = make()
    model.tied = model.head
    gg.freeze(model, "encoder.weight")
    gg.pin(model.head.weight, rows=[0])
    model.unused = nn.Linear(1, 1)
    for options in ({}, {"resolve": "pcgrad"}):
        model.zero_grad()
        routing = gg.route({"*": LOSSES}, model.losses(x), model, **options)
        assert model.encoder.weight.grad is None
        assert model.unused.weight.grad is None
        assert model.head.weight.grad[0].eq(0).all()
        assert model.head.weight.grad[1].ne(0).any()
        assert routing.trains["class"].count("head.weight") == 1
        assert not any(name.startswith("tied") for name in routing.trains["class"])


def test_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True)
    out = table(torch.tensor([1, 3]))
    gg.route({"*": ["a", "b"]}, {"a": out.sum(), "b": -2 * out[0].sum()}, table, resolve="pcgrad")
    a, b = torch.tensor([1.0, 1, 1, 1]), torch.tensor([-2.0, -2, 0, 0])
    expected = a - (a @ b) / (b @ b) * b + b - (a @ b) / (a @ a) * a
    assert torch.allclose(table.weight.grad.to_dense()[[1, 3]].flatten(), expected)


def test_a_part_in_no_route_is_said_and_gets_nothing():
    model, x = make()
    with pytest.warns(GradgateWarning, match=r"route\(\): scale of Model is in no route and gets no gradient"):
        routing = gg.route({"encoder.*": ["size"], "head.*": ["class", "rank"]}, model.losses(x), model)
    assert routing.unrouted == ("scale",)
    assert model.scale.grad is None


def test_a_backward_that_raises_leaves_gradients_as_they_were():
    model, x = make()
    model.scale.grad = torch.full((2,), 7.0)
    losses = model.losses(x)
    losses["class"].backward()  # frees a part of the graph
    before = gradients_of(model)
    with pytest.raises(RuntimeError, match="second time"):
        gg.route({"*": LOSSES}, losses, model, measure=True)
    after = gradients_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda m, x: gg.route({"*": ["clas"]}, m.losses(x), m),
            ArgumentValueError,
            (
                "route(): '*' is routed to 'clas', which is no loss.\nWhy: the losses are 'size', 'class', 'rank'.\n"
                "Fix: 'class'"
            ),
        ),
        (
            lambda m, x: gg.route({"*": ["size", "class"]}, m.losses(x), m),
            ArgumentValueError,
            "route(): 'rank' is in no route.\nWhy: it would train nothing.",
        ),
        (
            lambda m, x: gg.route({"*": ["a"]}, {"a": m.head(m.encoder(x))}, m),
            ArgumentTypeError,
            (
                "route(): the loss 'a' is a float32 tensor of shape (6, 2).\nWhy: a gradient is that of one number.\n"
                "Fix: {'a': loss.mean()}"
            ),
        ),
        (
            lambda m, x: gg.route({"*": ["a"]}, {"a": x.sum()}, m),
            ArgumentValueError,
            "route(): the loss 'a' has no graph.",
        ),
        (lambda m, x: gg.route({"decoder": LOSSES}, m.losses(x), m), NothingMatchedError, "'decoder' matches no"),
        (lambda m, x: gg.route([], m.losses(x), m), ArgumentTypeError, "route(): `routes` is the list []."),
        (lambda m, x: gg.route({"*": ["a"]}, x.sum(), m), ArgumentTypeError, "route(): `losses` is a float32 tensor"),
        (
            lambda m, x: gg.route({"*": LOSSES}, m.losses(x), m, resolve="cagrad"),
            ArgumentValueError,
            "route(): `resolve` is the str 'cagrad'.",
        ),
    ],
)
def test_what_is_refused(call, error, text):
    with pytest.raises(error) as caught:
        call(*make())
    assert text in str(caught.value)


def test_limit_data_parallel_wrappers_are_refused_and_no_sync_works():
    model, _x = make()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        replica = nn.parallel.DistributedDataParallel(model.head)
        with pytest.raises(ArgumentValueError, match="route\\(\\): the model is inside DistributedDataParallel"):
            gg.route({"*": ["a"]}, {"a": replica(torch.ones(1, 4)).sum()}, replica)
        with replica.no_sync():
            out = replica(torch.ones(1, 4))
            gg.route({"weight": ["a"], "bias": ["b"]}, {"a": out.sum(), "b": 2 * out.sum()}, replica.module)
        assert model.head.weight.grad.eq(1).all()
        assert model.head.bias.grad.eq(2).all()
    finally:
        distributed.destroy_process_group()
