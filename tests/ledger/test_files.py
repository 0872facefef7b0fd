"""Which files are a ledger, which are refused, and what the refusal says."""

import os
import sqlite3
import sys

import pytest

from gradgate.errors import ArgumentValueError, LedgerError, LedgerWarning
from gradgate.ledger import Ledger, _file, _schema
from tests.ledger.made import finish, incident, start


@pytest.fixture
def path(tmp_path):
    """A closed ledger with one incident."""
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident())
    return tmp_path / "run.ledger"


def change(path, *statements):
    connection = sqlite3.connect(path)
    connection.execute("BEGIN")  # a transaction for each of ten thousand statements takes minutes
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_missing_folder_is_an_error_at_once(tmp_path):
    with pytest.raises(LedgerError, match=r"there is no folder .*deep.*\n.*\nFix: Path\(.*mkdir"):
        Ledger(tmp_path / "deep" / "run.ledger")


def test_a_folder_is_not_a_ledger(tmp_path):
    with pytest.raises(LedgerError, match=r"it is a folder.*\n.*\nFix: gg.Ledger\('.*/run.ledger'\)"):
        Ledger(tmp_path)


@pytest.mark.parametrize("path", [None, "", ":memory:", 7, b"run.ledger", "/"])
def test_a_ledger_is_a_file(path):
    with pytest.raises(ArgumentValueError, match="a ledger is a file"):
        Ledger(path)


def test_reading_does_not_create(tmp_path):
    with pytest.raises(LedgerError, match=r"there is no ledger .*\n.*it was to be read"):
        Ledger(tmp_path / "run.ledger", read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("read_only", [True, False])
def test_some_other_file_is_refused_and_left_alone(tmp_path, read_only):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"These are my notes. " * 100)
    with pytest.raises(LedgerError, match="not even an SQLite file"):
        Ledger(path, read_only=read_only)
    assert path.read_bytes() == b"These are my notes. " * 100


@pytest.mark.parametrize("read_only", [True, False])
def test_some_other_database_is_refused_and_left_alone(tmp_path, read_only):
    path = tmp_path / "shop.db"
    change(path, "CREATE TABLE customers (name)")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="an SQLite file, but not a ledger"):
        Ledger(path, read_only=read_only)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["shop.db"]


def test_an_empty_file_becomes_a_ledger_but_is_not_read_as_one(tmp_path):
    path = tmp_path / "run.ledger"
    path.touch()
    with pytest.raises(LedgerError, match=r"it is empty \(schema 0.*\n.*reading only"):
        Ledger(path, read_only=True)
    assert Ledger(path).incidents() == []


def test_a_newer_ledger_says_what_to_do(path):
    change(path, "PRAGMA user_version = 9")
    with pytest.raises(LedgerError, match=r"it has schema 9; this gradgate knows 1 to 1.*\n.*newer.*\n.*--upgrade"):
        Ledger(path)


TRAP = "CREATE TRIGGER spy AFTER INSERT ON incident BEGIN DELETE FROM incident; END"
FOREIGN = {
    "a trigger": [TRAP],
    "a trigger behind ten thousand views": [*(f"CREATE VIEW v{n} AS SELECT 1" for n in range(10_050)), TRAP],
    "a trigger on a view": ["CREATE TRIGGER spy INSTEAD OF INSERT ON incidents BEGIN DELETE FROM incident; END"],
    "an index that swallows": ["CREATE UNIQUE INDEX one ON incident (transient)"],
    "an index that writes gigabytes": ["CREATE INDEX large ON incident (zeroblob(900000000))"],
    "a table": ["CREATE TABLE notes (text)"],
}


@pytest.mark.parametrize(
    "statements",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] * (len(each) > 1)) for name, each in FOREIGN.items()],
)
def test_what_is_not_ours_is_refused_for_writing_and_harmless_for_reading(path, statements):
    change(path, "DELETE FROM incident" if "zeroblob" in statements[0] else "SELECT 1", *statements)
    with pytest.raises(LedgerError, match=r"it holds what gradgate did not make: .*\n.*only read.*\nFix: .*merge NEW"):
        Ledger(path)
    read = Ledger(path, read_only=True)
    assert len(read.incidents()) == len(read.bad_ids()) == read.stats().incidents == ("zeroblob" not in statements[0])
    copy = Ledger(path.with_name("new.ledger"))
    assert copy.merge(path) == len(read.incidents())


@pytest.mark.parametrize("statement", [TRAP, "CREATE UNIQUE INDEX one ON incident (transient)"])
def test_what_is_added_under_a_running_training_is_noticed(path, statement):
    """Nothing that was recorded is lost, and nothing that was not written counts as written."""
    with Ledger(path) as ledger:
        ledger.record(incident("before"))
        if "UNIQUE" in statement:
            change(path, "DELETE FROM incident WHERE sample_id = 'before'")
        change(path, statement)
        with pytest.warns(LedgerWarning, match="it holds what gradgate did not make"):
            ledger.record(incident("during"))
        assert [one.sample_id for one in ledger.pending] == ["during"]
        assert len(ledger.incidents()) == 2 + ("UNIQUE" not in statement)
        change(
            path,
            f"DROP {statement.split()[1] if 'TRIGGER' in statement else 'INDEX'} "
            f"{'spy' if 'TRIGGER' in statement else 'one'}",
        )
        ledger.record(incident("after"))
        assert ledger.pending == ()
    assert {"during", "after"} <= Ledger(path, read_only=True).bad_ids()


def test_two_tables_in_one_place_are_refused(path):
    """The pages of the one would be written as those of the other."""
    root = "(SELECT rootpage FROM sqlite_master WHERE name = 'payload')"
    change(path, "PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET rootpage = {root} WHERE name = 'snapshot'")
    with pytest.raises(LedgerError, match=r"its tables are not those of a ledger: |is damaged"):
        Ledger(path)


def test_the_counts_of_analyze_are_nobodys(path):
    change(path, "ANALYZE")
    with Ledger(path) as ledger:
        ledger.record(incident("after"))
        assert ledger.bad_ids() == {"img_17.png", "after"}


def test_a_statement_is_stopped_while_it_writes(path, monkeypatch):
    """As an index would that needs endless steps; what was not written waits."""
    ledger = Ledger(path)
    monkeypatch.setattr(_file._Meter, "allow", lambda self, size: setattr(self, "steps", 0))
    with pytest.warns(LedgerWarning, match="than a sound file of this size needs"):
        ledger.record_many([incident(str(number)) for number in range(20)])
    assert len(ledger.pending) == 20
    monkeypatch.undo()
    ledger.flush()
    assert len(ledger.incidents()) == 21


def test_a_view_that_was_replaced_is_refused(path):
    change(path, "DROP VIEW runs", "CREATE VIEW runs AS SELECT 1")
    with pytest.raises(LedgerError, match="its tables are not those of a ledger: runs"):
        Ledger(path, read_only=True)


def test_an_odd_name_is_only_a_name(tmp_path):
    path = tmp_path / "what? 100% #1 é.ledger"
    with Ledger(path) as ledger:
        ledger.record(incident())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert len(Ledger(path, read_only=True).incidents()) == 1


def test_a_ledger_that_is_only_read_is_never_written(path):
    before = path.read_bytes()
    ledger = Ledger(path, read_only=True)
    with pytest.raises(LedgerError, match=r"opened with read_only=True.*\n.*\nFix: gg.Ledger\("):
        ledger.release("img_17.png")
    ledger.close()
    assert path.read_bytes() == before


def test_a_file_that_was_deleted_under_way_is_made_again(path):
    """Otherwise the incidents would go to a file that has no name any more."""
    ledger = Ledger(path)
    ledger.record(incident("before"))
    for file in path.parent.iterdir():
        file.unlink()
    with pytest.warns(LedgerWarning, match="is another file than before"):
        ledger.record(incident("after"))
    assert [found.sample_id for found in Ledger(path, read_only=True).incidents()] == ["after"]
    assert len(ledger.runs()) == 1


# --- rights --------------------------------------------------------------------------------------------------------

# Root may write everywhere, by a capability that is given up here. Another user might not enter the folder at all.
LIKE_ANYBODY = """
if os.getuid() == 0 and sys.platform == "linux":
    import ctypes
    libc, head, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, sets) == 0
    for place in range(3):
        sets[place] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
    assert libc.capset(head, sets) == 0
elif os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
"""


@pytest.fixture
def forbidden(path):
    """The same ledger where this user may read, but write neither the file nor beside it."""
    os.chmod(path, 0o444)
    os.chmod(path.parent, 0o555)
    yield path
    os.chmod(path.parent, 0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="rights are another matter there")
def test_a_read_only_file_in_a_read_only_folder_can_be_read(forbidden):
    code = LIKE_ANYBODY + "print(len(Ledger(sys.argv[1], read_only=True).incidents()))"
    assert finish(start(code, forbidden)) == "1"


@pytest.mark.skipif(sys.platform == "win32", reason="rights are another matter there")
def test_a_read_only_file_opened_to_write_is_an_error_at_once(forbidden):
    code = LIKE_ANYBODY + "try: Ledger(sys.argv[1])\nexcept OSError as error: print(error)"
    said = finish(start(code, forbidden))
    assert "read-only for this process" in said
    assert "Fix: gg.Ledger(path, read_only=True)" in said


# --- migrations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def second_version(monkeypatch):
    def install(*statements):
        monkeypatch.setattr(_schema, "MIGRATIONS", (*_schema.MIGRATIONS[:1], statements))

    return install


def test_an_older_ledger_is_brought_up_to_date(path, second_version):
    second_version("ALTER TABLE run ADD COLUMN host TEXT", "CREATE TABLE extra (x)")
    with pytest.raises(LedgerError, match=r"a ledger of an older gradgate \(schema 1, this gradgate writes 2\)"):
        Ledger(path, read_only=True)
    assert len(Ledger(path).incidents()) == 1
    assert Ledger(path, read_only=True).sql("SELECT host FROM run").columns == ("host",)


def test_a_migration_that_fails_leaves_the_file_as_it_was(path, second_version):
    second_version("CREATE TABLE extra (x)", "INSERT INTO nowhere VALUES (1)")
    with pytest.raises(LedgerError, match="no such table: nowhere"):
        Ledger(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'extra'").fetchone() == (0,)
    connection.close()
