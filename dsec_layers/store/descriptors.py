"""Open files of a store, kept: on 3FS each open(2) drops the file's page cache, and everywhere it costs a walk of the path."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Descriptors"]

_RECHECK = 30.0
"""Seconds after which a kept file is looked at again: one whose name is gone holds disk space and is let go."""


@dataclass(slots=True)
class _Open:
    fd: int
    users: int
    checked: float
    dropped: bool = False


class Descriptors:
    """At most ``limit`` idle descriptors open for reading, by name, least recently used closed first. For any number of threads.

    ``opener`` opens what is not here; its errors pass through. A descriptor in use is never closed under its user.
    """

    def __init__(self, opener: Callable[[str], int], limit: int = 256) -> None:
        self._opener = opener
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """The descriptor of ``name`` for the time of the context."""
        entry = self._take(name)
        try:
            yield entry.fd
        finally:
            self._release(entry)

    def drop(self, name: str) -> None:
        """Close the descriptor of ``name``, at once or when its last user is done."""
        with self._lock:
            entry = self._open.pop(name, None)
            if entry is not None:
                self._retire(entry)

    def close(self) -> None:
        """Close all. The next ``use`` opens again."""
        with self._lock:
            while self._open:
                self._retire(self._open.popitem()[1])

    def _take(self, name: str) -> _Open:
        with self._lock:
            entry = self._open.get(name)
            if entry is not None and self._fresh(entry):
                self._open.move_to_end(name)
                entry.users += 1
                return entry
            if entry is not None:
                self._retire(self._open.pop(name))
        fd = self._opener(name)  # outside the lock: it may wait for the file to appear
        made = _Open(fd, 1, time.monotonic())
        with self._lock:
            other = self._open.pop(name, None)
            if other is not None:
                self._retire(other)
            self._open[name] = made
            while len(self._open) > self._limit:
                self._retire(self._open.popitem(last=False)[1])
        return made

    def _fresh(self, entry: _Open) -> bool:
        now = time.monotonic()
        if now - entry.checked > _RECHECK:
            entry.checked = now
            try:
                return os.fstat(entry.fd).st_nlink > 0
            except OSError:  # its file system is gone, and may be back: open anew
                return False
        return True

    def _retire(self, entry: _Open) -> None:
        entry.dropped = True
        if not entry.users:
            os.close(entry.fd)

    def _release(self, entry: _Open) -> None:
        with self._lock:
            entry.users -= 1
            if entry.dropped and not entry.users:
                os.close(entry.fd)
