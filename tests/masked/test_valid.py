"""keep and exclude become one mask, by the rules of the dtype."""

import math

import numpy
import pytest
import torch

import gradgate as gg
from gradgate import masked
from gradgate.errors import ArgumentTypeError, ArgumentValueError

pytestmark = pytest.mark.usefixtures("both_paths")

NAN, INF = math.nan, math.inf
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def left_out(x, exclude):
    return (~masked.valid(x, exclude=exclude)).nonzero().flatten().tolist()


def test_nothing_said_keeps_everything():
    assert masked.valid(torch.zeros(2, 3)).all()
    assert masked.valid(torch.zeros(2, 3), exclude=[]).all()
    assert masked.valid(torch.zeros(2, 0)).shape == (2, 0)


def test_keep_broadcasts_and_both_must_agree():
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    mask = masked.valid(x, keep=torch.tensor([[True], [False]]), exclude=2)
    assert mask.tolist() == [[True, False], [False, False]]


def test_several_masks_and_functions_of_x_must_agree():
    x = torch.tensor([[1.0, NAN, 3.0], [4.0, 5.0, INF]], requires_grad=True)
    row, below = torch.tensor([[True], [False]]), lambda x: x < 4
    assert masked.valid(x, keep=torch.isfinite).tolist() == [[True, False, True], [True, True, False]]
    assert masked.valid(x, keep=(torch.isfinite, row)).tolist() == [[True, False, True], [False] * 3]
    assert masked.valid(x, keep=(below, row, x.detach() > 1), exclude=7).tolist() == [[False, False, True], [False] * 3]
    assert masked.valid(x, keep=()).all()
    masked.mean(x, keep=(torch.isfinite, below)).backward()
    assert x.grad.tolist() == [[0.5, 0, 0.5], [0, 0, 0]]
    assert masked.impute(x.detach(), keep=torch.isfinite, using=0.0).sum() == 13


@pytest.mark.slow
def test_several_masks_everywhere_keep_is_taken():
    x = torch.tensor([4.0, -1.0, 9.0, NAN])
    both = (torch.isfinite, lambda x: x > 0)
    mask = torch.tensor([True, False, True, False])
    for call in (
        lambda keep: gg.apply_where(keep, x, torch.sqrt),
        lambda keep: gg.apply_rows(keep, x, torch.sqrt),
        lambda keep: gg.apply_rows(keep, [x], torch.sqrt),
        lambda keep: masked.softmax(x, keep=keep),
        lambda keep: masked.layer_norm(x, [4], keep=keep),
        lambda keep: masked.batch_norm(x[:, None], None, None, training=True, keep=keep),
        lambda keep: masked.mode(x, keep=keep).values,
    ):
        expected = call(mask) if call(both).dim() < 2 else call(mask[:, None])
        assert torch.equal(call(both), expected)
    compiled = torch.compile(lambda x: masked.sum(x, keep=both), fullgraph=True, backend="aot_eager")
    assert compiled(x) == 13
    assert torch.vmap(lambda x: masked.sum(x, keep=both))(torch.stack([x, -x])).tolist() == [13, 1]


def test_what_is_no_mask_among_several_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ArgumentValueError, match=r"`keep\[1\]` has shape \(2,\), which does not broadcast") as caught:
        masked.sum(x, keep=(x == 0, torch.ones(2, dtype=torch.bool)))
    assert "Fix" not in str(caught.value)
    with pytest.raises(ArgumentTypeError, match=r"`keep\(...\)` is a float32 tensor of shape \(2, 3\)"):
        masked.sum(x, keep=lambda x: x)
    with pytest.raises(ArgumentTypeError, match=r"apply_where\(\): `keep\[0\]` is the bool True"):
        gg.apply_where((True,), x, torch.sqrt)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_value_that_an_integer_cannot_hold_matches_nothing(dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    for value in (info.min - 1, info.max + 1, 0.5, NAN, INF, -INF, 1 + 1j, 2**70):
        assert left_out(x, value) == []
        assert left_out(x, [value]) == []
    assert left_out(x, info.max) == [1]
    assert left_out(x, 1.0) == [3]
    assert left_out(x, True) == [3]
    assert left_out(x, 1 + 0j) == [3]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_match_what_they_would_store(dtype):
    x = torch.tensor([0.1, NAN, INF, -INF, 0.0, -0.0], dtype=dtype)
    assert left_out(x, 0.1) == [0]
    assert left_out(x, NAN) == [1]
    assert left_out(x, INF) == [2]
    assert left_out(x, 0) == [4, 5]
    assert left_out(x, [NAN, 0.1]) == [0, 1]
    assert left_out(x, 1e-320 if dtype is not torch.float64 else 1e-400) == (
        [] if dtype is not torch.float64 else [4, 5]
    )


def test_a_number_too_large_or_too_small_for_the_dtype_matches_nothing():
    x = torch.tensor([INF, 0.0], dtype=torch.float16)
    assert left_out(x, 1e6) == []
    assert left_out(x, 10**400) == []
    assert left_out(x, 1e-9) == []


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**100), 10**30])
def test_an_int_that_torch_itself_does_not_take(number):
    x = torch.tensor([1.0, number], dtype=torch.float64)
    assert left_out(x, number) == [1]
    assert left_out(x.to(torch.complex64), number) == [1]


def test_bools_and_complex_numbers():
    assert left_out(torch.tensor([True, False]), True) == [0]
    assert left_out(torch.tensor([True, False]), 2) == []
    z = torch.tensor([1 + 1j, 1, complex(NAN, 0), complex(0, NAN)])
    assert left_out(z, 1 + 1j) == [0]
    assert left_out(z, 1) == [1]
    assert left_out(z, NAN) == [2, 3]


@pytest.mark.parametrize("exclude", [(0, 255), {0, 255}, range(0, 256, 255), numpy.array([0, 255]), numpy.uint8(255)])
def test_several_values_come_in_any_container(exclude):
    x = torch.tensor([0, 7, 255], dtype=torch.uint8)
    assert left_out(x, exclude) == (
        [2] if exclude is not None and numpy.ndim(exclude) == 0 and not isinstance(exclude, set) else [0, 2]
    )


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.uint8, torch.tensor([-1, 255]), [2]),
        (torch.int8, torch.tensor([255], dtype=torch.uint8), []),
        (torch.uint8, torch.tensor([0.5, 7.0, NAN]), [1]),
        (torch.float32, torch.tensor([7, 255]), [1, 2]),
        (torch.float16, torch.tensor([1e6, 1e-9], dtype=torch.float64), []),
        (torch.float32, torch.tensor([7 + 1j, 255]), [2]),
        (torch.bool, torch.tensor([2, 0]), [0]),
        (torch.uint64, torch.tensor([-1, 255]), [2]),
        (torch.uint16, torch.tensor([7], dtype=torch.uint64), [1]),
    ],
)
def test_values_in_a_tensor_follow_the_same_rules(dtype, values, expected):
    x = torch.tensor([0, 7, 255]).to(dtype) if dtype is not torch.int8 else torch.tensor([0, 7, -1], dtype=dtype)
    assert left_out(x, values) == expected


def test_a_tensor_of_values_with_nan():
    assert left_out(torch.tensor([1.0, NAN]), torch.tensor([NAN])) == [1]


def test_finite():
    x = torch.tensor([1.0, NAN, INF, -INF])
    assert masked.valid(x, finite=True).tolist() == [True, False, False, False]
    assert masked.valid(x, finite=True, exclude=1).tolist() == [False] * 4
    assert masked.valid(torch.tensor([1, 2]), finite=True).all()


@pytest.mark.slow
def test_under_vmap_and_compile():
    x, values = torch.tensor([[1.0, NAN], [2.0, 3.0]]), torch.tensor([NAN, 3.0])
    for exclude in (NAN, [NAN, 3.0], values):
        expected = masked.valid(x, exclude=exclude)
        fn = lambda x: masked.valid(x, exclude=exclude)  # noqa: B023, E731
        assert torch.equal(torch.vmap(fn)(x), expected)
        assert torch.equal(torch.compile(fn, fullgraph=True, backend="eager")(x), expected)


def test_errors_teach():
    x = torch.zeros(2, 3)
    with pytest.raises(ArgumentTypeError, match=r"masked.valid\(\): `x` is the list \[1\]"):
        masked.valid([1])
    with pytest.raises(ArgumentTypeError, match=r"`keep` is a float32 tensor of shape \(2, 3\)"):
        masked.valid(x, keep=x)
    with pytest.raises(ArgumentValueError, match=r"`keep` has shape \(2,\), which does not broadcast to x of shape"):
        masked.valid(x, keep=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ArgumentTypeError, match="`exclude` has the str 'nan'"):
        masked.valid(x, exclude="nan")
    with pytest.raises(ArgumentTypeError, match="`exclude` has None"):
        masked.valid(x, exclude=[None])


@pytest.mark.parametrize("shape", [(7,), (30, 41), (3, 200_001), (70_000, 5)])
@pytest.mark.parametrize(
    "name", ["sum", "mean", "var", "amax", "median", "mode", "norm", "logsumexp", "softmax", "count"]
)
def test_a_mask_of_other_bytes_than_one_is_read_as_torch_reads_it(name, shape):
    image = torch.randint(0, 2, shape, dtype=torch.uint8) * 255
    x = torch.randn(shape).requires_grad_(name != "count")
    found = []
    for keep in (image.view(torch.bool), image != 0):
        result = getattr(masked, name)(x, dim=-1, keep=keep)
        result = result.values if name == "mode" else result
        found.append(
            (result.detach(), *torch.autograd.grad(result.nan_to_num().sum(), x, allow_unused=True))
            if result.requires_grad
            else (result,)
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_bools_of_other_bytes_than_one_are_one_value():
    x = torch.tensor([255, 0, 2, 0, 1], dtype=torch.uint8).view(torch.bool)
    assert masked.mode(x, keep=torch.ones(5, dtype=torch.bool))[0]


def test_what_is_excluded_is_compared_in_the_dtype_of_x():
    """Also where the values become another dtype afterwards."""
    x = torch.tensor([2**24, 2**24 + 1, 2**24 + 3])
    assert masked.quantile(x, 0.0, exclude=2**24 + 1) == 2**24
    assert masked.median(torch.tensor([2**24 + 1, 5]), exclude=2**24) > 5
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.tensor([0.1, 1.0, 3.0], dtype=dtype)
        for given in (half, half.clone().requires_grad_()):
            assert masked.var(given, exclude=0.1) == 2
            assert masked.mean(given, exclude=0.1) == 2
