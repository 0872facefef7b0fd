"""A slice with nothing kept: what it gives, what `empty=` changes, and what cannot be seen while something traces."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradgate import masked
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, NothingKeptError
from tests.masked.laws import LAWS

pytestmark = pytest.mark.usefixtures("both_paths")

NAN, INF = math.nan, math.inf
X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
KEEP = torch.tensor([[True, True], [False, False], [True, False]])

RULES = {"sum": 0, "prod": 1, "count": 0, "norm": 0, "logsumexp": -INF, "softmax": 0, "log_softmax": -INF}
RULES |= {"normalize": 0, "cumsum": 0, "cumprod": 1}


def reduce(name, x=X, **kw):
    return masked.quantile(x, 0.5, 1, **kw) if name == "quantile" else getattr(masked, name)(x, 1, **kw)


NAMES = ["sum", "prod", "mean", "var", "std", "amin", "amax", "median", "quantile", "norm", "logsumexp"]
NAMES += ["softmax", "log_softmax", "normalize", "cumsum", "cumprod", "count", "argmin", "argmax"]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("arg")])
def test_the_rule_of_each_function(name):
    result = reduce(name, keep=KEEP)[1]
    expected = torch.full_like(result, RULES.get(name, NAN))
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_empty_gives_another_value_to_those_slices_only(name):
    result = reduce(name, keep=KEEP, empty=7)
    assert (result[1] == 7).all()
    plain = reduce(name, keep=KEEP | torch.tensor([[False], [True], [False]]))
    assert torch.equal(result[[0, 2]].nan_to_num(), plain[[0, 2]].nan_to_num())


@pytest.mark.parametrize("name", NAMES)
def test_raise_names_the_slice(name):
    with pytest.raises(NothingKeptError, match=r"nothing is kept in 1 of 3 slices; the first is x\[1, :\]") as caught:
        reduce(name, keep=KEEP, empty="raise")
    assert f"masked.{name}()" in str(caught.value)
    reduce(name, keep=torch.ones_like(KEEP), empty="raise")


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_a_place_with_nothing_kept_up_to_it(name):
    x, keep = torch.tensor([[5.0, 3.0, 4.0], [9.0, 9.0, 9.0]]), torch.tensor([[False, True, True], [False] * 3])
    find = getattr(masked, name)
    found = find(x, 1, keep=keep)
    assert found.values[0, 0].isnan()
    assert found.values[1].isnan().all()
    assert found.indices.tolist() == [[-1, 1, 2 if name == "cummax" else 1], [-1, -1, -1]]
    assert find(x.long(), 1, keep=keep, empty=0).values[:, 0].tolist() == [0, 0]
    text = r"(?s)nothing is kept for 4 of 6 results; the first is result\[0, 0\].*an integer cannot be NaN"
    with pytest.raises(NothingKeptError, match=text):
        find(x.long(), 1, keep=keep)


def test_a_kept_infinity_is_found_beside_the_left_out():
    x = torch.tensor([7.0, -INF, 7.0], requires_grad=True)
    found = masked.cummax(x, exclude=7)
    assert found.indices.tolist() == [-1, 1, 1]
    found.values[1:].sum().backward()
    assert x.grad.tolist() == [0, 2, 0]


@pytest.mark.parametrize("name", ["argmin", "argmax", "amin", "amax", "median"])
def test_integer_results_raise_unless_a_value_is_given(name):
    options = {"interpolation": "lower"} if name == "median" else {}
    with pytest.raises(NothingKeptError, match="an integer cannot be NaN"):
        reduce(name, X.int(), keep=KEEP, **options)
    assert reduce(name, X.int(), keep=KEEP, empty=-1, **options)[1] == -1


def test_how_slices_are_named():
    with pytest.raises(NothingKeptError, match=r"nothing is kept in x\."):
        masked.argmax(X, keep=torch.zeros_like(KEEP))
    with pytest.raises(NothingKeptError, match=r"the first is x\[1, :, 0\]"):
        masked.argmax(torch.zeros(2, 3, 2), 1, keep=torch.tensor([True, False]).reshape(2, 1, 1))
    with pytest.raises(NothingKeptError, match=r"the only slice, x\[0, :\]"):
        masked.argmax(torch.zeros(1, 3), 1, exclude=0)
    with pytest.raises(NothingKeptError, match=r"2 of 2 slices; the first is x\[0, :\]"):
        masked.amax(torch.zeros(2, 0), 1, empty="raise")


@pytest.mark.parametrize("law", [law for law in LAWS if law.smooth], ids=lambda law: law.name)
def test_the_gradient_is_exactly_0_whatever_empty_says(law):
    x = torch.where(KEEP, X, NAN).requires_grad_()
    result = law.fn(x, 1, keep=KEEP, empty=3.0)
    (gradient,) = torch.autograd.grad(result.sum(), x, materialize_grads=True)
    assert (gradient[~KEEP] == 0).all()


def test_a_value_that_the_result_cannot_hold():
    for empty in (NAN, 0.5, 2**40, 1j):
        with pytest.raises(ArgumentValueError, match="the result is int32"):
            masked.amax(X.int(), 1, keep=KEEP, empty=empty)
    with pytest.raises(ArgumentValueError, match="the result is bool"):
        masked.amax(X.bool(), 1, keep=KEEP, empty=2)
    assert masked.amax(X.bool(), 1, keep=KEEP, empty=False).dtype is torch.bool
    with pytest.raises(ArgumentTypeError, match="`empty` is the str 'zero'"):
        masked.mean(X, empty="zero")


def test_dims_that_are_not_there():
    with pytest.raises(ArgumentIndexError, match=r"`dim` has 2, x of shape \(3, 2\) has 2 dimensions"):
        masked.mean(X, 2)
    with pytest.raises(ArgumentValueError, match=r"`dim` \(0, -2\) names a dimension twice"):
        masked.mean(X, (0, -2))
    for dim in ("rows", 1.0, torch.tensor(1), (0, None)):
        with pytest.raises(ArgumentTypeError, match="dimensions are counted"):
            masked.mean(X, dim)
    assert masked.mean(X, ()) == X.mean(())


def test_kinds_that_a_function_does_not_take():
    with pytest.raises(
        ArgumentTypeError, match=r"masked.mean\(\): `x` is an int32 tensor(.|\n)*the result is generally not an integer"
    ):
        masked.mean(X.int())
    with pytest.raises(ArgumentTypeError, match="complex numbers have no order"):
        masked.amax(X.to(torch.complex64))
    assert masked.mean(X.int(), dtype=torch.float64) == 3.5


def test_interpolation_and_q_are_checked():
    with pytest.raises(ArgumentValueError, match="it is one of linear, lower, higher, midpoint, nearest"):
        masked.median(X, interpolation="upper")
    with pytest.raises(ArgumentTypeError, match="`q` has the str 'a'"):
        masked.quantile(X, "a")
    with pytest.raises(ArgumentValueError, match="`q` has 95"):
        masked.quantile(X, 95)
    with pytest.raises(ArgumentValueError, match="at most one dimension"):
        masked.quantile(X, torch.zeros(2, 2))
    assert masked.quantile(X, torch.tensor([0.5, 1.5])).isnan().tolist() == [False, True]
    with pytest.raises(ArgumentValueError, match=r"`q` has 1\.5"):
        masked.quantile(X.int(), torch.tensor([0.5, 1.5]), interpolation="lower")


# --- where the host cannot look ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_the_error_comes_from_the_graph():
    """LIMITATIONS.md: a RuntimeError without the slice's name."""
    compiled = torch.compile(lambda x, keep: masked.argmax(x, 1, keep=keep), fullgraph=True, backend="aot_eager")
    assert compiled(X, torch.ones_like(KEEP)).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"masked.argmax\(\): nothing is kept in a slice, and no empty= is given"):
        compiled(X, KEEP)


def test_without_data_nothing_is_raised():
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert masked.argmax(torch.empty(3, 2), 1, keep=torch.empty(3, 2, dtype=torch.bool)).shape == (3,)


def test_vmap_wants_to_be_told():
    with pytest.raises(ArgumentValueError, match="inside vmap it cannot be seen whether a slice has nothing kept"):
        torch.vmap(lambda x, keep: masked.argmax(x, keep=keep))(X, KEEP)
    told = torch.vmap(lambda x, keep: masked.argmax(x, keep=keep, empty=-1))(X, KEEP)
    assert told.tolist() == [1, -1, 0]


@pytest.mark.parametrize("function", [masked.argmax, masked.argmin])
def test_an_index_that_does_not_fit_is_refused_also_where_nothing_is_empty(function):
    with pytest.raises(ArgumentValueError, match=r"`empty` is 0\.5, the result is int64"):
        function(torch.ones(2, 3), 1, exclude=5, empty=0.5)
    assert function(torch.ones(2, 3), 1, exclude=5, empty=-1).tolist() == [0, 0]
