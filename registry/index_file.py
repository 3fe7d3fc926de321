"""A SQLite file that is an index: made when absent, put aside and made anew when damaged or of another version, safe for several threads and processes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from dsec_layers.errors import Conflict, DsecError, NoSpace, StoreError
from dsec_layers.progress import Progress

__all__ = ["IndexFile"]

_BUSY: Final = 60.0
"""Seconds to wait for another process that writes."""

_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_T = TypeVar("_T")


class IndexFile:
    """One connection to the file ``path``, whose tables ``schema`` makes and whose ``PRAGMA user_version`` is ``version``.

    ``fresh`` is true when the file was made (again) by this object.
    """

    def __init__(self, path: Path, schema: str, version: int, progress: Progress) -> None:
        self.path = path
        self.fresh = False
        self._schema = schema
        self._version = version
        self._progress = progress
        self._lock = threading.RLock()
        with self._errors():
            self._connection = self._open()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    def run(self, work: Callable[[sqlite3.Connection], _T], lost: _T) -> _T:
        """``work`` on the connection. If the file turns out to be damaged it is made anew, empty, and the answer is ``lost``."""
        with self._lock, self._errors():
            try:
                return work(self._connection)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._connection.close()
                self._connection = self._renew(str(error))
                return lost

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, rolled back on an exception. To be used under ``run``."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = self._attempt("PRAGMA user_version")
        return self._renew(found) if isinstance(found, str) else found

    def _attempt(self, probe: str) -> sqlite3.Connection | str:
        """A connection to the file if it is ours and the query ``probe`` can be answered, or why it cannot be used."""
        connection = self._connect()
        try:
            if self._usable(connection) and connection.execute(probe).fetchone()[0] in (self._version, "ok"):
                return connection
            reason = "it is of another version"
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                connection.close()
                raise
            reason = str(error)
        connection.close()
        return reason

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY * 1000)}")
        return connection

    def _usable(self, connection: sqlite3.Connection) -> bool:
        """Whether the file has our tables, made now if it is empty. Raises DatabaseError for a damaged one."""
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "cache_size = -65536", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
        if _version(connection) == self._version:
            return True
        connection.execute("BEGIN IMMEDIATE")  # of several processes that come at once one makes the tables
        try:
            if _version(connection) == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in filter(str.strip, self._schema.split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {self._version}")
                self.fresh = True
            return _version(connection) == self._version
        finally:
            connection.execute("COMMIT")

    def _renew(self, reason: str) -> sqlite3.Connection:
        """Put the file aside and make a new one. Under a lock, because several processes may find the damage at once: the second takes the first's new file."""
        lock = os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._attempt("PRAGMA quick_check(1)")
            if not isinstance(found, str):
                return found
            aside = f"{self.path}.damaged-{time.time_ns()}"
            self._progress.warning(f"index {self.path} cannot be used ({reason}); it is kept as {aside} and made anew")
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            made = self._attempt("PRAGMA user_version")
            if isinstance(made, str):
                raise StoreError(f"{self.path}: cannot make the index: {made}")
            self.fresh = True
            return made
        finally:
            os.close(lock)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _mapped(error, self.path) from error
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_damage(error: sqlite3.Error) -> bool:
    return _code(error) in _DAMAGED


def _mapped(error: sqlite3.Error, path: Path) -> DsecError:
    if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Conflict(f"{path} has been locked by another process for {_BUSY:g} s")
    if _code(error) == sqlite3.SQLITE_FULL:
        return NoSpace(f"{path}: no space left on the device")
    if _code(error) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreError(f"{path}: {error}", hint="point --cache at a directory of your own")
    return StoreError(f"{path}: {error}", hint="the file is an index: remove it and rebuild the catalog")
