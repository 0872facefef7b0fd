"""apply_rows: whole samples left out of a computation, as if the batch had come without them."""

import collections
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from tests.witness import check_against, witness

NAN = math.nan
Pair = collections.namedtuple("Pair", ["first", "second"])


def row_by_row(keep, args, fn, *, fill_value=0):
    """The oracle: fn on the batch without the other rows, the results put back in a Python loop."""
    values = fn(*[x[[i for i, k in enumerate(keep.tolist()) if k]] for x in args])
    own = iter(values.unbind())
    rest = torch.full(values.shape[1:], fill_value, dtype=values.dtype)
    rows = [next(own) if k else rest for k in keep.tolist()]
    return torch.stack(rows) if rows else values


def together(x, y):
    """Rows that know of each other (as in BatchNorm), so that a row too many would be seen."""
    return (x - x.sum(0)) * y.sum() + x.pow(2)


@given(st.lists(st.booleans(), max_size=5), st.booleans())
def test_equal_to_the_batch_without_the_other_rows(keep, strided):
    keep = torch.tensor(keep, dtype=torch.bool)
    x, y = torch.randn(len(keep), 3), torch.randn(len(keep))
    x, y = (x.t().contiguous().t(), torch.stack([y, y], 1)[:, 0]) if strided else (x, y)
    x[~keep] = NAN
    y[~keep] = math.inf
    check_against(
        lambda x, y: gg.apply_rows(keep, (x, y), together, fill_value=2.5),
        lambda x, y: row_by_row(keep, (x, y), together, fill_value=2.5),
        [x, y],
        exact=True,
    )


def test_every_promise():
    keep = torch.tensor([True, False, True, True])
    fn, oracle = (
        lambda x, y, call=call: call(keep, (x, y), lambda a, b: (a * b.unsqueeze(1)).sin())
        for call in (gg.apply_rows, row_by_row)
    )
    inputs = torch.randn(4, 3), torch.randn(4)
    promises = {"gradcheck", "gradgradcheck", "func_grad", "jvp", "noncontiguous", "expanded", "float64", "bfloat16"}
    witness(fn, oracle, *inputs, promises=promises | {"float16", "complex"})
    # With a mask that is the same for all of them, vmap works as well.
    witness(fn, oracle, *inputs, promises={"vmap"})


def test_a_model_with_batchnorm_and_dropout_is_bit_identical_to_the_smaller_batch():
    keep = torch.tensor([True, True, False, True, False])
    batch = torch.randn(5, 4)
    batch[~keep] = NAN

    def run(forward):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2)
        )
        forward(model).pow(2).sum().backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    ours = run(lambda model: gg.apply_rows(keep, batch, model)[keep])
    theirs = run(lambda model: model(batch[keep]))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_other_rows_get_exactly_zero_whatever_arrives():
    x = torch.tensor([[1.0], [NAN], [2.0]], requires_grad=True)
    out = gg.apply_rows(torch.tensor([True, False, True]), x, torch.exp)
    (gradient,) = torch.autograd.grad(out, x, torch.tensor([[1.0], [NAN], [0.0]]))
    assert torch.equal(gradient, torch.tensor([[math.e], [0.0], [0.0]]))


def test_results_and_arguments_of_any_structure():
    keep = torch.tensor([True, False, True])
    batch = {"x": torch.arange(6.0).reshape(3, 2), "ids": torch.tensor([7, 8, 9]), "more": None}

    def fn(batch, scale):
        assert batch["x"].shape == (2, 2)
        return {
            "picture": batch["x"][:, :, None] * torch.ones(2, 2, 4),
            "pair": Pair(batch["ids"], [batch["x"].sum(1) * scale]),
            "nothing": batch["more"],
            "flag": batch["ids"] > 8,
        }

    out = gg.apply_rows(keep, (batch, torch.tensor([1.0, NAN, 2.0])), fn, fill_value=0)
    assert out["picture"].shape == (3, 2, 4)
    assert isinstance(out["pair"], Pair)
    assert out["pair"].first.tolist() == [7, 0, 9]
    assert out["pair"].second[0].tolist() == [1.0, 0.0, 18.0]
    assert out["nothing"] is None
    assert out["flag"].dtype == torch.bool
    assert out["flag"].tolist() == [False, False, True]


def test_a_dict_or_a_namedtuple_is_one_argument_and_a_tuple_or_list_several():
    keep, x = torch.tensor([True, False]), torch.tensor([1.0, NAN])
    for args, fn in (
        ({"x": x}, lambda batch: batch["x"] * 2),
        (Pair(x, None), lambda pair: pair.first * 2),
        ((x, x), torch.add),
        ([x, x], torch.add),
    ):
        assert gg.apply_rows(keep, args, fn).tolist() == [2.0, 0.0]


def test_nothing_kept_is_a_batch_of_no_rows():
    layer = torch.nn.Linear(3, 2)
    seen = []

    def fn(x):
        seen.append(x.shape)
        return layer(x)

    out = gg.apply_rows(torch.zeros(4, dtype=torch.bool), torch.full((4, 3), NAN), fn, fill_value=-1)
    assert seen == [(0, 3)]
    assert torch.equal(out, torch.full((4, 2), -1.0))
    out.sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(2, 3))  # not None: other ranks wait for it


def test_everything_kept_is_the_function_itself():
    x = torch.randn(3, 2)
    assert gg.apply_rows(torch.ones(3, dtype=torch.bool), x, lambda a: a) is x
    given_out = torch.arange(3)
    out = gg.apply_rows(torch.ones(3, dtype=torch.bool), x, lambda a: given_out, fill_value=NAN)
    assert out.dtype == torch.float32  # the dtype does not depend on the mask
    assert gg.apply_rows(torch.ones(0, dtype=torch.bool), x[:0], torch.exp).shape == (0, 2)


@pytest.mark.slow
def test_one_compiled_graph_serves_every_number_of_rows():
    x = torch.randn(4, 3)
    layer = torch.nn.Linear(3, 2)

    def step(keep, x):
        return gg.apply_rows(keep, x * 2, lambda a: {"out": layer(a).sin()})["out"].sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for keep in ([True, False, True, True], [True] * 4, [False] * 4):
        keep = torch.tensor(keep)
        expected = step(keep, x)
        (gradient,) = torch.autograd.grad(expected, layer.weight)
        ours = compiled(keep, x)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(torch.autograd.grad(ours, layer.weight)[0], gradient)
    torch._dynamo.reset()


def test_errors_of_apply_rows():
    x, keep = torch.ones(3, 2), torch.tensor([True, False, True])
    with pytest.raises(ArgumentValueError, match=r"there is no tensor in `args`"):
        gg.apply_rows(keep, (), torch.exp)
    with pytest.raises(ArgumentTypeError, match=r"apply_rows\(\): `args` is the str 'a'"):
        gg.apply_rows(keep, ["a", "b", "c"], torch.exp)
    with pytest.raises(ArgumentTypeError, match=r"apply_rows\(\): `keep` is the list"):
        gg.apply_rows([True, False, True], x, torch.exp)
    with pytest.raises(ArgumentTypeError, match=r"apply_rows\(\): `keep` is an int64 tensor"):
        gg.apply_rows(keep.long(), x, torch.exp)
    with pytest.raises(
        ArgumentValueError, match=r"`keep` has shape \(3, 2\), the arguments have \(3, 2\)(.|\n)*keep.all\(dim=1\)"
    ):
        gg.apply_rows(x > 0, x, torch.exp)
    with pytest.raises(ArgumentValueError, match=r"`keep` has shape \(3,\), the arguments have \(3, 2\), \(2,\)"):
        gg.apply_rows(keep, (x, torch.ones(2)), torch.mul)
    with pytest.raises(ArgumentValueError, match=r"`keep` has shape \(3,\), the arguments have \(\)"):
        gg.apply_rows(keep, torch.tensor(1.0), torch.exp)
    with pytest.raises(ArgumentValueError, match=r"`keep` is on cpu, x is on meta"):
        gg.apply_rows(keep, torch.ones(3, device="meta"), torch.exp)
    with pytest.raises(ArgumentValueError, match=r"called with 2 rows and gave a float32 tensor of shape \(\)"):
        gg.apply_rows(keep, x, torch.sum)
    with pytest.raises(ArgumentTypeError, match=r"`fn` gave the float 1.0(.|\n)*torch.full"):
        gg.apply_rows(keep, x, lambda a: (a, 1.0))
    with pytest.raises(ArgumentTypeError, match=r"apply_rows\(\): `fill_value` is None"):
        gg.apply_rows(keep, x, torch.exp, fill_value=None)
    with pytest.raises(ArgumentValueError, match=r"`fill_value` is -1, the result is uint8"):
        gg.apply_rows(keep, x, lambda a: a.byte(), fill_value=-1)


# --- limits, as LIMITATIONS.md tells them ----------------------------------------------------------------------------


def test_a_mask_that_vmap_batches_is_refused_for_rows():
    def call(keep, x):
        return gg.apply_rows(keep, x, torch.exp)

    with pytest.raises(ArgumentValueError, match=r"cannot be read here(.|\n)*apply_rows around vmap"):
        torch.vmap(call)(torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        FakeTensorMode,
        lambda: FakeTensorMode(shape_env=ShapeEnv()),
        lambda: FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
    ],
    ids=["plain", "with unknown sizes", "with real tensors"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["a mask made inside", "a mask made before"])
def test_a_mask_without_values_is_refused_for_rows(make, inside):
    before = torch.ones(3, dtype=torch.bool)
    with make(), pytest.raises(ArgumentValueError, match="cannot be read here"):
        gg.apply_rows(torch.ones(3, dtype=torch.bool) if inside else before, torch.ones(3), torch.exp)
    with pytest.raises(ArgumentValueError, match="cannot be read here"):
        gg.apply_rows(before.to("meta"), torch.ones(3, device="meta"), torch.exp)


def test_inside_vmap_a_function_that_mixes_elements_sees_the_stand_ins():
    def call(x):
        return gg.apply_where(x > 0, x, lambda a: a / a.sum())

    x = torch.tensor([[1.0, 3.0, -1.0]])
    assert call(x).tolist() == [[0.25, 0.75, 0.0]]
    assert torch.equal(torch.vmap(call)(x), torch.tensor([[0.2, 0.6, 0.0]]))  # the 1 stands in for the -1


def test_inside_vmap_a_function_without_elements_sees_one_half():
    w = torch.tensor(1.0, requires_grad=True)

    def call(x):
        return gg.apply_where(x > 1, x, lambda a: (a - 1).log() * w)

    x = torch.tensor([[0.0, -1.0]], requires_grad=True)
    out = torch.vmap(call)(x)
    to_x, to_w = torch.autograd.grad(out.sum(), (x, w))
    assert out.tolist() == [[0.0, 0.0]]
    assert to_x.tolist() == [[0.0, 0.0]]  # the arguments are safe
    assert to_w.isnan()  # what the function uses besides is not, where it cannot take 0.5
    assert torch.autograd.grad(call(x).sum(), w)[0] == 0  # outside of vmap it is


@pytest.mark.parametrize("fill_value", [0, 0.0, -0.0, 1, 2.5, math.nan])
def test_every_fill_value_is_kept_to_its_sign(fill_value):
    filled = gg.apply_rows(torch.tensor([True, False]), torch.ones(2, 3), lambda x: x, fill_value=fill_value)[1]
    assert torch.equal(filled, torch.full((3,), fill_value)) or math.isnan(fill_value)
    assert (filled.signbit() == torch.tensor(fill_value).signbit()).all()
    assert (filled.isnan() == math.isnan(fill_value)).all()
