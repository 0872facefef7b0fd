"""A sample as bytes and back: every kind of value, within its limit, without pickle."""

import math
import pickle
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from gradgate._payload import Fields, Missing, decode, encode, missing_in
from gradgate.errors import LedgerError

Pair = namedtuple("Pair", ["image", "label"])

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    image: object
    name: str = "x"

    def __post_init__(self):
        if self.name == "made by the reader":
            raise AssertionError("nothing of the class may run")


def there_and_back(tree, **options):
    return decode(encode(tree), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (), (0, 2)], ids=str)
def test_every_dtype_keeps_its_bits(dtype, shape):
    tensor = (torch.rand(shape) * 5).to(dtype)
    back = there_and_back(tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert back.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_nan_payloads_keep_their_bits():
    bits = torch.tensor([0x7FC00001, 0x7F800000, -1], dtype=torch.int32)
    assert there_and_back(bits.view(torch.float32)).view(torch.int32).equal(bits)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T[1:2],
        torch.arange(6.0)[::2],
        torch.ones(3).expand(2, 3),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative", "sparse", "parameter", "computed"],
)
def test_every_layout_comes_back_as_values(tensor):
    back = there_and_back(tensor)
    assert back.layout is tensor.layout
    assert torch.equal(back.to_dense(), tensor.detach().to_dense())


def test_a_leaf_that_wants_a_gradient_still_does():
    assert there_and_back(torch.ones(1, requires_grad=True)).requires_grad
    assert not there_and_back(torch.ones(1)).requires_grad


def test_tensors_that_share_memory_are_stored_each():
    whole = torch.arange(6.0)
    first, second, third = there_and_back([whole, whole[2:], whole])
    assert (first.tolist(), second.tolist(), third.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=8), st.binary(max_size=8),
    st.complex_numbers(),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
TREES = st.recursive(
    SCALARS,
    lambda trees: st.one_of(
        st.lists(trees, max_size=3),
        st.lists(trees, max_size=3).map(tuple),
        st.dictionaries(KEYS, trees, max_size=3),
        st.sets(st.integers(), max_size=1),
        st.frozensets(st.text(max_size=2), max_size=1),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(tree=TREES)
def test_every_tree_of_plain_values_comes_back(tree):
    back = there_and_back(tree)
    assert repr(back) == repr(tree)  # NaN is not equal to itself, but looks the same.


def test_other_kinds():
    for value in (
        Path("a/b"),
        torch.float16,
        torch.device("cpu"),
        torch.Size([1, 2]),
        "é\ud800",
        -math.inf,
        10**5000,
        {7, 15, None},
    ):
        back = there_and_back(value)
        assert (type(back), back) == (type(value), value)


def test_numpy_comes_back_as_numpy():
    reversed_array = numpy.arange(6).reshape(2, 3)[::-1]
    back = there_and_back({"array": reversed_array, "number": numpy.float32(2.5)})
    assert numpy.array_equal(back["array"], reversed_array)
    assert back["array"].dtype == reversed_array.dtype
    assert type(back["number"]) is numpy.float32


def test_named_things_have_their_fields_without_their_class():
    back = there_and_back({"pair": Pair(torch.ones(1), 3), "batch": Batch(torch.zeros(2), "made by the reader"[:4])})
    assert isinstance(back["pair"], Fields)
    assert back["pair"].label == back["pair"][1] == 3
    image, _ = back["pair"]
    assert image.tolist() == [1.0]
    assert back["batch"].name == "made"
    with pytest.raises(AttributeError, match="nothing"):
        back["batch"].nothing  # noqa: B018


def test_named_things_become_themselves_where_the_class_is_given():
    stored = encode([Pair(1, 2), Batch(None, "y")])
    pair, batch = decode(stored, classes=[Pair, Batch])
    assert (pair, batch) == (Pair(1, 2), Batch(None, "y"))
    assert type(pair) is Pair
    other = namedtuple("Pair", ["image", "target"])
    assert type(decode(stored, classes=[other])[0]) is Fields  # The same name with other fields is another class.


def test_nothing_of_a_class_runs_when_it_is_made_again():
    stored = encode(Batch(None, "x")).replace(b'\\"x\\"', b'\\"made by the reader\\"')
    stored = (len(stored) - 8).to_bytes(8, "little") + stored[8:]
    assert decode(stored, classes=[Batch]).name == "made by the reader"


def test_what_cannot_be_stored_says_what_it_was():
    tree = {"image": object(), "x": torch.ones(1), "deep": [torch.empty(2, 3, device="meta")], "kind": Batch}
    back = there_and_back(tree)
    assert back["image"] == Missing("builtins.object")
    assert back["x"].tolist() == [1.0]
    assert missing_in(back) == ["builtins.object", "torch.float32 of shape (2, 3)", "builtins.type"]
    assert missing_in(Batch(Missing("a"))) == ["a"]


@pytest.mark.slow
def test_tensors_without_values_of_their_own_are_missing():
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.warns(UserWarning, match="prototype"):
        wrapped = masked_tensor(torch.ones(2), torch.tensor([True, False]))
    assert missing_in(there_and_back([fake, wrapped])) == ["torch.float32 of shape (2,)"] * 2
    seen = []

    def inside(x):
        seen.append(there_and_back(x))
        return x

    torch.func.vmap(inside)(torch.ones(2, 3))
    assert seen == [Missing("torch.float32 of shape (3,)")]


class Picture(torch.Tensor):
    """A subclass with memory of its own, as image libraries have."""


def test_a_subclass_comes_back_as_a_plain_tensor():
    back = there_and_back(torch.ones(2).as_subclass(Picture))
    assert type(back) is torch.Tensor
    assert back.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "tree",
    [
        torch.zeros(10_000),
        {"x": torch.zeros(10_000), "y": "small"},
        "x" * 100_000,
        [0] * 100_000,
        ["x"] * 100_000,
        b"x" * 100_000,
        {number: number for number in range(50_000)},
        [torch.zeros(100) for _ in range(100)],
        "\x00" * 9_000,
    ],
    ids=["tensor", "part", "text", "list", "texts", "bytes", "dict", "many", "escapes"],
)
def test_a_payload_stays_within_its_limit(tree):
    data = encode(tree, limit=20_000)
    assert len(data) <= 20_000
    assert "too large" in str(missing_in(decode(data)))


def test_what_is_nested_without_end_is_cut():
    endless = []
    endless.append(endless)
    assert "nested too deeply" in missing_in(there_and_back(endless))[0]
    twice = []
    for _ in range(100):
        twice = [twice, twice]
    assert len(encode(twice, limit=100_000)) <= 100_000


def test_any_program_that_knows_safetensors_can_read_the_tensors():
    assert load(encode({"x": torch.ones(2)}))["0"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (10**15).to_bytes(8, "little") + b"{}",
        pickle.dumps({"x": 1}),
        encode([1])[:-3],
        b"\x02" + b"\x00" * 7 + b"{}",
        b"\x02" + b"\x00" * 7 + b"[]",
    ],
    ids=["empty", "huge header", "large header", "pickle", "cut", "no tree", "no object"],
)
def test_what_is_not_a_payload_is_refused(data):
    with pytest.raises(LedgerError, match="a stored sample cannot be read"):
        decode(data)
