"""One SQLite file, shared by threads, forked workers, ranks and runs: opened, read and written through here.

A connection belongs to the process that opened it. All ledgers of a process share one lock; it is also held while
the process forks, so that no child inherits SQLite in the middle of something. A child leaves the connections of
its parent alone and opens its own.

Nothing in a file is trusted: no statement may take more steps, more processor time or more memory than a sound file of
its size needs, no trigger runs, and before the first use every object of the schema is compared with ours.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradgate._text import user_level
from gradgate.errors import LedgerError, LedgerWarning
from gradgate.ledger import _schema
from gradgate.ledger._schema import RECOVER

with suppress(ImportError):  # Not on Windows, where a file in use cannot be moved away either.
    import fcntl

LOCK = threading.RLock()  # held around every use of every ledger of this process

PATIENCE = 5.0
"""How many seconds a writer waits for another one; after a failure it waits far less, to let the training go on."""

STEPS = 100  # after how many steps of SQLite's machine the meter is read
MEGABYTE = 2**20  # how long a single value may be that is not a stored sample
SETTLE_AFTER = 1.0  # how many seconds apart what was written is moved from the write-ahead log into the file itself

_left_to_the_parent: list[sqlite3.Connection] = []
raised_in_sqlite: list[BaseException] = []  # by signal handlers

if hasattr(os, "register_at_fork"):  # Not on Windows, which does not fork.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class _Meter:
    """Stops a statement that takes more than a sound file of its size could need."""

    # The pages of a hostile file may point to each other so that a few of them pretend to hold more rows, or longer
    # ones, than could ever be read. A sound row takes some hundred bytes and some hundred steps: ten steps for each
    # byte are plenty, and so is half a second of processor time for each megabyte. Text is stored once, so all rows of
    # one answer together are not longer than the file.

    def __init__(self) -> None:
        self.clock = time.thread_time
        self.allow(0)
        self._answers = self._answered()
        self.check = self._answers.__next__
        self.check()

    def allow(self, size: int) -> None:
        """Allow what this many bytes may need."""
        self.steps = (1_000_000 + 10 * size) // STEPS
        self.until = time.thread_time() + 5.0 + 0.5 * size / MEGABYTE
        self.characters = size + MEGABYTE

    def _answered(self) -> Iterator[bool]:
        # A signal handler that raises, as Ctrl-C does, raises where Python code begins, resumes or jumps back. In a
        # function that would be before any `try`, and sqlite3 would swallow the exception; a generator resumes inside
        # it, and so does its inner loop.
        stop = False
        while True:
            try:
                while True:
                    yield stop
                    self.steps -= 1
                    stop = self.steps < 0 or self.clock() > self.until
            except GeneratorExit:
                return
            except BaseException as error:  # noqa: BLE001 - raised again when SQLite has come to its end
                stop = True
                raised_in_sqlite.append(error)


class TooLong(sqlite3.DatabaseError):
    """The rows of an answer are longer together than they can be."""

    sqlite_errorname = "SQLITE_CORRUPT"


class Connection(sqlite3.Connection):
    """A connection that counts what it reads."""

    schema_version: int | None = None
    process: int | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.process = os.getpid()
        self.meter = _Meter()

    def __del__(self) -> None:
        # What was opened again after `Ledger.close`, or in the moment of an interrupt, has no other end.
        if self.process == os.getpid():
            self.close()

    def rows(self, question: str, values: Sequence[Any] | dict[str, Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Ask a question, and give its rows while they are not longer together than the file."""
        return self.counted(self.execute(question, values))

    def counted(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Return rows while they are not longer together than the meter allows."""
        meter = self.meter
        for row in rows:
            for value in row:
                if type(value) is str or type(value) is bytes:
                    meter.characters -= len(value)
            if meter.characters < 0:
                raise TooLong("the rows are longer together than the file")
            yield row


class LedgerFile:
    """The file of a ledger, and this process's connection to it."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection: Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._settled = 0.0
        with LOCK, self._explained():
            self._connect()

    @contextmanager
    def reading(self, *, whole: bool = False) -> Iterator[Connection]:
        """Return the connection, for questions; `whole` for values as long as the file."""
        with LOCK, self._explained():
            connection = self._connect()
            size = self.size()
            connection.meter.allow(size)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MEGABYTE + whole * size)
            yield connection

    @contextmanager
    def writing(self, patience: float | None = None, *, size: int = MEGABYTE) -> Iterator[Connection]:
        """Return the connection in a transaction: all of the block is written, or nothing."""
        with LOCK, self._explained():
            if self.read_only:
                raise LedgerError(
                    f"the ledger {self.path} was opened with read_only=True.",
                    why="nothing is written to such a ledger.",
                    fix=f"gg.Ledger({str(self.path)!r})",
                )
            connection = self._connect()
            connection.meter.allow(self.size() + size)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MEGABYTE + size)
            connection.execute(f"PRAGMA busy_timeout = {int(1000 * (PATIENCE if patience is None else patience))}")
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                # Another program may have changed the schema since it was checked; now nobody can.
                version = connection.execute("PRAGMA schema_version").fetchone()[0]
                if version != connection.schema_version:
                    with _named(self.path):
                        _schema.check(connection, writing=True)
                    connection.schema_version = version
                yield connection
            if time.monotonic() > self._settled + SETTLE_AFTER:
                self._settle(connection)

    def close(self) -> None:
        with LOCK:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            if connection.process == os.getpid():
                connection.close()
            else:  # Opened before a fork: it is the parent's, and closing it here would meddle with the parent's files.
                _left_to_the_parent.append(connection)

    def size(self) -> int:
        """Count how many bytes the file has, with what waits beside it."""
        return _size(str(self.path)) + _size(f"{self.path}-wal")

    def _connect(self) -> Connection:
        if self._connection is not None and self._connection.process != os.getpid():
            self.close()
        left = False
        if self._connection is not None and self._identity != (identity := _identity(self.path)):
            if identity is None and not os.path.isdir(self.path.parent):
                raise _cannot_open(self.path, self.path.parent)  # It may come back, with the file in it.
            # A file that was moved or deleted would go on taking rows that are never read.
            left = not self.read_only
            if left:
                self._settle(self._connection)  # What was written goes with the file, not with its log.
            self.close()
        if self._connection is None:
            try:
                self._connection = (_open_to_read if self.read_only else _open_to_write)(self.path)
            except LedgerError:
                raise
            except OSError as error:  # Such as a folder that may no longer be entered.
                raise _explained_error("SQLITE_CANTOPEN", f"cannot be opened: {error.strerror}", self.path) from error
            self._identity = _identity(self.path)
        if left:
            warnings.warn(
                f"the ledger {self.path} is another file than before: that one was moved, replaced or deleted. "
                "What was recorded until now is in it; from now on incidents go to the file at this path.\n"
                f"Fix: gradgate ledger merge {self.path} MOVED   # if both are to be one",
                LedgerWarning,
                stacklevel=user_level(),
            )
        return self._connection

    def _settle(self, connection: Connection) -> None:
        """Move what was written from the log into the file; it is safe where it is if that cannot be done now."""
        with suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._settled = time.monotonic()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
            if raised_in_sqlite:
                raise raised_in_sqlite.pop() from None
            # Python's own errors are over a text that is no text, or that is too long.
            code = getattr(error, "sqlite_errorname", "") if isinstance(error, sqlite3.Error) else "SQLITE_CORRUPT"
            if code.startswith(_LASTING):
                self.close()  # A connection does not recover from these; a new one may.
            raise _explained_error(code, f"failed: {str(error) or type(error).__name__}", self.path) from error


def _explained_error(code: str, what: str, path: Path) -> LedgerError:
    """Say what an error code of SQLite means, and what to do about it."""
    *_, why, fix = next(meaning for meaning in _MEANINGS if code.startswith(meaning[0]))
    return LedgerError(f"the ledger {path} {what}.", why=why, fix=fix.replace("FILE", str(path)))


_MEANINGS = (
    ("SQLITE_NOTADB", "it is not a ledger: not even an SQLite file.", 'gg.Ledger("run.ledger")   # another path'),
    ("SQLITE_CORRUPT", "the file is damaged.", RECOVER),
    ("SQLITE_TOOBIG", "it holds a longer value than any ledger writes: it is damaged.", RECOVER),
    ("SQLITE_FULL", "the disk is full.", "free some space on the disk, or choose a path on another one"),
    ("SQLITE_READONLY", "the file or its folder is read-only for this process.", "gg.Ledger(path, read_only=True)"),
    ("SQLITE_CANTOPEN", "the file or its folder cannot be opened with the rights of this process.", "ls -l FILE"),
    ("SQLITE_BUSY", "another process holds it for longer than this one waits.", "try again, or give each rank a file"),
    ("SQLITE_INTERRUPT", "it took longer than it may, or than a sound file of this size needs.", RECOVER),
    (
        "SQLITE_IOERR",
        "the disk failed, or the file was moved away while it was in use.",
        "check the disk; network file systems are not safe for SQLite",
    ),
    ("", "SQLite could not do what it was asked.", RECOVER),
)
_LASTING = ("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL")


def _size(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def _cannot_open(path: Path, folder: Path) -> LedgerError:
    taken = folder.is_dir()
    return LedgerError(
        f"the ledger {path} cannot be opened: {'it is a folder' if taken else f'there is no folder {folder}'}.",
        why="a ledger is one file in a folder that exists.",
        fix=f"gg.Ledger({str(path / 'run.ledger')!r})" if taken else f"Path({str(folder)!r}).mkdir(parents=True)",
    )


def _open_to_write(path: Path) -> Connection:
    for folder, right in ((path.parent, True), (path, False)):
        if folder.is_dir() is not right:
            raise _cannot_open(path, folder)
    if _size(str(path)):
        return _opened(path, "mode=rwc")
    with _alone_in(path.parent) as alone:
        if alone and not _size(str(path)):
            # Logs without a file are those of one that was moved away. A process that still uses it keeps them open.
            for end in ("-wal", "-shm"):
                with suppress(OSError):
                    os.unlink(f"{path}{end}")
        return _opened(path, "mode=rwc")


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Let one process at a time make a ledger in a folder; yield whether the lock could be taken."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # On Windows, folders cannot be opened.
        yield False
        return
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    for _ in _tries():
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            continue
        except OSError:  # Such locks do not exist on this file system.
            break
    return False


def _tries() -> Iterator[None]:
    """Wait a moment between two tries, until patience is at its end."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        yield
        time.sleep(0.005)


def _open_to_read(path: Path) -> Connection:
    if not path.is_file():
        raise LedgerError(
            f"there is no ledger {path}.",
            why="it was to be read, so it is not created.",
            fix=f"ls {path.parent}   # which files are there?",
        )
    try:
        return _opened(path, "mode=ro")
    except sqlite3.OperationalError:
        # Reading in WAL mode writes beside the file. Where that is forbidden, and nothing waits there to be read,
        # the file can be taken as it is.
        if _size(f"{path}-wal"):
            raise
    return _opened(path, "mode=ro&immutable=1")


def _opened(path: Path, how: str) -> Connection:
    connection = _connection(path, how)
    writing = how == "mode=rwc"
    try:
        with _named(path):
            if writing:
                _schema.upgrade(connection)
            _schema.check(connection, writing=writing)
        if writing:
            _write_ahead(connection)
            # A killed process loses nothing; a power cut may lose the last moments, never the file.
            connection.execute("PRAGMA synchronous = NORMAL")
            if not os.access(path, os.W_OK):  # SQLite has opened it for reading without a word.
                raise _explained_error("SQLITE_READONLY", "cannot be written", path)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection(path: Path, how: str) -> Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=PATIENCE,
        isolation_level=None,
        check_same_thread=False,
        factory=Connection,
    )
    connection.meter.allow(_size(str(path)) + _size(f"{path}-wal"))
    connection.set_progress_handler(connection.meter.check, STEPS)
    # Nothing in a file from someone else may run: no function, no trigger; and its pages are checked twice.
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MEGABYTE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 200)
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; several processes may be doing so at this moment."""
    for _ in _tries():
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
    # Where it cannot be done, the rollback journal that is in force is as safe, only slower.


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the name of the file before what the schema says about it."""
    try:
        yield
    except LedgerError as error:
        raise LedgerError(
            f"{path} cannot be used as a ledger: {error.what}", why=error.why, fix=error.fix.replace("FILE", str(path))
        ) from None
