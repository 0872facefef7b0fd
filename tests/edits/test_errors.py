"""What an edit refuses, and how it says so."""

import operator

import numpy as np
import pytest
import torch

import gradgate as gg
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, NothingMatchedError

X = torch.zeros(3, 4)


def refused(error, words, call):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gg.at(X)[3].set(1.0), ["index 3 is out of range for dimension 0 of size 3", 'mode="drop"']),
        (lambda: gg.at(X)[..., -5].set(1.0), ["index -5 is out of range for dimension 1 of size 4", "from -4 to 3"]),
        (lambda: gg.at(X)[[0, 7]].set(1.0), ["index 7 is out of range for dimension 0 of size 3"]),
        (lambda: gg.at(X)[[0, 7]].set(torch.ones(2, 4)), ["index 7 is out of range for dimension 0 of size 3"]),
        (lambda: gg.at(X)[[0, -9]].add(1.0), ["index -9 is out of range for dimension 0 of size 3"]),
        (lambda: gg.at(X)[[0, 1], [0, 4]].multiply(2.0), ["index 4 is out of range for dimension 1 of size 4"]),
        (lambda: gg.at(X)[[0, 1], [0, 4]].set(torch.ones(2)), ["index 4 is out of range for dimension 1 of size 4"]),
        (lambda: gg.at(X)[:, [4]].max(2.0), ["index 4 is out of range for dimension 1 of size 4"]),
        (lambda: gg.at(X)[1, [4]].get(), ["index 4 is out of range for dimension 1 of size 4"]),
        (lambda: gg.at(X)[[3, 3]].apply(torch.relu), ["index 3 is out of range for dimension 0 of size 3"]),
        (
            lambda: gg.at(torch.zeros(0, 2))[0].set(1.0),
            ["index 0 is out of range for dimension 0 of size 0", "no index"],
        ),
        (lambda: gg.at(torch.zeros(0, 2))[[0]].set(1.0, mode="clip"), ["dimension 0 of size 0"]),
        (lambda: gg.at(torch.zeros(0, 2))[0].set(1.0, mode="clip"), ["dimension 0 of size 0"]),
        (lambda: gg.at(X)[0, 0, 0].set(1.0), ["speaks of 3 dimensions, x of shape (3, 4) has 2"]),
        (lambda: gg.at(torch.tensor(1.0))[0].set(1.0), ["speaks of 1 dimensions, x of shape () has 0"]),
        (lambda: gg.at(X)[..., 0, ...].set(1.0), ["more than one ellipsis"]),
        (
            lambda: gg.at(X)[torch.ones(4, dtype=torch.bool)].set(1.0),
            ["the mask has size 4 in its dimension 0, x has size 3 in dimension 0", "(4,), that of x (3, 4)"],
        ),
        (
            lambda: gg.at(X)[:, torch.ones(3, dtype=torch.bool)].set(1.0),
            ["the mask has size 3 in its dimension 0, x has size 4 in dimension 1"],
        ),
    ],
)
def test_an_index_that_does_not_fit_names_dimension_size_and_index(call, words):
    refused(ArgumentIndexError, words, call)
    refused(IndexError, words, call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gg.at(X)["a"].set(1.0), ["the str 'a' is no index"]),
        (lambda: gg.at(X)[1.5].set(1.0), ["tensor of shape () is no index"]),
        (lambda: gg.at(X)[torch.zeros(3)].set(1.0), ["a float32 tensor of shape (3,) is no index", "index.long()"]),
        (lambda: gg.at(X)[torch.zeros(3, dtype=torch.uint8)].set(1.0), ["uint8", "index.bool()"]),
        (lambda: gg.at(X)[0:2:"x"].set(1.0), ["is no slice of a dimension"]),
        (lambda: gg.at(X)[::0].set(1.0), ["slice(None, None, 0) is no slice of a dimension"]),
        (lambda: gg.at(X).set(1.0), ["at(x).set has no index", "gg.at(x)[...].set(v)"]),
        (lambda: gg.at(X).__setitem__(0, 1.0), ["at(x)[idx] = v assigns in place", "gg.at(x)[idx].set(v)"]),
        (lambda: operator.iadd(gg.at(X)[0], 1), ["at(x)[idx] += v works in place", "gg.at(x)[idx].add(v)"]),
        (lambda: operator.isub(gg.at(X)[0], 1), ["at(x)[idx] -= v works in place", ".subtract(v)"]),
        (lambda: operator.imul(gg.at(X)[0], 1), ["at(x)[idx] *= v works in place", ".multiply(v)"]),
        (lambda: operator.itruediv(gg.at(X)[0], 1), ["at(x)[idx] /= v works in place", ".divide(v)"]),
        (lambda: gg.at(X.to_sparse())[0].set(1.0), ["a sparse_coo tensor", "x.to_dense()"]),
        (lambda: gg.at({"a": X.to_sparse()}, "a")[0].set(1.0), ["a sparse_coo tensor"]),
        (lambda: gg.at([1.0])[0].set(1.0), ["`x` is the list [1.0]", "torch.as_tensor"]),
        (lambda: gg.at(X, "weight")[0].set(1.0), ["`name` is the str 'weight'"]),
        (lambda: gg.at(torch.nn.Linear(2, 1))[0].set(1.0), ["one of its tensors must be named", "'weight'"]),
        (lambda: gg.at({})[0].set(1.0), ["`name` is None, and x is this dict"]),
        (lambda: gg.at(X)[0].set("a"), ["the value is the str 'a'", "torch.as_tensor(value)"]),
        (lambda: gg.at(X)[0].set(None), ["the value is None"]),
        (lambda: gg.at(X.long())[0].set(1.5), ["the value is the float 1.5", "keeps the dtype of x"]),
        (lambda: gg.at(X)[0].set(1j), ["the value is the complex 1j"]),
        (lambda: gg.at(X.long())[0].set(torch.ones(4)), ["the value is a float32 tensor", "v.to(x.dtype)"]),
        (lambda: gg.at(X)[0].apply(2.0), ["`fn` is the float 2.0", ".set(v)"]),
        (lambda: gg.at(X.bool())[0].subtract(True), ["`x` is a bool tensor", "booleans"]),
        (lambda: gg.at(X.long())[0].divide(2), ["`x` is an int64 tensor", "x.float()"]),
        (lambda: gg.at(X.cfloat())[0].max(2), ["`x` is a complex64 tensor", "no order"]),
    ],
)
def test_a_wrong_kind_of_argument(call, words):
    refused(ArgumentTypeError, words, call)
    refused(TypeError, words, call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gg.at(X)[0].set(torch.ones(3)), ["value has shape (3,), the selection has shape (4,)"]),
        (lambda: gg.at(X)[[0, 1]].set(torch.ones(2)), ["the selection has shape (2, 4)", "v.reshape(2, 1)"]),
        (lambda: gg.at(X)[X == 0].set(torch.ones(1, 5)), ["value has shape (1, 5), the selection has shape (12,)"]),
        (lambda: gg.at(X)[X[:, 0] == 0].set(torch.ones(5)), ["the selection has shape (number of True, 4)"]),
        (lambda: gg.at(X)[0].apply(lambda t: t[:2]), ["value has shape (2,), the selection has shape (4,)"]),
        (lambda: gg.at(X)[[0, 1], [0, 1, 2]].set(1.0), ["shapes (2,), (3,), which do not broadcast", "i[:, None]"]),
        (lambda: gg.at(X)[0].set(1.0, mode="wrap"), ["`mode` is the str 'wrap'", '"clip"']),
        (lambda: gg.at(X)[0].get(mode="drop"), ["`mode` is 'drop' and `fill_value` is None"]),
        (lambda: gg.at(X)[0].get(mode="clip", fill_value=0), ["`mode` is 'clip' and `fill_value` is the int 0"]),
        (lambda: gg.at(X.to(torch.uint8))[0].set(300), ["300 does not fit into uint8"]),
        (lambda: gg.at(X.to(torch.uint8))[0].add(-1), ["-1 does not fit into uint8", "wrap around silently"]),
        (lambda: gg.at(X.long())[0].set(2**63), [f"{2**63} does not fit into int64"]),
        (lambda: gg.at(X)[0].set(10**400), ["does not fit into float32"]),
        (lambda: gg.at(X.to("meta"))[0].set(torch.ones(4)), ["the value is on cpu, x is on meta", "v.to(x.device)"]),
    ],
)
def test_a_wrong_value(call, words):
    refused(ArgumentValueError, words, call)
    refused(ValueError, words, call)


def test_a_name_that_is_not_there_gives_the_nearest():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    refused(
        NothingMatchedError,
        ["no tensor '0.wieght' in the module Sequential", "0.weight"],
        lambda: gg.at(model, "0.wieght"),
    )
    refused(LookupError, ["it has a, b"], lambda: gg.at({"a": X, "b": X}, "zzz"))
    refused(LookupError, ["it has none"], lambda: gg.at(torch.nn.Module(), "weight"))
    refused(LookupError, ["no tensor 'a' in this dict"], lambda: gg.at({"a": None}, "a"))


def test_apply_without_data_asks_for_the_promise():
    index = torch.tensor([[0, 0], [1, 2], [2, 2]])
    call = torch.vmap(lambda x, i: gg.at(x)[i].apply(torch.sin))
    refused(ArgumentValueError, ["cannot be read here", "unique_indices=True"], lambda: call(torch.rand(3, 3), index))


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'At' object has no attribute 'sett'"):
        gg.at(X).sett  # noqa: B018
    assert not hasattr(gg.at(X), "_finished")


def test_another_error_of_torch_passes():
    def fails(values):
        raise RuntimeError("a fault of fn")

    with pytest.raises(RuntimeError, match="a fault of fn"):
        gg.at(X)[[0, 0]].apply(fails)


# --- what is taken -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        np.int64(1),
        np.array([0, 2]),
        np.array([True, False, True]),
        range(2),
        range(0),
        [],
        [[0, 1], [2, 0]],
        [True, False, True],
        (1, [0, 3]),
        True,
        False,
        torch.tensor(True),
        torch.tensor([0, 1], dtype=torch.int16),
        torch.tensor(2),
        (torch.tensor(1), slice(None), None),
        (),
        (None, ..., None),
        (torch.tensor(0), slice(None), [1, 0]),
    ],
    ids=str,
)
def test_every_form_of_an_index_does_what_torch_does(index):
    x = (
        torch.arange(24.0).reshape(3, 4, 2)
        if isinstance(index, tuple) and len(index) == 3
        else torch.arange(12.0).reshape(3, 4)
    )
    plain = [list(i) if isinstance(i, range) else i.long() if _is_short(i) else i for i in _items(index)]
    expected = x.clone()
    expected[tuple(plain)] = 9.0
    assert torch.equal(gg.at(x)[index].set(9.0), expected)
    assert torch.equal(gg.at(x)[index].get(), x[tuple(plain)])


def _items(index):
    return index if isinstance(index, tuple) else (index,)


def _is_short(item):
    return isinstance(item, torch.Tensor) and item.dtype is torch.int16


def test_a_numpy_bool_is_a_bool():
    """torch itself refuses it."""
    assert gg.at(X)[np.bool_(True)].set(1.0).sum() == 12
    assert gg.at(X)[np.bool_(False)].set(1.0).sum() == 0


def test_values_of_every_form():
    x = torch.zeros(2)
    for value in (1, 1.0, True, np.float32(1), np.array([1.0, 1.0]), [1, 1], torch.tensor([1]), torch.ones(1, 1, 2)):
        assert gg.at(x)[:].set(value).tolist() == [1.0, 1.0]
        assert gg.at(x)[[0, 1]].set(value).tolist() == [1.0, 1.0]
    assert gg.at(x.half())[0].set(torch.tensor(1.0, dtype=torch.float64)).dtype is torch.float16


def test_it_says_what_it_is():
    assert repr(gg.at(X)) == "at(a float32 tensor of shape (3, 4))"
