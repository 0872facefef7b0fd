"""One SQLite file, shared by threads, forked workers, ranks and runs: opened, read and written through here.

A connection belongs to the process that opened it. All ledgers of a process share one lock; it is also held while
the process forks, so that no child inherits SQLite in the middle of something. A child leaves the connections of
its parent alone and opens its own.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradgate.errors import LedgerError
from gradgate.ledger import _schema

__all__ = ["LOCK", "PATIENCE", "LedgerFile"]

LOCK = threading.RLock()
"""Held around every use of every ledger of this process."""

PATIENCE = 5.0
"""How many seconds a writer waits for another one; after a failure it waits far less, to let the training go on."""

STEPS = 10_000
"""After how many steps of SQLite's machine the meter is read."""

_left_to_the_parent: list[sqlite3.Connection] = []

if hasattr(os, "register_at_fork"):  # Not on Windows, which does not fork.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class _Meter:
    """Stops a question that takes more steps than a sound file of its size could need.

    The pages of a hostile file may point to each other so that a few of them pretend to hold more rows than could ever
    be read. A sound row takes some hundred bytes and some hundred steps; ten steps for each byte are plenty.
    """

    def __init__(self) -> None:
        self.left = 0

    def allow(self, path: Path | None) -> None:
        """Allow what the file's size may need, or anything if there is none."""
        if path is None:
            self.left = 2**62
        else:
            self.left = (1_000_000 + 10 * (_size(str(path)) + _size(f"{path}-wal"))) // STEPS

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


class LedgerFile:
    """The file of a ledger, and this process's connection to it.

    Args:
        path: Where it is.
        read_only: Never write to it, nor create it.

    Raises:
        LedgerError: It cannot be opened, or it is not a ledger.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._process = os.getpid()
        self._meter = _Meter()
        with LOCK, _explained(path):
            self._connect()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the connection, for questions.

        Raises:
            LedgerError: The file cannot be read.
        """
        with LOCK, _explained(self.path):
            connection = self._connect()
            self._meter.allow(self.path)
            yield connection

    @contextmanager
    def writing(self, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        """Give the connection in a transaction: all of the block is written, or nothing.

        Args:
            patience: How many seconds to wait for other writers.

        Raises:
            LedgerError: The file cannot be written.
        """
        with LOCK, _explained(self.path):
            if self.read_only:
                raise LedgerError(
                    f"the ledger {self.path} was opened with read_only=True.",
                    why="nothing is written to such a ledger.",
                    fix=f"gg.Ledger({str(self.path)!r})",
                )
            connection = self._connect()
            self._meter.allow(None)
            connection.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close this process's connection; the next use opens another one."""
        with LOCK:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            if self._process == os.getpid():
                connection.close()
            else:  # Opened before a fork: it is the parent's, and closing it here would meddle with the parent's files.
                _left_to_the_parent.append(connection)

    def _connect(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            self.close()
            self._process = os.getpid()
        # A file that was moved or deleted would go on taking rows that nobody ever sees.
        if self._connection is not None and self._identity != _identity(self.path):
            self.close()
        if self._connection is None:
            self._connection = self._open()
            self._identity = _identity(self.path)
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self._meter.allow(self.path)
        try:
            return (_open_to_read if self.read_only else _open_to_write)(self.path, self._meter)
        except LedgerError:
            raise
        except OSError as error:  # Such as a folder that may no longer be entered.
            what = f"the ledger {self.path} cannot be opened: {error.strerror}."
            raise LedgerError(what, why=_CANNOT_OPEN[0], fix=_CANNOT_OPEN[1].replace("FILE", str(self.path))) from error


def _explain(error: Exception, path: Path) -> LedgerError:
    """Say what an SQLite error means and what to do about it.

    Args:
        error: What SQLite raised, or Python over a text that is no text or a length that no memory holds.
        path: The file it speaks of.

    Returns:
        The same as a LedgerError.
    """
    damaged = isinstance(error, UnicodeDecodeError | MemoryError)
    code = "SQLITE_CORRUPT" if damaged else getattr(error, "sqlite_errorname", "")
    other = ("", "SQLite could not do what it was asked.", _RECOVER)
    _, why, fix = next((meaning for meaning in _MEANINGS if code.startswith(meaning[0])), other)
    what = str(error) or type(error).__name__
    return LedgerError(f"the ledger {path} failed: {what}.", why=why, fix=fix.replace("FILE", str(path)))


_RECOVER = 'sqlite3 FILE ".recover" | sqlite3 RECOVERED   # saves what can be read'
_READ_ONLY = ("the file or its folder is read-only for this process.", "gg.Ledger(path, read_only=True)")
_CANNOT_OPEN = ("the file or its folder cannot be opened with the rights of this process.", "ls -l FILE")
_MEANINGS = (
    ("SQLITE_NOTADB", "it is not a ledger: not even an SQLite file.", 'gg.Ledger("run.ledger")   # another path'),
    ("SQLITE_CORRUPT", "the file is damaged.", _RECOVER),
    ("SQLITE_FULL", "there is no room left for it.", "make room on the disk, or choose a path on another one"),
    ("SQLITE_READONLY", *_READ_ONLY),
    ("SQLITE_CANTOPEN", *_CANNOT_OPEN),
    ("SQLITE_BUSY", "another process holds it for longer than this one waits.", "try again, or give each rank a file"),
    ("SQLITE_INTERRUPT", "it took longer than it may, or than a sound file of this size needs.", _RECOVER),
    ("SQLITE_IOERR", "the disk failed.", "look at the disk; network file systems are not safe for SQLite"),
)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
        raise _explain(error, path) from error


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _open_to_write(path: Path, meter: _Meter) -> sqlite3.Connection:
    if path.is_dir() or not path.parent.is_dir():
        missing = path.parent if not path.is_dir() else None
        raise LedgerError(
            f"the ledger {path} cannot be opened: {f'there is no folder {missing}' if missing else 'it is a folder'}.",
            why="a ledger is one file in a folder that exists.",
            fix=f"Path({str(missing)!r}).mkdir(parents=True)"
            if missing
            else f"gg.Ledger({str(path / 'run.ledger')!r})",
        )
    connection = _connection(path, "mode=rwc", meter)
    try:
        with _named(path):
            _schema.upgrade(connection)
            _schema.check(connection)
        _write_ahead(connection)
        # A killed process loses nothing; a power cut may lose the last moments, never the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        if not os.access(path, os.W_OK):  # SQLite has opened it for reading without a word.
            raise LedgerError(f"the ledger {path} cannot be written.", why=_READ_ONLY[0], fix=_READ_ONLY[1])
    except BaseException:
        connection.close()
        raise
    return connection


def _open_to_read(path: Path, meter: _Meter) -> sqlite3.Connection:
    if not path.is_file():
        raise LedgerError(
            f"there is no ledger {path}.",
            why="it was to be read, so it is not created.",
            fix=f"ls {path.parent}   # which files are there?",
        )
    try:
        return _checked(path, "mode=ro", meter)
    except sqlite3.OperationalError:
        # Reading in WAL mode writes beside the file. Where that is forbidden, and nothing waits there to be read,
        # the file can be taken as it is.
        waiting = Path(f"{path}-wal")
        if waiting.exists() and waiting.stat().st_size > 0:
            raise
    return _checked(path, "mode=ro&immutable=1", meter)


def _checked(path: Path, how: str, meter: _Meter) -> sqlite3.Connection:
    connection = _connection(path, how, meter)
    try:
        with _named(path):
            _schema.check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection(path: Path, how: str, meter: _Meter) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{how}",
            uri=True,
            timeout=PATIENCE,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise _explain(error, path) from error
    connection.set_progress_handler(meter, STEPS)
    # Nothing in a file from someone else may run functions, and its pages are looked at twice.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; several processes may be doing so at this moment."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
            if time.monotonic() > until:
                return  # The rollback journal that is in force is as safe, only slower.
        time.sleep(0.005)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the name of the file before what the schema says about it."""
    try:
        yield
    except LedgerError as error:
        raise LedgerError(
            f"{path} cannot be used as a ledger: {error.what}", why=error.why, fix=error.fix.replace("FILE", str(path))
        ) from None
