"""Open files, kept: opening again costs a walk of the path, a question to a daemon, or (on 3FS) the file's page cache."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Descriptors", "OpenFile"]

_Key = TypeVar("_Key", bound=Hashable)


class OpenFile:
    """A descriptor that is closed when the last reference to this object goes; usable where a descriptor is. Hold it in a variable while ``fd`` is used."""

    __slots__ = ("checked", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.checked = time.monotonic()
        """When its name was last known to be there."""

    def __index__(self) -> int:
        return self.fd

    def __del__(self) -> None:
        os.close(self.fd)


class Descriptors(Generic[_Key]):
    """The files used last, at most ``limit`` of them. For any number of threads; a file in use stays open for its user whatever happens here.

    ``recheck``: seconds after which a kept file is looked at again: one whose name is gone holds disk space and is let go. None: never.
    """

    def __init__(self, limit: int, *, recheck: float | None = None) -> None:
        self._limit = limit
        self._recheck = recheck
        self._lock = threading.Lock()
        self._open: OrderedDict[_Key, OpenFile] = OrderedDict()

    def take(self, key: _Key, opener: Callable[[], int]) -> OpenFile:
        """The file of ``key``, opened by ``opener`` if it is not here; the opener's errors pass through."""
        kept = self.here(key)
        if kept is not None:
            return kept
        made = OpenFile(opener())  # outside of the lock: it may wait
        with self._lock:
            before = self._open.pop(key, None)
            self._open[key] = made
            evicted = self._open.popitem(last=False) if len(self._open) > self._limit else None
        del before, evicted  # outside of the lock: closing may take a moment
        return made

    def here(self, key: _Key) -> OpenFile | None:
        """The file of ``key`` if it is open. Never waits."""
        with self._lock:
            kept = self._open.get(key)
            if kept is None:
                return None
            if self._is_fresh(kept):
                self._open.move_to_end(key)
                return kept
            del self._open[key]
        return None

    def drop(self, key: _Key) -> None:
        """Let go of the file of ``key``: the next ``take`` opens it anew."""
        with self._lock:
            kept = self._open.pop(key, None)
        del kept

    def close(self) -> None:
        """Let go of all. The next ``take`` opens again."""
        with self._lock:
            kept, self._open = self._open, OrderedDict()
        del kept

    def _is_fresh(self, kept: OpenFile) -> bool:
        if self._recheck is None:
            return True
        now = time.monotonic()
        if now - kept.checked <= self._recheck:
            return True
        kept.checked = now
        try:
            return os.fstat(kept.fd).st_nlink > 0
        except OSError:  # its file system is gone, and may be back: open anew
            return False
