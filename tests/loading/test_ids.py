"""Ids travel with the batch: whatever stands between the loader and the guard, dropped samples have their own ids."""

import gc
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from queue import Queue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import gradgate as gg
from gradgate import _loader_link
from gradgate._loader_link import AT_MOST, ids_of
from gradgate.errors import ArgumentValueError

NAN = float("nan")


@pytest.fixture(autouse=True)
def _no_other_loaders():
    """A test that failed, or expected an exception, may keep its loader in a cycle of references."""
    gc.collect()


class Table(Dataset):
    """Gives (number, value) rows and a label; some raise, some are NaN, and `alike` makes all others equal."""

    def __init__(self, size, raises=(), nan=(), alike=False):
        self.size, self.raises, self.nan, self.alike = size, set(raises), set(nan), alike

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.raises:
            raise ValueError("cannot be decoded")
        value = 1.0 if self.alike else float(index)
        return torch.tensor([value, NAN if index in self.nan else 2.0]), index % 2, "text"

    def sample_id(self, index):
        return f"row {index}"


# --- what stands between: stand-ins for accelerate's and Lightning's loaders, and for people's own --------------------


def direct(loader):
    yield from loader


def one_ahead(loader):
    """As accelerate's DataLoaderShard: the next batch is loaded before this one is given."""
    batches = iter(loader)
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        yield current
        current = following


def moved(loader):
    """As a move to another device: every tensor is a new one, and the containers are made anew."""
    for batch in one_ahead(loader):
        yield _move(batch)


def _move(part):
    if isinstance(part, torch.Tensor):
        return part.clone()
    return type(part)(map(_move, part)) if isinstance(part, list | tuple) else part


def renamed(loader):
    for x, label, _ in moved(loader):
        yield OrderedDict(labels=label, x=x)


def inputs_only(loader):
    for x, *_ in moved(loader):
        yield x


def with_more(loader):
    """As for diffusion: a tensor of one's own beside those of the loader."""
    for x, label, text in moved(loader):
        yield x, label, text, torch.rand(len(x))


def in_a_thread(loader):
    """As a prefetcher of Lightning: some batches are loaded ahead, by another thread."""
    queue = Queue(5)
    thread = threading.Thread(target=lambda: [queue.put(batch) for batch in [*moved(loader), None]])
    thread.start()
    while (batch := queue.get()) is not None:
        yield batch
    thread.join()


def all_at_once(loader):
    yield from list(loader)


FAITHFUL = [direct, one_ahead, moved, renamed, inputs_only, with_more, in_a_thread, all_at_once]


def into_one_buffer(loader):
    """As with CUDA graphs: all batches are copied into the tensors of the first one."""
    buffer = None
    for x, *_ in one_ahead(loader):
        buffer = x if buffer is None else buffer
        if len(x) == len(buffer):
            buffer.copy_(x)
            yield buffer


def changed(loader):
    for x, label, text in one_ahead(loader):
        yield x / 2, label, text


def shuffled(loader):
    for x, label, _ in one_ahead(loader):
        rows = torch.arange(len(x)).flip(0)
        yield x[rows], label[rows]


def of_two(loader):
    """As mixup of neighbours: the inputs of one batch with the labels of another."""
    last = None
    for x, label, _ in loader:
        if last is not None and len(last) == len(x):
            yield x, last
        last = label


def in_parts(loader):
    for x, label, _ in one_ahead(loader):
        yield from zip(x.split(2), label.split(2), strict=True)


def the_container_reused(loader):
    """The list of the first batch is given again and again, with the tensors of the others, changed."""
    first = None
    for batch in one_ahead(loader):
        first = batch if first is None else first
        first[:] = [batch[0] + 0.0, batch[1], batch[2]]
        yield first


UNFAITHFUL = [into_one_buffer, changed, shuffled, of_two, in_parts, the_container_reused]


def true_ids(batch, wrapper=direct):
    """Read from the values which samples a batch holds."""
    x = batch if isinstance(batch, torch.Tensor) else batch["x"] if isinstance(batch, dict) else batch[0]
    return tuple(f"row {int(value * (2 if wrapper is changed else 1))}" for value in x[:, 0])


def loader_of(data, batch_size, *, refill=False, workers=0, shuffle=False, drop_last=False):
    settings = {"batch_size": batch_size, "shuffle": shuffle, "num_workers": workers, "drop_last": drop_last}
    return gg.resilient(DataLoader(data, **settings), refill=refill, patience=1000)


# --- the law --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    wrapper=st.sampled_from(FAITHFUL + UNFAITHFUL),
    size=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    raises=st.sets(st.integers(0, 40), max_size=8),
    nan=st.sets(st.integers(0, 40), max_size=8),
    refill=st.booleans(),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epochs=st.integers(1, 2),
)
def test_ids_are_those_of_the_batch_or_none(wrapper, size, batch_size, raises, nan, refill, shuffle, drop_last, epochs):
    _loader_link._LOADERS.clear()  # those of other tests may have given the same values under other names
    data = Table(size, raises if len(raises & set(range(size))) < size else (), nan)
    loader = loader_of(data, batch_size, refill=refill, shuffle=shuffle, drop_last=drop_last)
    for _ in range(epochs):
        for batch in wrapper(loader):
            truth = true_ids(batch, wrapper)
            found = ids_of(batch, len(truth))
            if wrapper in FAITHFUL:
                assert found == truth
            else:
                assert found is None or all(name in (None, true) for name, true in zip(found, truth, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("refill", [False, True])
def test_the_same_with_workers(workers, refill):
    loader = loader_of(Table(23, {1, 7, 8}, {4}), 3, workers=workers, refill=refill)
    for wrapper in (one_ahead, moved):
        assert all(ids_of(batch, len(batch[0])) == true_ids(batch) for batch in wrapper(loader))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(wrapper=st.sampled_from([moved, in_a_thread, inputs_only, one_ahead]), size=st.integers(2, 20))
def test_batches_that_are_alike_have_no_ids_unless_they_are_the_same_tensors(wrapper, size):
    """Every sample is a batch, and every second one is the same: of copies nobody can say which is which."""
    loader = gg.resilient(DataLoader(Table(size, alike=True)))
    for index, batch in enumerate(wrapper(loader)):
        found = ids_of(batch, 1)
        assert found == (f"row {index}",) or (found in (None, (None,)) and wrapper is not one_ahead)


@pytest.mark.slow
def test_a_batch_that_no_loader_gave_has_no_ids():
    list(loader_of(Table(8), 4))
    assert ids_of(torch.zeros(4, 2), 4) is None
    assert ids_of([torch.tensor([[0.5, 2.0]]), torch.tensor([0])], 1) is None
    assert ids_of(["a", "b"], 2) is None


@pytest.mark.slow
def test_a_loader_that_is_done_does_not_make_the_copies_of_another_one_doubtful():
    first, second = (gg.resilient(DataLoader(Table(4), batch_size=2), ids=names) for names in ("abcd", "efgh"))
    list(first)
    list(loader_of(Table(4), 1))
    assert [ids_of(batch, 2) for batch in moved(second)] == [("e", "f"), ("g", "h")]
    both = zip(moved(first), moved(second), strict=True)
    assert [ids_of(batch, 2) for pair in both for batch in pair] == [(None, None)] * 4


@pytest.mark.slow
def test_batches_of_texts_arrays_named_tuples_and_dataclasses():
    numpy = pytest.importorskip("numpy")
    texts = gg.resilient(DataLoader(["a", "b", "c"], batch_size=2, collate_fn=list))
    assert [ids_of(list(batch), len(batch)) for batch in one_ahead(texts)] == [("0", "1"), ("2",)]
    arrays = gg.resilient(DataLoader([0.0, 1.0, 2.0], batch_size=2, collate_fn=numpy.array))
    assert [ids_of({"x": batch.copy()}, len(batch)) for batch in one_ahead(arrays)] == [("0", "1"), ("2",)]
    pair, record = namedtuple("pair", "x y"), dataclass(type("record", (), {"__annotations__": {"x": object}}))
    tuples = gg.resilient(DataLoader([pair(0.0, 1), pair(2.0, 3)], batch_size=2))
    assert [ids_of(record(batch.x.clone()), 2) for batch in tuples] == [("0", "1")]


# --- the guard ------------------------------------------------------------------------------------------------------


def training(**arguments):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return gg.Guard(model, **arguments), lambda batch: model(batch[0]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [direct, one_ahead, moved, in_a_thread])
@pytest.mark.parametrize("told", [False, True])
def test_the_guard_writes_down_the_right_sample(wrapper, told, tmp_path):
    """33 is NaN. Loaded ahead, `loader.ids` are those of another batch, of another length at the end of the epoch."""
    guard, loss_fn = training(ledger=tmp_path / "run.ledger")
    loader = gg.resilient(DataLoader(Table(37, {5}, {33}), batch_size=4), ledger=tmp_path / "run.ledger")
    for batch in wrapper(guard.batches(loader)):
        guard.backward(batch, loss_fn, **({"ids": loader.ids} if told else {}))
    assert gg.Ledger(tmp_path / "run.ledger").bad_ids() == {"row 5", "row 33"}


@pytest.mark.slow
def test_where_ids_cannot_be_known_there_is_the_row_and_no_id():
    guard, loss_fn = training()
    dropped = [guard.backward(batch, loss_fn).dropped for batch in changed(loader_of(Table(8, (), {6}), 4))]
    assert [(incident.row, incident.sample_id) for incidents in dropped for incident in incidents] == [(2, None)]


@pytest.mark.slow
def test_ids_of_the_loader_for_a_changed_batch_are_believed_where_nothing_is_loaded_ahead(tmp_path):
    guard, loss_fn = training(ledger=tmp_path / "run.ledger")
    for ahead in (direct, one_ahead):
        loader = gg.resilient(DataLoader(Table(8, (), {2}), batch_size=4), ledger=tmp_path / "run.ledger")
        results = [guard.backward((x / 2,), loss_fn, ids=loader.ids) for x, *_ in ahead(loader)]
        assert [incident.sample_id for incident in results[0].dropped] == ["row 2" if ahead is direct else None]


@pytest.mark.slow
def test_forward_finds_them_too():
    guard, _ = training()
    heap = []
    guard._sinks.append(
        type("Heap", (), {"record_many": lambda self, incidents, payloads=None: heap.extend(incidents)})()
    )
    for batch in one_ahead(loader_of(Table(8, (), {6}), 4)):
        guard.forward(batch, lambda batch: batch[0] * 1)
    assert [incident.sample_id for incident in heap] == ["row 6"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "batch"),
    [
        ("name", {"x": torch.ones(4, 2), "name": ["a", "b", "c", "d"]}),
        ("name", namedtuple("Named", "x name")(torch.ones(4, 2), list("abcd"))),
        (lambda batch: [*map(chr, batch["code"])], {"x": torch.ones(4, 2), "code": torch.arange(97, 101)}),
    ],
)
def test_ids_that_are_in_the_batch(ids, batch):
    guard, _ = training(ids=ids)
    x = batch["x"] if isinstance(batch, dict) else batch.x
    x[2, 0] = NAN
    model = guard._modules[0]
    result = guard.backward(batch, lambda b: model(b["x"] if isinstance(b, dict) else b.x).square().mean())
    assert [incident.sample_id for incident in result.dropped] == ["c"]
    given = guard.backward(batch, lambda b: model(b["x"] if isinstance(b, dict) else b.x).square().mean(), ids="efgh")
    assert [incident.sample_id for incident in given.dropped] == ["g"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("nmae", "Guard(ids='nmae'): the batch has no 'nmae'"),
        (lambda batch: batch["name"][:2], "it gave the list ['a', 'b'] for a batch of 4 samples"),
        (lambda batch: 3, "it gave the int 3 for a batch of 4 samples"),
    ],
)
def test_what_is_wrong_about_ids_is_said_at_the_first_step(ids, words):
    guard, loss_fn = training(ids=ids)
    with pytest.raises(ArgumentValueError) as caught:
        guard.backward({"x": torch.ones(4, 2), "name": ["a", "b", "c", "d"]}, loss_fn)
    assert words in str(caught.value)


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_copies_of_batches_far_behind_the_loader_have_no_ids():
    """The tensors themselves are found as long as they are alive; copies are compared with recent batches only."""
    loader = loader_of(Table(AT_MOST + 10), 1)
    batches = list(loader)
    assert all(ids_of(batch, 1) == true_ids(batch) for batch in batches)
    found = [ids_of(_move(batch), 1) for batch in batches]
    del batches
    assert found[:9] == [None] * 9
    assert found[10:] == [(f"row {index}",) for index in range(10, AT_MOST + 10)]


# --- one numbering --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [direct, one_ahead, moved])
@pytest.mark.parametrize("linked", ["ledger", "batches"])
def test_loading_incidents_have_the_steps_and_epochs_of_the_guard(wrapper, linked, tmp_path):
    """Sample 0, 5, ... cannot be loaded and 2, 7, ... are NaN: in each batch one of both, so at the same step."""
    ledger = tmp_path / "run.ledger" if linked == "ledger" else None
    guard, loss_fn = training(ledger=ledger, patience=1000)
    guard.load_state_dict({**guard.state_dict(), "steps": 100, "global_step": 100, "epoch": 3})
    data = Table(20, range(0, 20, 5), range(2, 20, 5))
    for epoch in (3, 4):
        guard.epoch = epoch
        loader = gg.resilient(DataLoader(data, batch_size=5), ledger=ledger)
        batches = wrapper(loader) if linked == "ledger" else wrapper(guard.batches(loader))
        dropped = [incident for batch in batches for incident in guard.backward(batch, loss_fn).dropped]
        first = 100 if epoch == 3 else 104
        assert [(i.epoch, i.step) for i in loader.incidents] == [(epoch, first + number) for number in range(4)]
        assert [(i.epoch, i.step) for i in dropped] == [(epoch, first + number) for number in range(4)]
        assert {i.run for i in loader.incidents} == {guard.run}
    assert guard.global_step == 108


@pytest.mark.slow
def test_the_loop_sets_the_step_and_validation_does_not_count(tmp_path):
    guard, loss_fn = training(ledger=tmp_path / "run.ledger")
    loader = gg.resilient(DataLoader(Table(8, {0, 3, 4, 7}), batch_size=2), ledger=tmp_path / "run.ledger")
    for number, batch in enumerate(loader):
        guard.global_step = 50 + number // 2  # two batches are one step of the optimizer
        guard.backward(batch, loss_fn)
        guard.global_step = 50 + (number + 1) // 2
    assert [incident.step for incident in loader.incidents] == [0, 50, 51, 51]
    with torch.no_grad():
        list(loader)
    assert [incident.step for incident in loader.incidents[4:]] == [52] * 4


@pytest.mark.slow
def test_a_loader_without_a_guard_counts_by_itself():
    loader = loader_of(Table(6, {1, 4}), 2)
    for _ in range(2):
        list(loader)
    assert [(incident.epoch, incident.step) for incident in loader.incidents] == [(0, 0), (0, 2), (1, 3), (1, 5)]


@pytest.mark.slow
def test_a_guard_that_steps_with_the_batches_of_a_loader_numbers_its_incidents():
    guard, loss_fn = training()
    guard.epoch, guard.global_step = 7, 30
    loader = loader_of(Table(8, {4, 6}), 2)
    for batch in loader:
        guard.backward(batch, loss_fn)
    assert [(incident.epoch, incident.step) for incident in loader.incidents] == [(7, 32), (7, 33)]
