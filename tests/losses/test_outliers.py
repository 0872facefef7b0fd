"""inliers and trimmed: what lies too far out, and the mean without it."""

import math
import statistics

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate import losses
from tests.witness import REAL, witness

NAN, INF = math.nan, math.inf


def slow(x, method, threshold):
    """Ask numpy about a 1-D list of numbers, the finite ones only."""
    finite = numpy.array([v for v in x if math.isfinite(v)])
    if len(finite) == 0:
        return [False] * len(x)
    if method == "mad":
        middle = numpy.median(finite)
        spread = numpy.median(abs(finite - middle)) / statistics.NormalDist().inv_cdf(0.75)
        low, high = middle - threshold * spread, middle + threshold * spread
    elif method == "zscore":
        middle, spread = finite.mean(), finite.std()
        low, high = middle - threshold * spread, middle + threshold * spread
    elif method == "iqr":
        first, third = numpy.quantile(finite, [0.25, 0.75])
        low, high = first - threshold * (third - first), third + threshold * (third - first)
    else:
        low, high = numpy.quantile(finite, [(1 - threshold) / 2, (1 + threshold) / 2])
    # The border itself may fall either way by rounding: None says that both answers are right.
    tight = 1e-9 * max(1.0, abs(low), abs(high))
    return [
        False if not math.isfinite(v) else None if min(abs(v - low), abs(v - high)) < tight else bool(low <= v <= high)
        for v in x
    ]


values = st.lists(st.one_of(st.floats(-5, 5), st.sampled_from([NAN, INF, -INF, 1e6, 0.0])), min_size=0, max_size=25)


@pytest.mark.parametrize(
    ("method", "threshold"), [("mad", 3.5), ("mad", 1.0), ("zscore", 1.5), ("iqr", 1.5), ("quantile", 0.8)]
)
@given(values)
def test_inliers_are_what_numpy_says(method, threshold, x):
    ours = losses.inliers(torch.tensor(x, dtype=torch.float64), method=method, threshold=threshold)
    for said, expected in zip(ours.tolist(), slow(x, method, threshold), strict=True):
        assert expected is None or said is expected


@pytest.mark.parametrize("method", ["mad", "zscore", "iqr", "quantile"])
def test_along_a_dimension_each_slice_is_by_itself(method):
    x = torch.randn(4, 50, 3, dtype=torch.float64)
    x[0, :5] = 100
    x[1, 7] = NAN
    threshold = 0.9 if method == "quantile" else 2.0
    ours = losses.inliers(x, method=method, threshold=threshold, dim=1)
    for i in range(4):
        for j in range(3):
            assert torch.equal(ours[i, :, j], losses.inliers(x[i, :, j], method=method, threshold=threshold))
    together = losses.inliers(x, method=method, threshold=threshold, dim=(1, 2))
    assert torch.equal(together[2], losses.inliers(x[2], method=method, threshold=threshold))


def test_the_true_median_makes_the_difference():
    """With torch.median the deviation of [1, 1, 5, 5] would be 0 and every point an outlier."""
    assert losses.inliers(torch.tensor([1.0, 1.0, 5.0, 5.0])).all()


def test_a_spread_of_zero_keeps_the_middle():
    assert losses.inliers(torch.tensor([2.0, 2.0, 2.0, 9.0])).tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_every_real_dtype(dtype):
    assert losses.inliers(torch.tensor([1, 2, 3, 2, 1, 200]).to(dtype)).tolist() == [True] * 5 + [False]


def test_the_mask_has_no_gradient_and_empty_is_empty():
    x = torch.randn(5, requires_grad=True)
    assert not losses.inliers(x).requires_grad
    assert losses.inliers(torch.zeros(0)).shape == (0,)
    assert not losses.inliers(torch.tensor([NAN, INF])).any()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mad", "iqr"])
def test_more_than_sixteen_million_elements(method):
    """torch.quantile refuses there."""
    x = torch.randn(2**24 + 3)
    x[:3] = torch.tensor([1e4, NAN, -1e4])
    inside = losses.inliers(x, method=method, threshold=8.0)
    assert (~inside).nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mad", "zscore", "iqr", "quantile"])
def test_compiled_and_without_data(method):
    x = torch.tensor([1.0, 2.0, NAN, 3.0, 500.0, 2.5, 1.5])
    threshold = 0.7 if method == "quantile" else 1.4
    function = lambda x: losses.inliers(x, method=method, threshold=threshold)  # noqa: E731
    witness(function, function, x, promises={"compile", "fake", "vmap", "noncontiguous"})


def test_wrong_arguments():
    x = torch.ones(3)
    with pytest.raises(
        gg.errors.ArgumentValueError, match=r"(?s)`method` is the str 'sigma'.*mad, zscore, iqr, quantile"
    ):
        losses.inliers(x, method="sigma")
    with pytest.raises(
        gg.errors.ArgumentValueError, match=r"(?s)`threshold` is 3.5 with method='quantile'.*threshold=0.95"
    ):
        losses.inliers(x, method="quantile")
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`threshold` is -1.*distance"):
        losses.inliers(x, threshold=-1)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)complex64 tensor.*no order"):
        losses.inliers(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`threshold` is None.*threshold=3.5"):
        losses.inliers(x, threshold=None)
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`method` is the list.*mad, zscore"):
        losses.inliers(x, method=["mad"])


@pytest.mark.parametrize("method", ["mad", "zscore", "iqr", "quantile"])
def test_defaults_of_torch_change_nothing(method):
    x = torch.tensor([1.0, 2.0, 3.0, 2.0, 500.0, NAN])
    options = {"method": method, "threshold": 0.7 if method == "quantile" else 1.4}
    expected, integers = losses.inliers(x, **options), losses.inliers(x[:5].long(), **options)
    with torch.device("meta"):
        assert torch.equal(losses.inliers(x, **options), expected)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(losses.inliers(x[:5].long(), **options), integers)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("largest", [3.2e38, 1.7e308])
def test_the_middle_of_the_largest_numbers_there_are(largest):
    x = torch.tensor([largest, 0.99 * largest, 0.98 * largest, 1.0], dtype=torch.float64 if largest > 1e39 else None)
    assert losses.inliers(x).tolist() == [True, True, True, False]


# --- trimmed ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-10, 10), min_size=0, max_size=20), st.floats(0, 0.99))
def test_trimmed_is_the_mean_of_the_smallest(x, fraction):
    kept = sorted(x)[: len(x) - int(fraction * len(x) + 1e-9)]
    ours = losses.trimmed(torch.tensor(x, dtype=torch.float64), fraction)
    assert math.isclose(ours, sum(kept) / len(kept) if kept else 0.0, abs_tol=1e-12)


def test_trimmed_in_every_way_of_using_it():
    x = torch.tensor([0.3, 2.0, -1.0, 7.0, 0.5], dtype=torch.float64)
    witness(lambda x: losses.trimmed(x, 0.4), lambda x: x.topk(3, largest=False).values.mean(), x, promises=REAL)


def test_bad_values_are_trimmed_first_and_get_exactly_zero():
    x = torch.tensor([1.0, NAN, 2.0, INF], requires_grad=True)
    loss = losses.trimmed(x, 0.5)
    loss.backward()
    assert loss == 1.5
    assert torch.equal(x.grad, torch.tensor([0.5, 0.0, 0.5, 0.0]))
    assert losses.trimmed(torch.tensor([NAN, NAN, 1.0]), 0.4).isnan(), "more of them than are trimmed: not hidden"


def test_wrong_fractions():
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`fraction` is 1.0.*something has to be left"):
        losses.trimmed(torch.ones(3), 1.0)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)int64 tensor.*per_sample.float\(\)"):
        losses.trimmed(torch.ones(3, dtype=torch.int64), 0.1)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`fraction` is the str '10 %'.*per_sample, 0.1"):
        losses.trimmed(torch.ones(3), "10 %")


# --- decisions -------------------------------------------------------------------------------------------------------


class Shelf:
    def __init__(self):
        self.incidents = []

    def record_many(self, incidents, payloads=None):
        self.incidents += incidents


def test_decisions_are_written_down():
    per_sample = torch.tensor([1.0, 1.2, 90.0, 0.9, NAN])
    shelf = Shelf()
    keep = losses.inliers(per_sample)
    given = losses.record_decisions(shelf, keep=keep, per_sample=per_sample, ids=list("abcde"), step=3)
    assert given == shelf.incidents
    assert [(i.sample_id, i.row, i.stage, i.cause, i.step) for i in given] == [
        ("c", 2, "loss", "outlier", 3),
        ("e", 4, "loss", "outlier", 3),
    ]
    assert given[0].loss == 90.0
    weights = losses.robust_weights(losses.cauchy, torch.tensor([0.0, 3.0]))
    (less,) = losses.record_decisions(shelf, weights=weights, cause="residual")
    assert (less.cause, less.sample_id) == ("residual, counts less", "1")
    assert math.isclose(less.details["weight"], 0.1, rel_tol=1e-6)
    assert losses.record_decisions(shelf, keep=torch.tensor([True])) == []


def test_wrong_decisions():
    with pytest.raises(gg.errors.ArgumentValueError, match="neither `keep` nor `weights`"):
        losses.record_decisions(Shelf())
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`keep` has shape \(2, 2\).*flatten\(1\)"):
        losses.record_decisions(Shelf(), keep=torch.ones(2, 2, dtype=torch.bool))
    keep = torch.tensor([True, False])
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`ids` has 1 entries for 2 samples.*ids=ids\[:2\]"):
        losses.record_decisions(Shelf(), keep=keep, ids=["a"])
    with pytest.raises(gg.errors.ArgumentValueError, match=r"`per_sample` has 3 entries for 2 samples"):
        losses.record_decisions(Shelf(), keep=keep, per_sample=torch.ones(3))
