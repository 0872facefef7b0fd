"""Classes that know their samples: the law is the guard's, whatever a batch is made of."""

import copy
import dataclasses
import types
import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import gradgate as gg
from gradgate import _trees
from gradgate._trees import BatchReader

LENGTHS = [3, 1, 4, 2, 5]


class TensorDictLike:
    """What the guard knows of a TensorDict: `batch_dims`, `batch_size` and rows by a list."""

    batch_dims = 1

    def __init__(self, data):
        self.data = data

    @property
    def batch_size(self):
        return torch.Size([len(self.data["x"])])

    def __getitem__(self, key):
        return self.data[key] if isinstance(key, str) else TensorDictLike({k: v[key] for k, v in self.data.items()})


class GraphLike(types.SimpleNamespace):
    """What the guard knows of a graph of PyTorch Geometric: its base class."""


class GraphBatchLike(GraphLike):
    """And of a batch of graphs: it can be taken apart and made again."""

    @classmethod
    def from_data_list(cls, graphs, follow_batch=()):
        sizes = torch.tensor([len(graph.x) for graph in graphs])
        batch = cls(graphs=graphs, x=torch.cat([graph.x for graph in graphs]), y=torch.cat([g.y for g in graphs]))
        batch.batch = torch.arange(len(graphs)).repeat_interleave(sizes)
        batch.num_graphs = len(graphs)
        for key in follow_batch:
            setattr(batch, f"{key}_batch", batch.batch.clone())
        return batch

    def index_select(self, rows):
        return [self.graphs[row] for row in rows]

    def keys(self):
        return list(vars(self))


GraphLike.__module__, GraphLike.__qualname__ = "torch_geometric.data.data", "BaseData"
GraphBatchLike.__module__, GraphBatchLike.__qualname__ = "torch_geometric.data.batch", "Batch"


def like_tensordict(xs, ys):
    return TensorDictLike({"x": torch.stack([x.mean(0) for x in xs]), "y": torch.stack(ys)})


def real_tensordict(xs, ys):
    tensordict = pytest.importorskip("tensordict")
    rows = {"x": torch.stack([x.mean(0) for x in xs]), "y": torch.stack(ys)}
    return tensordict.TensorDict(rows, batch_size=[len(xs)])


def real_tensorclass(xs, ys):
    tensordict = pytest.importorskip("tensordict")
    return _tensorclass(tensordict.tensorclass)(
        torch.stack([x.mean(0) for x in xs]), torch.stack(ys), batch_size=[len(xs)]
    )


@cache
def _tensorclass(decorate):
    return decorate(dataclasses.make_dataclass("Rows", [("x", torch.Tensor), ("y", torch.Tensor)]))


def like_graphs(xs, ys):
    graphs = [GraphLike(x=x, y=y[None]) for x, y in zip(xs, ys, strict=True)]
    return GraphBatchLike.from_data_list(graphs, follow_batch=["x"])


def real_graphs(xs, ys):
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=x, y=y[None], edge_index=torch.zeros(2, 1).long()) for x, y in zip(xs, ys, strict=True)]
    return data.Batch.from_data_list(graphs, follow_batch=["x"])


def jagged(tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are a prototype
        return torch.nested.nested_tensor(tensors, layout=torch.jagged)


def two_jagged(xs, ys):
    x = jagged(xs)
    return {"x": x, "bias": torch.nested.nested_tensor_from_jagged(x.values() * 0 + 1, x.offsets()), "y": ys}


def strided(xs, ys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor(list(xs)), torch.stack(ys)


def of_rows(model, batch):
    x, y = (batch.x, batch.y) if hasattr(batch, "x") else (batch["x"], batch["y"])
    return (model(x)[:, 0] - y).square().mean()


def of_graphs(model, batch):
    assert torch.equal(batch.x_batch, batch.batch)
    batch.x = batch.x * 2  # a loss may rebind what is in its batch
    sums = torch.zeros(batch.num_graphs).index_add(0, batch.batch, model(batch.x)[:, 0])
    return (sums - batch.y).square().mean()


def of_sequences(model, xs, ys):
    return torch.stack([(model(x).sum() - y).square() for x, y in zip(xs, ys, strict=True)]).mean()


def of_two_jagged(model, batch):
    return of_sequences(model, (batch["x"] * 2 + batch["bias"]).unbind(), batch["y"])  # one ragged dimension


KINDS = {
    "TensorDict-like": (like_tensordict, of_rows),
    "TensorDict": (real_tensordict, of_rows),
    "tensorclass": (real_tensorclass, of_rows),
    "graphs-like": (like_graphs, of_graphs),
    "graphs": (real_graphs, of_graphs),
    "packed": (
        lambda xs, ys: (pack_sequence(xs, enforce_sorted=False), torch.stack(ys)),
        lambda model, batch: of_sequences(model, unpack_sequence(batch[0]), batch[1]),
    ),
    "jagged": (
        lambda xs, ys: [jagged(xs), torch.stack(ys)],
        lambda model, batch: of_sequences(model, batch[0].unbind(), batch[1]),
    ),
    "two jagged": (two_jagged, of_two_jagged),
    "nested": (strided, lambda model, batch: of_sequences(model, batch[0].unbind(), batch[1])),
    "pairs": (
        lambda xs, ys: [(x, {"y": y}) for x, y in zip(xs, ys, strict=True)],
        lambda model, batch: of_sequences(model, [x for x, _ in batch], [target["y"] for _, target in batch]),
    ),
}


@pytest.mark.parametrize("bad", [[1], [0, 4]])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law(kind, bad):
    make, loss_of = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    reference = copy.deepcopy(model)
    xs, ys = [torch.randn(n, 3) for n in LENGTHS], list(torch.randn(5))
    for row in bad:
        xs[row][0, 1] = float("nan")
    kept = [row for row in range(5) if row not in bad]
    result = gg.Guard(model).backward(make(xs, ys), lambda batch: loss_of(model, batch))
    wanted = loss_of(reference, make([xs[row] for row in kept], [ys[row] for row in kept]))
    wanted.backward()
    assert result.kept == kept
    assert torch.equal(result.loss, wanted.detach())
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_a_packed_sequence_in_order_stays_without_indices():
    packed = pack_sequence([torch.ones(n, 2) * n for n in (5, 4, 4, 1)])
    reader = BatchReader()
    taken = reader.select(packed, [0, 2, 3], reader.count(packed))
    assert taken.sorted_indices is None
    assert [len(sequence) for sequence in unpack_sequence(taken)] == [5, 4, 1]


def test_a_jagged_tensor_of_no_rows_and_of_another_ragged_dimension():
    reader = BatchReader()
    assert reader.select(jagged([torch.ones(n, 2) for n in (1, 2)]), [], 2).shape[0] == 0
    turned = jagged([torch.arange(2.0 * n).view(n, 2) for n in (1, 3, 2)]).transpose(1, 2)
    taken = reader.select(turned, [2, 1], 3)
    assert [part.shape for part in taken.unbind()] == [(2, 2), (2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(taken.unbind(), (turned.unbind()[2], turned.unbind()[1]), strict=True))


PAIR = (torch.ones(3, 8, 8), {"boxes": torch.ones(2, 4), "labels": torch.ones(2)})
LISTS = {
    "images and targets": ([PAIR] * 5, 5),
    "two of them": ([PAIR] * 2, 2),
    "images and classes": ([(torch.ones(3, 8, 8), 1)] * 5, 5),
    "images and masks": ([(torch.ones(3, 8, 8), torch.ones(8, 8))] * 5, 5),
    "fields of tensors": ([(torch.ones(4, 2), torch.ones(4))] * 2, 4),
    "collated strings": ([("a", "b", "c"), ("d", "e", "f")], 3),
    "zipped": (list(zip(*[PAIR] * 5, strict=True)), 5),
    "zipped as a tuple": (tuple(zip(*[PAIR] * 5, strict=True)), 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_tuples(kind):
    batch, size = LISTS[kind]
    reader = BatchReader()
    assert reader.count(batch) == size
    taken = reader.select(batch, [1], size)
    assert reader.count(taken, ids=["a"]) == 1
    assert (len(taken) == 1) == (len(batch) == size)


def test_a_single_graph_is_refused():
    graph = GraphLike(x=torch.ones(3, 2))
    with pytest.raises(gg.GradgateError, match=r"one graph.(?s:.*)nodes that edges connect(?s:.*)from_data_list\(\["):
        gg.Guard(nn.Linear(1, 1)).backward(graph, lambda batch: None)


@pytest.mark.slow
def test_a_real_graph_is_refused():
    data = pytest.importorskip("torch_geometric.data")
    for graph in (data.Data(x=torch.ones(3, 2)), data.HeteroData()):
        with pytest.raises(gg.GradgateError, match="one graph"):
            gg.Guard(nn.Linear(1, 1)).backward(graph, lambda batch: None)


def test_a_tensordict_without_a_batch_size_is_refused():
    batch = TensorDictLike({"x": torch.ones(3, 2)})
    batch.batch_dims = 0
    with pytest.raises(gg.GradgateError, match=r"without a batch size(?s:.*)auto_batch_size_\(batch_dims=1\)"):
        gg.Guard(nn.Linear(1, 1)).backward(batch, lambda batch: None)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(_trees, "BATCH_CLASSES", known := list(_trees.BATCH_CLASSES))
    monkeypatch.setattr("gradgate._trees.BATCH_CLASSES", known)


class Columns:
    """A batch of one's own, without `__getitem__`."""

    def __init__(self, x, scale):
        self.x, self.scale = x, scale


@pytest.mark.usefixtures("registry")
def test_a_class_of_ones_own_also_as_a_part_of_another_batch():
    gg.guard.register_batch(Columns, lambda batch, rows: Columns(batch.x[:, rows], batch.scale), lambda b: b.x.size(1))
    model, x, y = nn.Linear(3, 1), torch.randn(3, 6), torch.randn(6)
    x[0, 2] = float("inf")

    def loss(batch):
        columns, y = batch
        columns.x = columns.x * columns.scale
        return (model(columns.x.T)[:, 0] - y).square().mean()

    assert gg.Guard(model).backward((Columns(x, 2.0), y), loss).kept == [0, 1, 3, 4, 5]


@pytest.mark.usefixtures("registry")
def test_a_write_into_a_class_of_ones_own_is_seen():
    gg.guard.register_batch(Columns, lambda batch, rows: Columns(batch.x[:, rows], batch.scale), lambda b: b.x.size(1))
    model, x = nn.Linear(3, 1), torch.randn(3, 6)
    x[0, 2] = float("inf")
    with pytest.raises(gg.TooManyBadSamples, match="written to in place"):
        gg.Guard(model).backward(Columns(x, 2.0), lambda batch: model(batch.x.mul_(2).T).mean())


def test_what_is_registered_is_checked():
    with pytest.raises(gg.GradgateError, match=r"register_batch\(\): the arguments are(?s:.*)register_batch\(MyBatch"):
        gg.guard.register_batch(Columns(1, 2), len, len)


# --- Where the samples lie, by key ----------------------------------------------------------------------------------


def test_dimensions_and_shared_parts_by_key():
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    x, positions, weights = torch.randn(4, 3), torch.randn(3, 4, 2), torch.rand(4)
    x[1, 0] = float("nan")

    def loss(model, batch):
        assert batch["weights"].shape == (4,)
        scores = model(batch["in"].x) * batch["weights"].sum() + batch["positions"].sum((0, 2))[:, None]
        return scores.square().mean()

    def made(rows):
        return {"in": Inner(x[rows]), "positions": positions[:, rows], "weights": weights}

    guard = gg.Guard(model, batch_dim={"positions": 1}, shared=("weights",))
    result = guard.backward(made([0, 1, 2, 3]), lambda batch: loss(model, batch))
    loss(twin, made([0, 2, 3])).backward()
    assert result.kept == [0, 2, 3]
    assert torch.equal(model.weight.grad, twin.weight.grad)
    assert copy.deepcopy(guard)._reader.layout == guard._reader.layout


class Inner:
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, rows):
        return Inner(self.x[rows])


def test_positions_of_a_tuple_are_keys_too():
    reader = BatchReader({0: 1}, shared=(2,))
    batch = (torch.ones(7, 4, 2), torch.ones(4), torch.ones(4))
    assert reader.count(batch) == 4
    assert [tuple(part.shape) for part in reader.select(batch, [1, 3], 4)] == [(7, 2, 2), (2,), (4,)]


def test_a_part_of_another_length_is_shared_by_its_key():
    batch = {"input_ids": torch.ones(2, 5), "cu_seqlens": torch.ones(3)}
    with pytest.raises(gg.GradgateError, match=r"do not agree(?s:.*)shared=\(\"class_weights\",\)"):
        BatchReader().count(batch)
    assert BatchReader(shared=("cu_seqlens",)).count(batch) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_dim": -1}, "`batch_dim` is the int -1"),
        ({"batch_dim": {"x": "1"}}, "`batch_dim` is the dict {'x': '1'}"),
        ({"shared": "weights"}, r"`shared` is (?s:.*)shared=\('weights',\)"),
    ],
)
def test_arguments_that_say_no_layout(arguments, words):
    with pytest.raises(gg.GradgateError, match=words):
        gg.Guard(nn.Linear(1, 1), **arguments)
