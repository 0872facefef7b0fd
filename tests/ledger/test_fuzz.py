"""Ledgers and payloads from someone who wishes us ill: a clear error or a bounded answer, and nothing runs.

Seeded mutations: flipped bytes, bytes with a new value, cut ends, copied and zeroed pieces. Damaged ledgers under every
command are in tests/cli/test_strangers.py.
"""

import pickle
import random
import sqlite3
import tracemalloc
from contextlib import suppress

import pytest
import torch

from gradgate._payload import decode, encode
from gradgate.errors import LedgerError
from gradgate.ledger import Ledger, _file
from tests.ledger.made import incident

PAYLOADS = 8_000


def mutated(original, chance):
    """The same bytes, damaged in one to four places."""
    data = bytearray(original)
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data)), chance.choice([1, 1, 2, 4, 16, 256])
        what = chance.randrange(6)
        if what == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            data[at : at + length] = chance.randbytes(length)
        elif what == 2:
            data[at : at + length] = b"\xff" * length
        elif what == 3:
            data[at : at + length] = bytes(length)
        elif what == 4:
            source = chance.randrange(len(data))
            data[at : at + length] = data[source : source + length]
        elif len(data) > 200:
            del data[-chance.randrange(1, len(data) // 2) :]
    return bytes(data)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a small ledger with something in every table."""
    path = tmp_path_factory.mktemp("sound") / "run.ledger"
    with Ledger(path, payload=True, snapshot=True, run="night", arguments={"lr": 1}) as ledger:
        for number in range(12):
            one = incident(
                f"img_{number % 5}.png", id=f"id{number:04}", message="a message " * 5, loss=0.5, epoch=number
            )
            ledger.record_many([one], {one.id: encode(torch.ones(1, 8))}, snapshot=bytes(6000))
        ledger.release("img_0.png")
    return path.read_bytes()


@pytest.mark.slow
def test_damaged_payloads_give_clear_errors_or_bounded_answers():
    chance = random.Random(1)
    tree = {
        "x": torch.ones(1, 500, dtype=torch.bfloat16),
        "deep": [{"y": torch.eye(2).to_sparse()}, (1, 2.5, "text", b"x")],
    }
    original = encode(tree)
    refused = answered = 0
    tracemalloc.start()
    for _ in range(PAYLOADS):
        try:
            decode(mutated(original, chance))
            answered += 1
        except LedgerError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(refused, answered) > PAYLOADS / 50
    assert peak < 20_000_000


def test_a_payload_that_would_run_something_is_only_bytes(tmp_path):
    """A pickle that runs a command when it is loaded, where a sample should be."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    with Ledger(tmp_path / "run.ledger", payload=True) as ledger:
        one = incident()
        ledger.record(one, pickle.dumps(Trap()))
        with pytest.raises(LedgerError, match="a stored sample cannot be read"):
            decode(ledger.payload_of(one.id))
    assert not (tmp_path / "sprung").exists()


def varint(number):
    """The length of a small record, as SQLite writes it."""
    return bytes([number]) if number < 128 else bytes([0x80 | number >> 7, number & 0x7F])


def endless(original, index):
    """Let an index lead through eighteen levels of pages, each of which has the next for all its children."""
    size = 4096
    pages = [bytearray(original[start : start + size]) for start in range(0, len(original), size)]
    connection = sqlite3.connect(":memory:")
    connection.deserialize(bytes([*original[:18], 1, 1, *original[20:]]))  # Not in WAL mode, which memory has not.
    root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)).fetchone()[0]
    connection.close()
    leaf = pages[root - 1]
    assert leaf[0] == 0x0A  # A leaf page of an index.
    at = int.from_bytes(leaf[8:10], "big")
    length = leaf[at] if leaf[at] < 128 else (leaf[at] & 0x7F) << 7 | leaf[at + 1]
    cell = varint(length) + leaf[at + len(varint(length)) :][:length]
    pages.append(leaf)
    for level in range(18):
        child = len(pages)
        entry = child.to_bytes(4, "big") + cell
        count = (size - 12) // (len(entry) + 2)
        starts = [size - len(entry) * (number + 1) for number in range(count)]
        head = (
            bytes([2, 0, 0])
            + count.to_bytes(2, "big")
            + starts[-1].to_bytes(2, "big")
            + b"\0"
            + child.to_bytes(4, "big")
        )
        page = bytearray(head + b"".join(start.to_bytes(2, "big") for start in starts)).ljust(size, b"\0")
        for start in starts:
            page[start : start + len(entry)] = entry
        if level == 17:
            pages[root - 1] = page
        else:
            pages.append(page)
    pages[0][28:32] = len(pages).to_bytes(4, "big")
    return b"".join(pages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "question"), [("incident_kind", "stats"), ("incident_sample", "bad_ids"), ("incident_time", "incidents")]
)
def test_a_few_pages_that_pretend_to_hold_endless_rows_are_stopped(sound, tmp_path, index, question):
    path = tmp_path / "run.ledger"
    path.write_bytes(endless(sound, index))
    ledger = Ledger(path, read_only=True)
    with pytest.raises(LedgerError, match=r"sound file of this size needs|longer together than the file"):
        getattr(ledger, question)()


def looping(original):
    """Let the message of an incident run in a circle of overflow pages, and claim to be as long as the file allows."""
    size = 4096
    connection = sqlite3.connect(":memory:")
    connection.deserialize(bytes([*original[:18], 1, 1, *original[20:]]))
    connection.execute("UPDATE incident SET message = ?", ("x" * 900_000,))
    connection.commit()
    data = bytearray(connection.serialize())
    connection.close()
    for page in range(1, len(data) // size):  # Overflow pages begin with the number of the next one.
        if data[page * size + 4 : page * size + 5] == b"x":
            data[page * size : page * size + 4] = (page + 1).to_bytes(4, "big")  # Itself, for ever.
    return bytes(data)


def test_overflow_pages_that_lead_in_a_circle_take_bounded_time_and_memory(sound, tmp_path):
    """Twelve messages that would be 11 MB, in a file cut to a tenth of it: the pages are read again and again."""
    path = tmp_path / "run.ledger"
    path.write_bytes(looping(sound)[:1_300_000])
    tracemalloc.start()
    for question in ("incidents", "stats", "bad_ids", "runs"):
        with suppress(LedgerError):
            getattr(Ledger(path, read_only=True), question)()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_rows_that_are_longer_together_than_the_file_are_refused(tmp_path, monkeypatch):
    """Rows may share their overflow pages; what they pretend to hold is then longer than what is there."""
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many([incident(str(number), message="x" * 2000) for number in range(100)])
    reader = Ledger(tmp_path / "run.ledger", read_only=True)
    allow = _file._Meter.allow

    def short(meter, size):
        allow(meter, size)
        meter.characters = 100_000

    monkeypatch.setattr(_file._Meter, "allow", short)
    with pytest.raises(LedgerError, match="the rows are longer together than the file"):
        reader.incidents()
    monkeypatch.undo()
    assert len(reader.incidents()) == 100


def test_a_value_longer_than_any_ledger_writes_is_refused(sound, tmp_path):
    path = tmp_path / "run.ledger"
    path.write_bytes(sound)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE incident SET message = ?", ("x" * 2_000_000,))
    connection.commit()
    connection.close()
    with pytest.raises(LedgerError, match=r"too big.*\n.*longer value than any ledger writes"):
        Ledger(path, read_only=True).incidents()


def test_names_of_any_length_can_be_read_again(tmp_path):
    with Ledger(tmp_path / "run.ledger", arguments={"config": "x" * 3_000_000}) as ledger:
        ledger.record(incident("s" * 3_000_000, module="m" * 3_000_000, where="w" * 3_000_000, message="x" * 3_000_000))
        assert len(ledger.bad_ids()) == len(ledger.incidents()) == len(ledger.runs()) == 1
        assert ledger.release("s" * 3_000_000)
        assert ledger.bad_ids() == set()
