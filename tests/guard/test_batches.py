"""Batches of every kind: how many samples they hold, and what is left when some are taken out."""

import collections
import dataclasses
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

import gradgate as gg
from gradgate._trees import BatchReader

X = torch.arange(12.0).reshape(4, 3)
Y = torch.arange(4)
ROWS = [0, 2, 3]


@dataclasses.dataclass
class Mutable:
    x: torch.Tensor
    name: str = "train"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


Named = collections.namedtuple("Named", "x y")


class Encoding(collections.UserDict):
    """Like Hugging Face's BatchEncoding: a mapping with its data inside, and attributes besides."""

    def __init__(self, data, kind="fast"):
        super().__init__(data)
        self.kind = kind


class Table:
    """An object with items, which also takes lists of rows."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, row):
        return Table([self.values[i] for i in row]) if isinstance(row, list) else self.values[row]


def plain(value):
    """Give a tree as lists, to be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Table):
        return value.values
    if isinstance(value, collections.abc.Mapping):
        return {key: plain(value[key]) for key in value}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


XR, YR = X[ROWS].tolist(), Y[ROWS].tolist()
KINDS = {
    "tensor": (X, XR),
    "tuple": ((X, Y), [XR, YR]),
    "list": ([X, Y], [XR, YR]),
    "dict": ({"x": X, "y": Y, "epoch": 3, "none": None}, {"x": XR, "y": YR, "epoch": 3, "none": None}),
    "nested": ({"in": [X, {"y": Y}], "step": torch.tensor(7)}, {"in": [XR, {"y": YR}], "step": 7}),
    "named tuple": (Named(X, Y), [XR, YR]),
    "dataclass": (Mutable(X), {"x": XR, "name": "train"}),
    "frozen dataclass": (Frozen(X, Y), {"x": XR, "y": YR}),
    "encoding": (Encoding({"input_ids": X, "labels": Y}), {"input_ids": XR, "labels": YR}),
    "strings": ({"text": ["a", "b", "c", "d"], "y": Y}, {"text": ["a", "c", "d"], "y": YR}),
    "only strings": (["a", "b", "c", "d"], ["a", "c", "d"]),
    "samples": ([{"x": 0}, {"x": 1}, {"x": 2}, {"x": 3}], [{"x": 0}, {"x": 2}, {"x": 3}]),
    "ragged": (([torch.ones(i + 1) * i for i in range(4)], Y), [[[0.0], [2.0] * 3, [3.0] * 4], YR]),
    "numpy": ((X.numpy(), Y), [XR, YR]),
    "items": ((Table([5, 6, 7, 8]), Y), [[5, 7, 8], YR]),
    "bytes": (([b"a", b"b", b"c", b"d"], Y), [[b"a", b"c", b"d"], YR]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_of_every_part(kind):
    batch, wanted = KINDS[kind]
    reader = BatchReader()
    assert reader.count(batch) == 4
    taken = reader.select(batch, ROWS, 4)
    assert type(taken) is type(batch)
    assert plain(taken) == wanted


def test_an_encoding_keeps_its_other_attributes():
    batch = Encoding({"x": X}, kind="slow")
    assert BatchReader().select(batch, ROWS, 4).kind == "slow"
    assert batch["x"] is X


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_of_fields_is_not_taken_for_samples(size):
    batch = [torch.ones(size, 3), torch.zeros(size)]
    reader = BatchReader()
    assert reader.count(batch) == size
    assert [len(part) for part in reader.select(batch, [0], size)] == [1, 1]


def test_default_collate_of_nested_samples():
    batch = default_collate([(torch.ones(2) * i, {"y": i, "name": f"s{i}"}, (i, i)) for i in range(3)])
    reader = BatchReader()
    assert reader.count(batch) == 3
    x, rest, pair = reader.select(batch, [0, 2], 3)
    assert x[:, 0].tolist() == [0, 2]
    assert rest["y"].tolist() == [0, 2]
    assert rest["name"] == ["s0", "s2"]
    assert [part.tolist() for part in pair] == [[0, 2], [0, 2]]


def test_ids_decide_where_a_list_could_be_read_in_two_ways():
    images = [torch.ones(3, 2, 2) for _ in range(5)]
    reader = BatchReader()
    assert reader.count(images) == 3  # five fields of three samples
    assert reader.count(images, ids=range(5)) == 5  # five samples
    assert len(reader.select(images, [0, 4], 5)) == 2
    clouds = [torch.ones(5, 3), torch.ones(4, 3)]
    assert reader.count(clouds, ids=["a", "b"]) == 2


def test_another_batch_dimension():
    reader = BatchReader(batch_dim=1)
    batch = {"x": torch.arange(24).reshape(2, 4, 3), "y": Y, "h": torch.ones(4, 7)}
    assert reader.count(batch) == 4
    taken = reader.select(batch, [1, 3], 4)
    assert {key: tuple(value.shape) for key, value in taken.items()} == {"x": (2, 2, 3), "y": (2,), "h": (2, 7)}


def test_another_batch_dimension_of_arrays_is_found_as_in_tensors():
    reader = BatchReader(batch_dim=1)
    batch = {"x": np.ones((2, 4, 3)), "y": np.arange(4), "h": np.arange(28).reshape(4, 7)}
    assert reader.count(batch) == 4
    taken = reader.select(batch, [1, 3], 4)
    assert {key: value.shape for key, value in taken.items()} == {"x": (2, 2, 3), "y": (2,), "h": (2, 7)}
    assert taken["h"][:, 0].tolist() == [7, 21]


def test_channels_last_stays_as_indexing_leaves_it():
    x = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    taken = BatchReader().select(x, ROWS, 4)
    assert taken.stride() == x[ROWS].stride()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X, torch.ones(10)), r"do not agree on the number of samples \(batch\[0\]: 4, batch\[1\]: 10\)"),
        ({"x": X, "text": ["a", "b", "c"]}, r"do not agree"),
        ([torch.ones(5, 3), torch.ones(4, 3)], r"(?s)do not agree .*ids=.* one tensor for each sample"),
        (7, "nothing in it is per sample"),
        ("text", "nothing in it is per sample"),
        (torch.tensor(1.0), "nothing in it is per sample"),
        ({"x": torch.tensor(1.0)}, "nothing in it is per sample"),
        ((X, {"p": pack_sequence([torch.ones(3), torch.ones(2)])}), r"do not agree .*batch\[1\]\['p'\]: 2"),
    ],
)
def test_what_cannot_be_read_is_refused(batch, words):
    with pytest.raises(gg.GradgateError, match=words) as caught:
        gg.Guard(nn.Linear(1, 1)).backward(batch, lambda batch: None)
    assert "select=" in str(caught.value)


def test_a_graph_batch_with_select_and_count():
    """Nodes of several graphs in one tensor, with the graph that each belongs to."""

    def select(batch, rows):
        x, graph = batch
        keep = torch.isin(graph, torch.tensor(rows))
        renamed = {old: new for new, old in enumerate(rows)}
        return x[keep], torch.tensor([renamed[int(g)] for g in graph[keep]])

    model = nn.Linear(2, 1)
    x, graph = torch.randn(7, 2), torch.tensor([0, 0, 1, 1, 1, 2, 2])
    x[3] = float("inf")
    guard = gg.Guard(model, select=select, count=lambda batch: int(batch[1].max()) + 1)
    result = guard.backward(
        (x, graph), lambda b: torch.zeros(int(b[1].max()) + 1).index_add(0, b[1], model(b[0])[:, 0])
    )
    assert result.kept == [0, 2]
    assert result.losses.shape == (2,)


def test_select_without_a_count_that_can_be_had():
    class Opaque:
        pass

    with pytest.raises(gg.GradgateError, match=r"the number of samples of the Opaque .* is not known"):
        gg.Guard(nn.Linear(1, 1), select=lambda batch, rows: batch).backward(Opaque(), lambda batch: None)


def test_ids_of_the_wrong_length():
    with pytest.raises(gg.GradgateError, match="`ids` has 3 entries, the batch has 4 samples"):
        gg.Guard(nn.Linear(3, 1)).backward(X, lambda x: x.mean(), ids=["a", "b", "c"])


@pytest.mark.parametrize("ids", [iter("abcd"), {"a", "b", "c", "d"}, 4])
def test_ids_that_cannot_be_looked_up(ids):
    with pytest.raises(gg.GradgateError, match=r"`ids` is the \w+ (?s:.*)one name for each row(?s:.*)ids=list"):
        gg.Guard(nn.Linear(3, 1)).backward(X, lambda x: x.mean(), ids=ids)


def test_items_that_do_not_give_what_was_asked_for():
    class Columns(Table):
        def __getitem__(self, key):
            return [1, 2, 3, 4, 5]

    with pytest.raises(gg.GradgateError, match=r"taking 2 rows of .* gave 5 items"):
        BatchReader().select((Columns([1, 2, 3, 4]), Y), [0, 1], 4)


def pop_from_a_mapping(batch):
    y = batch.pop("y")
    return batch["x"], y


def overwrite_in_a_mapping(batch):
    batch["x"] = batch["x"] * 2
    return batch["x"], batch["y"]


def overwrite_in_a_nested_list(batch):
    batch[0][0] = batch[0][0] * 2
    return batch[0][0], batch[1]


def overwrite_in_a_dataclass(batch):
    batch.x = batch.x * 2
    return batch.x, batch.x.sum(1)


REBINDING = {
    "pop": (pop_from_a_mapping, lambda x, y: {"x": x, "y": y}),
    "pop from a mapping": (pop_from_a_mapping, lambda x, y: collections.UserDict(x=x, y=y)),
    "overwrite": (overwrite_in_a_mapping, lambda x, y: {"x": x, "y": y}),
    "overwrite in a nested list": (overwrite_in_a_nested_list, lambda x, y: ([x], y)),
    "overwrite in a dataclass": (overwrite_in_a_dataclass, lambda x, y: Mutable(x)),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("how", REBINDING)
def test_a_loss_that_rebinds_what_is_in_its_batch_is_tried_with_the_batch_as_it_was(how, raises):
    rebind, make = REBINDING[how]
    model, reference = nn.Linear(3, 1), nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())

    def loss_of(model, batch):
        x, y = rebind(batch)
        if raises and bool(x.isnan().any()):
            raise ValueError("nan")
        return (model(x)[:, 0] - y).square().mean()

    good, y = torch.randn(8, 3), torch.randn(8)
    x = torch.where(torch.arange(8)[:, None] == 3, float("nan"), good)
    rows = [0, 1, 2, 4, 5, 6, 7]
    result = gg.Guard(model).backward(make(x, y), lambda batch: loss_of(model, batch))
    loss_of(reference, make(x[rows], y[rows])).backward()
    assert result.kept == rows
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_a_mapping_that_cannot_be_changed():
    batch = types.MappingProxyType({"x": X, "y": Y})
    assert BatchReader().select(batch, ROWS, 4)["y"].tolist() == ROWS


def test_a_batch_that_cannot_be_copied_is_used_as_it_is():
    class Sealed(collections.UserDict):
        def __copy__(self):
            raise TypeError("no copies")

    model = nn.Linear(3, 1)
    assert gg.Guard(model).backward(Sealed(x=X), lambda batch: model(batch["x"]).mean()).kept == [0, 1, 2, 3]
