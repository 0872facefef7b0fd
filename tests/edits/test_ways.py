"""Every edit in every way of using it: vmap, forward mode, torch.compile, complex, half precision, without data."""

import pytest
import torch

import gradgate as gg
from tests import witness
from tests.edits import oracle

INDEX = torch.tensor([2, 0, 2, -1])  # a place named three times, one of them from the end
REAL_NAMES = [name for name in oracle.NAMES if name not in ("min", "max")]


def promises(name):
    return witness.REAL if name in ("min", "max") else witness.ALL


def inputs(rows):
    return torch.rand(3, 2) + 0.5, torch.rand(rows, 2) + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.NAMES)
def test_an_index_tensor_with_duplicates(name):
    witness.witness(
        lambda x, v: getattr(gg.at(x)[INDEX], name)(v),
        lambda x, v: oracle.edit(x, (INDEX,), name, v),
        *inputs(4),
        promises=promises(name),
        empty=(torch.zeros(3, 0), torch.zeros(4, 0)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.NAMES)
def test_an_index_tensor_that_is_an_argument(name):
    """vmap over the index too: each sample edits other places."""
    x, v = inputs(4)
    witness.witness(
        lambda x, i, v: getattr(gg.at(x)[i], name)(v),
        lambda x, i, v: oracle.edit(x, (i,), name, v),
        x,
        INDEX,
        v,
        promises={"vmap", "compile", "fake", "jvp"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.NAMES)
def test_a_slice(name):
    witness.witness(
        lambda x, v: getattr(gg.at(x)[1:], name)(v),
        lambda x, v: oracle.edit(x, (slice(1, None),), name, v),
        *inputs(2),
        promises=promises(name),
        empty=(torch.zeros(3, 0), torch.zeros(2, 0)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.NAMES)
def test_a_mask_that_is_an_argument(name):
    """One value for all: nobody asks how many are True, so it works without data and under vmap."""
    x = torch.rand(3, 2) + 0.5
    keep = torch.tensor([[True, False], [False, True], [True, True]])
    witness.witness(
        lambda x, keep, v: getattr(gg.at(x)[keep], name)(v),
        lambda x, keep, v: oracle.edit(x, keep, name, v),
        x,
        keep,
        torch.tensor(1.5),
        promises=promises(name),
        empty=(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool), torch.tensor(1.5)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.NAMES)
def test_mode_drop(name):
    wild = torch.tensor([2, 9, 0, -8])
    witness.witness(
        lambda x, v: getattr(gg.at(x)[wild], name)(v, mode="drop"),
        lambda x, v: oracle.edit(x, (torch.tensor([2, 0]),), name, v[[0, 2]]),
        *inputs(4),
        promises=promises(name),
    )


@pytest.mark.slow
def test_a_single_place_that_is_an_argument():
    """The commonest edit under vmap: each row at its own place."""
    witness.witness(
        lambda x, i, v: gg.at(x)[i].set(v),
        lambda x, i, v: oracle.edit(x, (i,), "set", v),
        torch.rand(3),
        torch.tensor(1),
        torch.tensor(4.0),
    )


@pytest.mark.slow
def test_apply_with_a_slice_and_with_unique_indices():
    witness.witness(
        lambda x: gg.at(x)[::2].apply(torch.sin), lambda x: torch.stack([x[0].sin(), x[1], x[2].sin()]), torch.rand(3)
    )
    index = torch.tensor([2, 0])
    witness.witness(
        lambda x: gg.at(x)[index].apply(torch.sin, unique_indices=True),
        lambda x: torch.stack([x[0].sin(), x[1], x[2].sin()]),
        torch.rand(3),
    )


@pytest.mark.slow
def test_get_in_every_way():
    witness.witness(lambda x: gg.at(x)[INDEX].get(), lambda x: x[INDEX], torch.rand(3, 2), promises=witness.ALL)
    witness.witness(
        lambda x: gg.at(x)[[0, 9]].get(fill_value=0), lambda x: torch.stack([x[0], 0 * x[0]]), torch.rand(3, 2)
    )


@pytest.mark.slow
def test_a_tensor_of_a_module_in_torch_compile_and_func_grad():
    model = torch.nn.Linear(2, 2)
    x = torch.rand(3, 2)

    def loss(v):
        return torch.func.functional_call(model, gg.at(model, "weight")[0].set(v), x).square().sum()

    v = torch.rand(2)
    direct = torch.func.grad(loss)(v)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaf = v.clone().requires_grad_()
    compiled(leaf).backward()
    torch.testing.assert_close(leaf.grad, direct)


@pytest.mark.parametrize("index", [slice(1, None), torch.tensor([0, 0, 2]), torch.tensor([True, False, True])])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", oracle.NAMES)
def test_every_dtype(name, dtype, index):
    refused = {
        "divide": not (dtype.is_floating_point or dtype.is_complex),
        "min": dtype.is_complex,
        "max": dtype.is_complex,
        "subtract": dtype is torch.bool,
        "power": dtype is torch.bool,
    }
    x = torch.tensor([1, 2, 3]).to(dtype)
    count = 2 if not (isinstance(index, torch.Tensor) and index.dtype is torch.int64) else 3
    value = torch.tensor([2, 3, 1][:count]).to(dtype)
    if refused.get(name):
        with pytest.raises(gg.errors.ArgumentTypeError, match=rf"at\(x\)\[...\].{name}\(\): `x` is a"):
            getattr(gg.at(x)[index], name)(value)
        return
    new = getattr(gg.at(x)[index], name)(value)
    assert new.dtype == dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    expected = oracle.edit(x.to(wide), (index,), name, value.to(wide)).to(dtype)
    torch.testing.assert_close(new, expected)


def test_under_torch_inference_mode_and_no_grad():
    x = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        assert not gg.at(x)[0].set(1.0).requires_grad
    with torch.inference_mode():
        assert gg.at(x)[[0, 0]].set(torch.tensor([1.0, 2.0])).tolist() == [2.0, 0.0, 0.0]
