"""torch's own table of masked operations (its OpInfos) as a law: values where something is kept, and gradcheck.

Where nothing is kept the two libraries promise different things (tests/masked/test_empty.py has ours), so these slices
are left out of the comparison.
"""

import random

import pytest
import torch

from gradgate import masked

SAMPLES, CHECKED = 24, 3
NAMES = (
    *("sum", "prod", "mean", "var", "std", "amin", "amax", "argmin", "argmax", "median", "norm", "logsumexp"),
    *("softmax", "log_softmax", "normalize", "cumsum", "cumprod"),
)
OURS = [name for name in NAMES if hasattr(masked, name)]
INDICES = ("argmax", "argmin")
WHOLE = ("cumsum", "cumprod", "softmax", "log_softmax", "normalize")  # the result has the shape of the input


@pytest.fixture(scope="module")
def operations():
    """The table, which takes some seconds to import."""
    table = pytest.importorskip(
        "torch.testing._internal.opinfo.definitions._masked",
        reason="torch.testing needs a package that is not installed (expecttest): its masked OpInfos are not compared",
        exc_type=ImportError,
    )
    return {operation.name.removeprefix("masked."): operation for operation in table.op_db}


def samples(operation, dtype, count):
    """Draw from the table, by a seed of the name."""
    name = operation.name
    torch.manual_seed(len(name))
    found = list(operation.sample_inputs("cpu", dtype, requires_grad=dtype is torch.float64))
    return random.Random(name).sample(found, min(count, len(found)))


def arguments(name, sample):
    """Give our keywords for a sample of theirs, and its dimensions and mask."""
    kw = dict(sample.kwargs)
    mask = kw.pop("mask", None)
    first = dict(zip({"norm": ["ord"], "normalize": ["ord", "dim"]}.get(name, ["dim"]), sample.args, strict=False))
    if "unbiased" in kw:
        kw["correction"] = int(kw.pop("unbiased"))
    if kw.get("correction", 1) is None:
        kw["correction"] = 1
    ours = {**first, **kw, "keep": mask}
    return ours, ours.get("dim"), mask


def dims_of(dim, x):
    dims = range(x.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return tuple(d % max(x.dim(), 1) for d in dims)


def comparable(name, x, dim, mask, keepdim, correction):
    """Say where enough is kept for both to mean the same."""
    kept = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    if name in WHOLE:
        return kept
    least = 1 + (correction if name in ("var", "std") else 0)
    dims = dims_of(dim, x)
    counts = kept.sum(dims, keepdim=keepdim) if x.dim() else kept.long()
    return counts >= least


def test_the_table_is_there(operations):
    assert set(operations) >= set(NAMES)
    assert len(OURS) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_values_are_those_of_torch_masked(name, dtype, operations):
    if dtype not in operations[name].dtypes or (dtype is torch.int64 and name in ("mean", "var", "std", "normalize")):
        pytest.skip("torch has no such table")
    for sample in samples(operations[name], dtype, SAMPLES):
        kw, dim, mask = arguments(name, sample)
        x = sample.input.detach()
        theirs = getattr(torch.masked, name)(x, *sample.args, **sample.kwargs)
        keepdim = kw.get("keepdim", False)
        ours = getattr(masked, name)(x, **kw, **({"empty": 0} if name in INDICES or dtype is torch.int64 else {}))
        where = comparable(name, x, dim, mask, keepdim, kw.get("correction", 1))
        if name == "median":  # theirs is the lower of two
            ours = masked.median(x, **kw, interpolation="lower")
        assert ours.shape == theirs.shape, (name, sample)
        torch.testing.assert_close(ours[where].to(theirs.dtype), theirs[where], equal_nan=True, msg=f"{name} {sample}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OURS if name not in INDICES])
def test_gradients_by_finite_differences(name, operations):
    for sample in samples(operations[name], torch.float64, CHECKED):
        kw, _, _ = arguments(name, sample)
        x = sample.input.detach().clone().requires_grad_()
        if x.numel() == 0:
            continue

        def compute(x, kw=kw):
            return torch.nan_to_num(getattr(masked, name)(x, **kw), nan=0.0, posinf=0.0, neginf=0.0)

        assert torch.autograd.gradcheck(compute, (x,), check_batched_grad=False), (name, sample)
