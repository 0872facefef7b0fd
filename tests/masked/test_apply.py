"""apply_where and apply_rows: a function sees its own elements or rows and nothing else, in value and in gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from tests.witness import REAL, check_against, witness

NAN, INF = math.nan, math.inf


def one_by_one(keep, args, fn, otherwise=None, *, fill_value=0):
    """The oracle: element by element in Python."""
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keep, *args = torch.broadcast_tensors(keep, *args)
    out = []
    for chosen, *values in zip(keep.reshape(-1), *[a.reshape(-1) for a in args], strict=True):
        own = [value.reshape(1) for value in values]
        if chosen:
            out.append(fn(*own))
        else:
            out.append(torch.full((1,), fill_value, dtype=args[0].dtype) if otherwise is None else otherwise(*own))
    return torch.cat(out).reshape(keep.shape) if out else torch.zeros(keep.shape, dtype=args[0].dtype)


X = torch.tensor([[1.5, 0.0, -2.0], [0.3, 4.0, -0.5]])
Y = torch.tensor([2.0, 0.0, -1.0])
KEEP = X > 0


# --- apply_where ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_promise_with_both_branches():
    def call(fn):
        return lambda keep, x, y: fn(
            keep, (x, y), lambda a, b: a.log() * b, otherwise=lambda a, b: (1 - a).sqrt() + b.sin()
        )

    witness(call(gg.apply_where), call(one_by_one), KEEP, X, Y, promises=REAL - {"vmap", "expanded"})


@pytest.mark.slow
def test_every_promise_with_a_fill_value():
    # rolled masks would meet values that log cannot take, so vmap sees a function that takes them all
    def call(fn):
        return lambda keep, x: fn(keep, x, lambda a: a.exp(), fill_value=3.0)

    witness(call(gg.apply_where), call(one_by_one), KEEP, X, empty=[KEEP[:0], X[:0]])


@pytest.mark.slow
def test_vmap_over_the_values_and_their_own_mask():
    def call(fn):
        return lambda x: fn(x > 0, x, torch.log, otherwise=lambda a: (-a).sqrt() * 2 + a)

    x = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, -4.0]])
    witness(call(gg.apply_where), call(one_by_one), x, promises={"vmap", "compile", "func_grad", "jvp", "fake"})


@given(st.data())
def test_random_shapes_and_masks(data):
    shape = data.draw(st.sampled_from([(), (1,), (4,), (2, 3), (0,), (2, 0), (2, 1, 3)]))
    small = data.draw(st.sampled_from([shape, shape[1:], (1,) * len(shape), ()]))
    total, part = math.prod(shape), math.prod(small)
    value = st.sampled_from([0.0, 1.0, -1.0, 2.5, NAN, INF])
    x = torch.tensor(data.draw(st.lists(value, min_size=total, max_size=total))).reshape(shape)
    y = torch.tensor(data.draw(st.lists(st.sampled_from([0.5, 2.0]), min_size=part, max_size=part))).reshape(small)
    keep = torch.isfinite(x) & (x > 0)
    call = [
        lambda x, y, fn=fn: fn(keep, (x, y), lambda a, b: a.log() / b, fill_value=7)
        for fn in (gg.apply_where, one_by_one)
    ]
    check_against(*call, [x, y])
    wide = [
        lambda x, y, fn=fn: fn(keep, (y, x), lambda a, b: a * b.sqrt(), lambda a, b: a)
        for fn in (gg.apply_where, one_by_one)
    ]
    check_against(*wide, [x, y])


def test_each_function_is_called_once_with_its_own_elements_in_order():
    seen = []

    def fn(x):
        seen.append(x.tolist())
        return x

    gg.apply_where(torch.tensor([[True, False], [False, True]]), torch.tensor([[1, 2], [3, 4]]), fn, otherwise=fn)
    assert seen == [[1, 4], [2, 3]]


def test_functions_may_raise_for_what_is_not_theirs():
    table = torch.tensor([10.0, 20.0, 30.0], requires_grad=True)
    index = torch.tensor([2, 99, 0, -1])
    out = gg.apply_where((index >= 0) & (index < 3), index, lambda i: table[i], fill_value=-1)
    assert out.tolist() == [30.0, -1.0, 10.0, -1.0]
    out.sum().backward()
    assert table.grad.tolist() == [1.0, 0.0, 1.0]

    def whole(x):
        return torch.tensor([math.sqrt(v) for v in x.tolist()])  # raises for a negative number

    x = torch.tensor([4.0, -1.0])
    assert gg.apply_where(x >= 0, x, whole, fill_value=NAN)[0] == 2
    with pytest.raises(ValueError, match=r"domain|nonnegative"):
        whole(x)


def test_what_is_left_out_gets_exactly_zero_whatever_arrives():
    x = torch.tensor([1.0, NAN, INF, -1.0], requires_grad=True)
    out = gg.apply_where(x == 1, x, torch.log)
    (gradient,) = torch.autograd.grad(out, x, torch.tensor([2.0, NAN, INF, -INF]))
    assert gradient.tolist() == [2.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["eager", "compiled", "vmap"])
def test_tensors_that_the_function_closes_over_learn_from_its_own_elements_only(form):
    w = torch.tensor(2.0, requires_grad=True)

    def call(x):
        return gg.apply_where(x > 0, x, lambda a: a.log() * w)

    if form == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    if form == "vmap":
        call = torch.vmap(call)
    for x, expected in (([[math.e, 0.0], [-1.0, NAN]], 1.0), ([[0.0, -1.0], [NAN, -INF]], 0.0)):
        (gradient,) = torch.autograd.grad(call(torch.tensor(x)).sum(), w)
        torch.testing.assert_close(gradient, torch.tensor(expected))
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_functions_still_see_only_their_own_elements():
    x = torch.tensor([1.0, 3.0, -1.0])
    shares = torch.compile(lambda x: gg.apply_where(x > 0, x, lambda a: a / a.sum()), fullgraph=True, backend="eager")
    assert shares(x).tolist() == [0.25, 0.75, 0.0]
    mapped = torch.compile(torch.vmap(lambda x: gg.apply_where(x > 0, x, torch.log)), fullgraph=True, backend="eager")
    torch.testing.assert_close(mapped(x.reshape(3, 1)).squeeze(1), torch.tensor([0.0, math.log(3.0), 0.0]))
    torch._dynamo.reset()


def test_without_an_element_a_function_is_called_with_none_and_still_gives_the_dtype():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    out = gg.apply_where(x > 5, x, lambda a: a.double())
    assert out.dtype == torch.float64
    assert out.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [0.0, 0.0]
    assert gg.apply_where(x > 0, x, lambda a: a, otherwise=lambda a: a.double()).dtype == torch.float64


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("made", "fill_value", "dtype", "shown"),
    [
        (torch.bool, 0, torch.bool, False),
        (torch.bool, 2, torch.int64, 2),
        (torch.uint8, 255, torch.uint8, 255),
        (torch.int32, True, torch.int32, 1),
        (torch.int64, 0.5, torch.float32, 0.5),
        (torch.float16, 1, torch.float16, 1.0),
        (torch.float32, 1j, torch.complex64, 1j),
    ],
)
def test_the_fill_value_and_the_dtype(form, made, fill_value, dtype, shown):
    def call(keep, x):
        return gg.apply_where(keep, x, lambda a: a.to(made), fill_value=fill_value)

    if form == "compiled":
        call = torch.compile(call, fullgraph=True, backend="eager")
    out = call(torch.tensor([True, False]), torch.tensor([1.0, 1.0]))
    assert out.dtype == dtype
    assert out[1].item() == shown
    rows = gg.apply_rows(torch.tensor([True, False]), torch.ones(2), lambda a: a.to(made), fill_value=fill_value)
    assert torch.equal(rows, out)
    assert (
        gg.apply_rows(torch.tensor([True]), torch.ones(1), lambda a: a.to(made), fill_value=fill_value).dtype == dtype
    )
    torch._dynamo.reset()


def test_both_branches_promote():
    x = torch.tensor([1, 2])
    out = gg.apply_where(x > 1, x, lambda a: a, otherwise=lambda a: a / 2)
    assert out.dtype == torch.float32
    assert out.tolist() == [0.5, 2.0]


def test_args_may_be_a_list_and_keep_may_be_larger():
    keep = torch.tensor([[True], [False]])
    out = gg.apply_where(keep, [torch.arange(3.0), torch.tensor(2.0)], torch.mul, fill_value=-1)
    assert out.tolist() == [[0.0, 2.0, 4.0], [-1.0, -1.0, -1.0]]


def test_errors_of_apply_where():
    x, keep = torch.ones(2), torch.tensor([True, False])
    with pytest.raises(ArgumentTypeError, match=r"apply_where\(\): `keep` is a float32 tensor(.|\n)*keep != 0"):
        gg.apply_where(x, x, torch.log)
    with pytest.raises(ArgumentTypeError, match=r"apply_where\(\): `keep` is the bool True"):
        gg.apply_where(True, x, torch.log)
    with pytest.raises(ArgumentTypeError, match=r"`args\[1\]` is the float 2.0"):
        gg.apply_where(keep, (x, 2.0), torch.mul)
    with pytest.raises(ArgumentTypeError, match=r"`fn` is a float32 tensor(.|\n)*apply_where\(keep, x, fn\)"):
        gg.apply_where(keep, torch.log, x)
    with pytest.raises(ArgumentValueError, match=r"`args` is empty"):
        gg.apply_where(keep, (), torch.log)
    with pytest.raises(ArgumentValueError, match=r"`keep` has shape \(2,\), the arguments have \(3,\)"):
        gg.apply_where(keep, torch.ones(3), torch.log)
    with pytest.raises(
        ArgumentValueError, match=r"`fn` was called with 1 elements and gave a float32 tensor of shape \(\)"
    ):
        gg.apply_where(keep, x, torch.sum)
    with pytest.raises(ArgumentTypeError, match=r"`otherwise` gave the float 1.0(.|\n)*full_like"):
        gg.apply_where(keep, x, torch.log, otherwise=lambda a: 1.0)
    with pytest.raises(ArgumentTypeError, match=r"`fill_value` is the str 'nan'(.|\n)*float\('nan'\)"):
        gg.apply_where(keep, x, torch.log, fill_value="nan")
    with pytest.raises(ArgumentValueError, match=r"`fill_value` is -1, the result is uint8(.|\n)*0 to 255"):
        gg.apply_where(keep, x, lambda a: a.to(torch.uint8), fill_value=-1)
    with pytest.raises(ArgumentValueError, match=r"`keep` is on cpu, x is on meta"):
        gg.apply_where(keep, torch.ones(2, device="meta"), torch.log)
