"""What is never blamed on a sample: code that fails for all of them, interrupts, and running out of memory."""

import pytest
import torch
from torch.utils.data import DataLoader

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, TooManyBadSamples
from tests.loading.broken import BrokenFile, Numbers, Shapes, Stepped, Unpicklable

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def run(loader):
    return [batch for batch in loader]  # noqa: C416 - the loader's iterator is what is tried


class Typo(Numbers):
    def __getitem__(self, index):
        return self.imagse[index]


@WORKERS
@pytest.mark.parametrize("refill", [False, True])
def test_a_typo_is_raised_with_its_own_class_and_the_evidence(workers, refill):
    loader = gg.resilient(DataLoader(Typo(1000), batch_size=4, num_workers=workers), refill=refill)
    with pytest.raises(AttributeError, match="imagse") as caught:
        run(loader)
    evidence = caught.value.__cause__
    assert isinstance(evidence, TooManyBadSamples)
    assert "32 samples in a row could not be loaded. The first: sample 0, AttributeError" in str(evidence)
    assert "patience=128" in str(evidence)
    assert evidence.incidents[0].sample_id == "0"
    assert any("in __getitem__" in note for note in caught.value.__notes__)
    assert len(loader.incidents) <= 64


@WORKERS
def test_a_small_dataset_that_fails_as_a_whole(workers):
    loader = gg.resilient(DataLoader(Numbers(3, {0, 1, 2}, BrokenFile("header", 4)), num_workers=workers))
    with pytest.raises(BrokenFile) as caught:
        run(loader)
    assert caught.value.offset == 4
    assert "none of the 3 samples could be loaded" in str(caught.value.__cause__)


def test_an_exception_that_stayed_in_the_worker_is_told():
    loader = gg.resilient(DataLoader(Numbers(3, {0, 1, 2}, Unpicklable("header")), num_workers=1))
    with pytest.raises(TooManyBadSamples, match=r"Unpicklable: unpicklable: header \(tests/loading/broken.py"):
        run(loader)


def test_a_storage_that_goes_away_is_raised_and_patience_says_when():
    loader = gg.resilient(DataLoader(Numbers(1000, range(10, 1000)), batch_size=4), patience=6)
    batches = []
    with pytest.raises(OSError, match="truncated image"):
        batches += [*loader]
    assert len(loader.incidents) == 6
    assert len(gg.resilient(DataLoader(Numbers(30, range(4, 26)), batch_size=4)).incidents) == 0
    loader = gg.resilient(DataLoader(Numbers(30, range(4, 26)), batch_size=4))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [26, 27], [28, 29]]
    assert loader.skipped == 5


def test_a_collation_with_a_fault_is_raised():
    def wrong(samples):
        return undefined_name(samples)  # noqa: F821

    with pytest.raises(NameError, match="undefined_name"):
        run(gg.resilient(DataLoader(Numbers(100), batch_size=8, collate_fn=wrong)))


class Stuck(Stepped):
    def __iter__(self):
        return self

    def __next__(self):
        raise OSError("no such shard")


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("refill", [False, True])
def test_a_stream_that_never_gives_anything_does_not_go_on_forever(workers, refill):
    with pytest.raises(OSError, match="no such shard"):
        run(gg.resilient(DataLoader(Stuck(3), batch_size=4, num_workers=workers), refill=refill))


class Interrupted(Numbers):
    def __getitem__(self, index):
        if index == 3:
            raise self.error
        return torch.tensor(index)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), MemoryError("full"), torch.OutOfMemoryError("gpu")]
)
def test_these_always_pass(error):
    with pytest.raises(type(error)):
        run(gg.resilient(DataLoader(Interrupted(6, error=error), batch_size=2)))
    with pytest.raises(type(error)):
        [*gg.resilient(Interrupted(6, error=error))]

    def collation(samples):
        raise error

    with pytest.raises(type(error)):
        run(gg.resilient(DataLoader(Numbers(6), batch_size=2, collate_fn=collation)))


def test_out_of_memory_in_a_worker_passes():
    with pytest.raises(MemoryError):
        run(gg.resilient(DataLoader(Interrupted(6, error=MemoryError("full")), batch_size=2, num_workers=1)))


def test_catch_narrows():
    loader = gg.resilient(DataLoader(Numbers(4, {1}), batch_size=2), catch=OSError)
    assert len(run(loader)) == 2
    with pytest.raises(OSError, match="truncated"):
        run(gg.resilient(DataLoader(Numbers(4, {1}), batch_size=2), catch=(ValueError, KeyError)))
    with pytest.raises(RuntimeError, match="equal size"):
        run(gg.resilient(DataLoader(Shapes(4, {1}), batch_size=2), catch=OSError))


def test_a_stream_that_cannot_be_begun_is_raised():
    class Unopened(Stepped):
        def __iter__(self):
            raise FileNotFoundError("shard 0")

    with pytest.raises(FileNotFoundError, match="shard 0"):
        run(gg.resilient(DataLoader(Unopened(3))))


# --- wrong arguments -----------------------------------------------------------------------------------------------


class Own(DataLoader):
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gg.resilient(3), ArgumentTypeError, "`source` is the int 3"),
        (lambda: gg.resilient(iter([1])), ArgumentTypeError, "`source` is the list_iterator"),
        (lambda: gg.resilient(Own(Numbers(3))), ArgumentTypeError, "Own has an __iter__ of its own"),
        (lambda: gg.resilient(DataLoader(Numbers(3)), patience=0), ArgumentValueError, "`patience` is the int 0"),
        (lambda: gg.resilient(DataLoader(Numbers(3)), patience=1.5), ArgumentValueError, "`patience` is the float 1.5"),
        (
            lambda: gg.resilient(DataLoader(Numbers(3)), catch=KeyboardInterrupt),
            ArgumentTypeError,
            "`catch` has <class",
        ),
        (lambda: gg.resilient(DataLoader(Numbers(3)), catch="OSError"), ArgumentTypeError, "`catch` has 'OSError'"),
        (lambda: gg.resilient(DataLoader(Numbers(3)), sink=print), ArgumentTypeError, "`sink` is the builtin"),
        (lambda: gg.resilient(Numbers(3), refill=True), ArgumentValueError, "are for a loader"),
        (lambda: gg.resilient(Numbers(3), patience=3), ArgumentValueError, "are for a loader"),
        (lambda: gg.collate([1], collate_fn=3), ArgumentTypeError, "`collate_fn` is the int 3"),
        (
            lambda: gg.resilient(DataLoader(Numbers(3), num_workers=1, in_order=False), refill=True),
            ArgumentValueError,
            "in_order=False",
        ),
        (
            lambda: gg.resilient(DataLoader(torch.utils.data.datapipes.iter.IterableWrapper([1]))),
            ArgumentTypeError,
            "a data pipe",
        ),
    ],
)
def test_wrong_arguments_say_what_and_how(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_sink_and_a_ledger_are_one_too_many(tmp_path):
    class Heap:
        def record_many(self, incidents, payloads=None):
            """Take them."""

    with pytest.raises(ArgumentValueError, match="`sink` and `ledger` are both given"):
        gg.resilient(DataLoader(Numbers(3)), sink=Heap(), ledger=tmp_path / "run.ledger")
    with pytest.raises(gg.errors.LedgerError):
        gg.resilient(DataLoader(Numbers(3)), ledger=tmp_path)
