"""The safe_* functions: the plain operation away from the bad points, and the table of the documentation at them."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.masked import (
    safe_acos,
    safe_asin,
    safe_divide,
    safe_log,
    safe_norm,
    safe_normalize,
    safe_pow,
    safe_sqrt,
)
from tests.witness import ALL, REAL, check_against, fresh, value_and_gradients, witness

INF, NAN = math.inf, math.nan
DOCS = Path(__file__).parents[2] / "docs" / "packages" / "masked.md"

# How the table of docs/packages/masked.md says it, the call, inputs at the bad point, the value there.
BAD = [
    ("safe_divide: y = 0", safe_divide, ([3.0, 0.0, -1.0, INF, NAN], [0.0, -0.0, 0.0, 0.0, 0.0]), 0.0),
    ("safe_divide: y = 0", lambda x, y: safe_divide(x, y, fill_value=7), ([3.0], [0.0]), 7.0),
    ("safe_log: x <= 0", safe_log, ([0.0, -0.0, -1.0, -INF],), 0.0),
    ("safe_log: x <= 0", lambda x: safe_log(x, fill_value=-100), ([0.0, -2.0],), -100.0),
    ("safe_sqrt: x = 0", lambda x: safe_sqrt(x, fill_value=5), ([0.0, -0.0],), 0.0),
    ("safe_sqrt: x < 0", lambda x: safe_sqrt(x, fill_value=5), ([-1.0, -INF],), 5.0),
    ("safe_pow: x = 0, p < 0", lambda x, p: safe_pow(x, p, fill_value=5), ([0.0, -0.0, 0.0], [-1.0, -0.5, -INF]), 5.0),
    ("safe_pow: x = 0, p > 0 not whole", lambda x, p: safe_pow(x, p, fill_value=5), ([0.0, 0.0], [0.5, 1.5]), 0.0),
    ("safe_pow: x < 0, p not whole", lambda x, p: safe_pow(x, p, fill_value=5), ([-4.0, -0.5], [0.5, -1.5]), 5.0),
    ("safe_pow: x < 0, p not whole", lambda x: safe_pow(x, 0.5, fill_value=5), ([-4.0, -INF],), 5.0),
    ("safe_norm: the zero vector", safe_norm, ([0.0, -0.0, 0.0],), 0.0),
    ("safe_normalize: the zero vector", safe_normalize, ([0.0, -0.0, 0.0],), 0.0),
    ("safe_acos: x >= 1", safe_acos, ([1.0, 1.0000001, INF],), 0.0),
    ("safe_acos: x <= -1", safe_acos, ([-1.0, -7.0],), math.pi),
    ("safe_asin: x >= 1", safe_asin, ([1.0, 1.0000001, INF],), math.pi / 2),
    ("safe_asin: x <= -1", safe_asin, ([-1.0, -7.0],), -math.pi / 2),
]


@pytest.mark.parametrize(("words", "fn", "inputs", "value"), BAD, ids=[f"{i} {row[0]}" for i, row in enumerate(BAD)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_value_and_gradients_at_the_bad_points(words, fn, inputs, value, dtype):
    tensors = [torch.tensor(values, dtype=dtype) for values in inputs]
    leaves = fresh(tensors)
    out = fn(*leaves)
    assert torch.equal(out, torch.full_like(out, value))
    first = torch.autograd.grad(out, leaves, torch.full_like(out, NAN), create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(first, leaves, [torch.ones_like(g) for g in first], materialize_grads=True)
    for gradient in (*first, *second):
        assert (gradient == 0).all(), f"{words}: {gradient}"


def test_the_documentation_has_every_bad_point():
    page = DOCS.read_text(encoding="utf-8")
    for words in {row[0] for row in BAD}:
        name, _, point = words.partition(": ")
        assert f"| `{name}` | {point}" in page


def test_forward_mode_gives_zero_at_the_bad_points():
    for words, fn, inputs, _ in BAD:
        tensors = tuple(torch.tensor(values) for values in inputs)
        _, tangent = torch.func.jvp(fn, tensors, tuple(torch.ones_like(t) for t in tensors))
        assert (tangent == 0).all(), words


# --- away from the bad points: the plain operation, bit for bit ------------------------------------------------------

GOOD = {
    "divide": (safe_divide, torch.div, (torch.randn(4, 3), torch.randn(3).abs() + 0.1), ALL),
    "log": (safe_log, torch.log, (torch.rand(4, 3) + 0.1,), ALL),
    "sqrt": (safe_sqrt, torch.sqrt, (torch.rand(4, 3) + 0.1,), ALL),
    "pow": (safe_pow, torch.pow, (torch.rand(4, 3) + 0.1, torch.randn(4, 3)), REAL),
    "norm": (
        lambda x: safe_norm(x, 1, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, 2, 1, True),
        (torch.randn(4, 3),),
        ALL,
    ),
    "norm 3": (
        lambda x: safe_norm(x, ord=3),
        lambda x: torch.linalg.vector_norm(x, 3),
        (torch.randn(2, 3),),
        REAL,
    ),
    "normalize": (safe_normalize, lambda x: x / x.norm(dim=-1, keepdim=True), (torch.randn(4, 3),), ALL),
    "acos": (safe_acos, torch.acos, (torch.rand(4, 3) * 1.8 - 0.9,), REAL),
    "asin": (safe_asin, torch.asin, (torch.rand(4, 3) * 1.8 - 0.9,), REAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_everywhere_else_it_is_the_plain_operation(name):
    fn, plain, inputs, promises = GOOD[name]
    check_against(fn, plain, inputs, exact=True)
    witness(fn, plain, *inputs, promises=promises, empty=[x[:0] if x.dim() == 2 else x for x in inputs])


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [2, 3.0, 0, -1, 1, 0.5, -0.5, 1.5])
def test_pow_with_a_number_is_the_plain_one_away_from_the_bad_points(exponent):
    witness(lambda x: safe_pow(x, exponent), lambda x: x**exponent, torch.rand(3, 2) + 0.2)


def test_pow_of_whole_numbers_beneath_zero_is_plain_to_x_and_zero_to_the_exponent():
    x = torch.tensor([-2.0, -2.0, 0.0, 0.0, 0.0, -3.0])
    p = torch.tensor([2.0, 3.0, 2.0, 1.0, 0.0, 0.0])
    values, (to_x, to_p) = value_and_gradients(safe_pow, [x, p])
    plain, (plain_x,) = value_and_gradients(lambda x: x**p, [x])
    assert torch.equal(values[0], plain[0])
    assert torch.equal(to_x, plain_x)
    assert torch.equal(to_p, torch.zeros(6))
    _, second = value_and_gradients(safe_pow, [x, p], order=2)
    assert all(g.isfinite().all() for g in second)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (safe_divide, ([NAN, 1.0], [1.0, NAN])),
        (safe_log, ([NAN],)),
        (safe_sqrt, ([NAN],)),
        (safe_pow, ([NAN, -1.0, 0.0, 2.0], [0.5, NAN, NAN, NAN])),
        (lambda x: safe_pow(x, NAN), ([0.0, -1.0, 2.0],)),
        (safe_norm, ([NAN, 0.0],)),
        (safe_normalize, ([NAN, 0.0],)),
        (safe_acos, ([NAN],)),
        (safe_asin, ([NAN],)),
    ],
)
def test_nan_stays_visible(fn, inputs):
    assert fn(*[torch.tensor(values) for values in inputs]).isnan().all()


# --- good and bad points together --------------------------------------------------------------------------------

numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1.5, 3.0, 1e-3])


def _by_element(plain, is_bad, value):
    """The oracle: element by element in Python, the plain operation where it is not bad."""

    def oracle(*inputs):
        inputs = torch.broadcast_tensors(*inputs)
        columns = zip(*[x.reshape(-1).unbind() for x in inputs], strict=True)
        out = [torch.tensor(value) if is_bad(*[v.item() for v in row]) else plain(*row) for row in columns]
        return torch.stack(out).reshape(inputs[0].shape) if out else torch.zeros(inputs[0].shape)

    return oracle


@given(st.lists(st.tuples(numbers, numbers), max_size=6))
def test_divide_element_by_element(pairs):
    x, y = (torch.tensor([pair[i] for pair in pairs]) for i in (0, 1))
    check_against(safe_divide, _by_element(torch.div, lambda a, b: b == 0, 0.0), [x, y])


@given(st.lists(numbers, max_size=6))
def test_log_sqrt_acos_asin_element_by_element(values):
    x = torch.tensor(values)
    check_against(safe_log, _by_element(torch.log, lambda a: a <= 0, 0.0), [x])
    check_against(safe_sqrt, _by_element(torch.sqrt, lambda a: a <= 0, 0.0), [x])
    inside = torch.where(x.abs() >= 1, 1.0, x)
    check_against(safe_acos, _by_element(torch.acos, lambda a: a >= 1, 0.0), [inside])
    check_against(safe_asin, _by_element(torch.asin, lambda a: a >= 1, math.pi / 2), [inside])


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, -2.0]), min_size=2, max_size=2), max_size=5))
def test_norm_and_normalize_vector_by_vector(rows):
    def oracle_norm(x):
        return torch.stack([r.norm() if r.any() else torch.zeros(()) for r in x.unbind()]) if len(x) else x.sum(1)

    def oracle_normalize(x):
        return torch.stack([r / r.norm() if r.any() else torch.zeros(2) for r in x.unbind()]) if len(x) else x * 1

    x = torch.tensor(rows).reshape(-1, 2)
    check_against(lambda x: safe_norm(x, 1), oracle_norm, [x])
    check_against(safe_normalize, oracle_normalize, [x])


@pytest.mark.slow
def test_bad_points_under_vmap_and_compile():
    x = torch.tensor([[1.0, 0.0], [2.0, 3.0], [0.0, 0.0]])
    for fn in (safe_log, safe_sqrt, safe_normalize, lambda x: safe_divide(1.0, x), lambda x: safe_pow(x, -0.5)):
        witness(fn, fn, x, promises={"vmap", "func_grad", "jvp", "compile", "fake"})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_zero_is_the_only_bad_point(dtype):
    x = torch.tensor([0j, -1 + 0j, 2j], dtype=dtype)
    for fn, plain in ((safe_log, torch.log), (safe_sqrt, torch.sqrt)):
        values, (gradient,) = value_and_gradients(fn, [x])
        expected, (plain_gradient,) = value_and_gradients(plain, [x])
        assert values[0][0] == 0
        assert gradient[0] == 0
        assert torch.equal(values[0][1:], expected[0][1:])
        assert torch.equal(gradient[1:], plain_gradient[1:])


# --- numbers, integers, shapes -----------------------------------------------------------------------------------


def test_numbers_and_integers_divide_as_in_torch():
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    assert torch.equal(safe_divide(x, 3.0), x / 3.0)
    assert torch.equal(safe_divide(2, x), torch.tensor([2.0, 0.0]))
    out = safe_divide(x, 0, fill_value=NAN)
    assert out.isnan().all()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.zeros(2))
    halves = safe_divide(torch.tensor([1, 2]), torch.tensor([2, 0]))
    assert halves.dtype == torch.float32
    assert halves.tolist() == [0.5, 0.0]
    assert safe_divide(torch.tensor(1.0), 0).dtype == torch.float32
    assert safe_log(torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert safe_sqrt(torch.tensor([4, 0, -1])).tolist() == [2.0, 0.0, 0.0]
    assert safe_acos(torch.tensor([1, 2])).tolist() == [0.0, 0.0]
    assert safe_pow(torch.tensor([2, 0]), torch.tensor(-1.0)).tolist() == [0.5, 0.0]


def test_norm_over_dimensions():
    x = torch.zeros(2, 3, 4)
    x[0, 0, 0] = 2.0
    assert torch.equal(safe_norm(x), torch.tensor(2.0))
    assert torch.equal(safe_norm(x, (1, 2)), torch.tensor([2.0, 0.0]))
    assert safe_norm(x, [0, -1], keepdim=True).shape == (1, 3, 1)
    assert torch.equal(safe_norm(x, dim=(1, 2), ord=INF), torch.tensor([2.0, 0.0]))
    assert torch.equal(safe_norm(torch.zeros(2, 0), 1, ord=INF), torch.zeros(2))
    assert torch.equal(safe_normalize(x, dim=None), x / 2)
    assert torch.equal(safe_norm(torch.tensor(-3.0)), torch.tensor(3.0))


def test_a_vector_too_short_to_be_measured_counts_as_zero():
    x = torch.full((3,), 1e-30, requires_grad=True)
    out = safe_normalize(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(3))
    assert torch.equal(x.grad, torch.zeros(3))


# --- words ---------------------------------------------------------------------------------------------------------


def test_errors_say_what_and_how():
    one = torch.ones(2)
    with pytest.raises(ArgumentTypeError, match=r"masked.safe_divide\(\): `x` is the float 1.0"):
        safe_divide(1.0, 2.0)
    with pytest.raises(ArgumentTypeError, match=r"masked.safe_log\(\): `x` is the list"):
        safe_log([1.0])
    with pytest.raises(ArgumentTypeError, match=r"`fill_value` is the str 'zero'(.|\n)*Fix: fill_value=0.0"):
        safe_sqrt(one, fill_value="zero")
    with pytest.raises(ArgumentTypeError, match=r"safe_acos\(\): `x` is a complex64 tensor(.|\n)*x.real"):
        safe_acos(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ArgumentTypeError, match=r"safe_pow\(\): `exponent` is a complex64"):
        safe_pow(one, torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ArgumentTypeError, match=r"safe_norm\(\): `x` is an int64 tensor(.|\n)*x.float\(\)"):
        safe_norm(torch.tensor([1, 2]))
    with pytest.raises(ArgumentValueError, match=r"safe_normalize\(\): `ord` is 0.5(.|\n)*not a norm"):
        safe_normalize(one, ord=0.5)
    assert gg.masked.safe_divide is safe_divide
