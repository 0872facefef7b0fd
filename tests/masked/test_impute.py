"""masked.impute: what is left out is replaced, and only the kept elements have a gradient."""

import functools
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradgate import masked
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingKeptError
from tests.witness import REAL, check_against, witness

NAN, INF = math.nan, math.inf
PLAIN = {
    "mean": torch.mean,
    "median": lambda own: own.quantile(0.5),
    "mode": lambda own: masked.mode(own).values,
    torch.amax: torch.amax,
}


def slice_by_slice(x, keep, using, dim, through):
    """The oracle: the plain statistic of the kept elements of each slice, in a Python loop."""
    rank = x.dim()
    dims = list(range(rank)) if dim is None else sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim))
    rest = [d for d in range(rank) if d not in dims]
    rows, kept = (
        (t.permute([*rest, *dims]).flatten(len(rest)).flatten(0, len(rest) - 1) for t in (x, keep))
        if rest
        else (t.reshape(1, -1) for t in (x, keep))
    )
    filled = []
    for row, chosen in zip(rows, kept, strict=True):
        own = row[chosen] if through else row[chosen].detach()
        statistic = PLAIN[using](own) if own.numel() else torch.tensor(NAN, dtype=x.dtype)
        filled.append(torch.stack([v if c else statistic for v, c in zip(row, chosen, strict=True)]))
    shape = [x.shape[d] for d in [*rest, *dims]]
    back = sorted(range(rank), key=lambda i: [*rest, *dims][i])
    return torch.stack(filled).reshape(shape).permute(back)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("using", list(PLAIN), ids=["mean", "median", "mode", "a function"][: len(PLAIN)])
@given(data=st.data())
def test_equal_to_a_loop_over_slices(using, through, data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    dims = st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True).map(tuple)
    dim = data.draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1), dims))
    # Different values: the gradient of an extreme or a median of equal ones would be a matter of taste.
    x = torch.randperm(math.prod(shape)).reshape(shape).double() / 7
    keep = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    x[~keep] = data.draw(st.sampled_from([NAN, INF, 3.0]))
    check_against(
        lambda x: masked.impute(x, keep=keep, using=using, dim=dim, through_statistic=through),
        lambda x: slice_by_slice(x, keep, using, dim, through),
        [x],
    )


@pytest.mark.slow
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("using", ["mean", "median"])
def test_every_promise(using, through):
    x = torch.tensor([[1.0, 2.5, -3.0], [0.5, 4.0, 7.0], [5.0, -1.0, 0.1]])
    keep = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    fn = functools.partial(_call, using, through)
    promises = REAL if through else REAL - {"gradcheck", "gradgradcheck"}
    witness(fn, lambda x, keep: slice_by_slice(x, keep, using, 0, through), x, keep, promises=promises)


def _call(using, through, x, keep):
    return masked.impute(x, keep=keep, using=using, dim=0, through_statistic=through)


def test_a_table_with_nan_as_in_numpy():
    table = torch.tensor([[1.0, NAN, 3.0], [NAN, 5.0, 9.0], [2.0, 7.0, NAN]])
    for using, numpys in (("mean", numpy.nanmean), ("median", numpy.nanmedian)):
        column = torch.tensor(numpys(table.numpy(), axis=0))
        assert torch.equal(masked.impute(table, exclude=NAN, using=using, dim=0), table.where(~table.isnan(), column))


def test_integers():
    x = torch.tensor([1, 2, 255, 2], dtype=torch.uint8)
    assert masked.impute(x, exclude=255, using="mode").tolist() == [1, 2, 2, 2]
    assert masked.impute(x, exclude=255, using="mode").dtype == torch.uint8
    assert masked.impute(x, exclude=255, using=0).dtype == torch.uint8
    mean = masked.impute(x, exclude=255)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, torch.tensor([1.0, 2.0, 5 / 3, 2.0]))
    assert masked.impute(x, exclude=255, using=0.5).tolist() == [1.0, 2.0, 0.5, 2.0]
    assert masked.impute(x, exclude=255, using=lambda kept: 0.5).tolist() == [1.0, 2.0, 0.5, 2.0]
    assert masked.impute(torch.tensor([True, False]), exclude=False, using=1).tolist() == [True, True]


def test_a_value_and_a_tensor_that_learns():
    x = torch.tensor([[1.0, NAN], [NAN, INF]], requires_grad=True)
    value = torch.tensor([10.0, 20.0], requires_grad=True)
    out = masked.impute(x, keep=x.detach().isfinite(), using=value)
    assert out.tolist() == [[1.0, 20.0], [10.0, 20.0]]
    to_x, to_value = torch.autograd.grad(out, (x, value), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert to_x.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert to_value.tolist() == [3.0, 6.0]
    assert masked.impute(x.detach(), exclude=[NAN, INF], using=-1.0).tolist() == [[1.0, -1.0], [-1.0, -1.0]]


def test_with_nothing_left_out_it_is_x():
    x = torch.randn(3, 2)
    assert torch.equal(masked.impute(x), x)
    assert torch.equal(masked.impute(x, exclude=NAN, dim=0, using=torch.amin), x)
    assert masked.impute(torch.tensor(2.0), keep=torch.tensor(False), using=5).item() == 5.0
    assert masked.impute(torch.zeros(0, 2), dim=0).shape == (0, 2)
    assert masked.impute(torch.zeros(2, 0), dim=0, using=torch.amax).shape == (2, 0)


@pytest.mark.parametrize("using", ["mean", "median", "mode", torch.amax], ids=["mean", "median", "mode", "a function"])
def test_a_slice_with_nothing_kept(using):
    x = torch.tensor([[NAN, 1.0], [NAN, 2.0]], requires_grad=True)
    keep = torch.tensor([False, True])
    for through in (False, True):
        out = masked.impute(x, keep=keep, using=using, dim=0, through_statistic=through)
        assert out[:, 0].isnan().all()
        (gradient,) = torch.autograd.grad(out, x, torch.full((2, 2), NAN).index_fill(1, torch.tensor(1), 1.0))
        assert gradient.tolist() == [[0.0, 1.0], [0.0, 1.0]]
        assert masked.impute(x, keep=keep, using=using, dim=0, empty=9.0)[:, 0].tolist() == [9.0, 9.0]
    with pytest.raises(NothingKeptError, match=r"nothing is kept in 1 of 2 slices; the first is x\[:, 0\]"):
        masked.impute(x, keep=keep, using=using, dim=0, empty="raise")
    with pytest.raises(NothingKeptError, match="nothing is kept"):
        masked.impute(torch.tensor([1, 1]), exclude=1, using="mode")


def test_errors_say_what_and_how():
    x, keep = torch.ones(2, 2), torch.tensor([True, False])
    with pytest.raises(ArgumentValueError, match=r"`using` is the str 'men'(.|\n)*\"mean\", \"median\" and \"mode\""):
        masked.impute(x, keep=keep, using="men")
    with pytest.raises(ArgumentTypeError, match=r"`using` is None"):
        masked.impute(x, keep=keep, using=None)
    with pytest.raises(ArgumentValueError, match=r"`using` has shape \(3,\), x has \(2, 2\)"):
        masked.impute(x, keep=keep, using=torch.ones(3))
    with pytest.raises(ArgumentValueError, match=r"masked.impute\(\): `using` is -1, the result is uint8"):
        masked.impute(x.byte(), keep=keep, using=-1)
    with pytest.raises(
        ArgumentTypeError, match=r"called with a float32 tensor of shape \(2,\) and gave a float32 tensor"
    ):
        masked.impute(x, keep=keep, using=torch.exp)
    with pytest.raises(ArgumentTypeError, match=r"`x` is the list"):
        masked.impute([1.0])


@pytest.mark.slow
def test_a_function_cannot_be_called_inside_vmap_or_compile():
    def call(x):
        return masked.impute(x, keep=x > 0, using=torch.amax)

    for inside in (torch.vmap(call), torch.compile(call, backend="eager")):
        with pytest.raises(ArgumentValueError, match=r"the values cannot be seen here(.|\n)*using=\"mean\""):
            inside(torch.ones(3, 2))
    torch._dynamo.reset()
