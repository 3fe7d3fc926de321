"""A store that tries again, for a bounded time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from dsec_layers.digest import Digest
from dsec_layers.errors import Conflict, CorruptError, NotFound, StoreError
from dsec_layers.progress import SILENT, Progress
from dsec_layers.store.base import BlobInfo, BlobWriter, Ref, Store
from dsec_layers.store.wrapper import Wrapper

__all__ = ["RetryStore"]

_T = TypeVar("_T")
_CORRUPT_TRIES = 3
"""Wrong bytes may come from a connection or a cache on the way; more often than this they come from the store."""


class RetryStore(Wrapper):
    """Repeats calls that failed with StoreError or CorruptError until ``deadline`` seconds have passed since the first try; then the last error counts.
    CorruptError counts at the third time.

    Between tries it waits ``first`` seconds, doubling up to ``longest``, each wait shortened by a random part of up to a half so that
    many readers do not come back at once. NotFound, Conflict, NoSpace and UsageError are answers and pass at once. A blob being written is not repeated (its
    bytes are gone): who writes starts again. ``stopping``: when set, a wait ends and the error is raised.
    """

    def __init__(
        self,
        inner: Store,
        *,
        deadline: float = 30.0,
        first: float = 0.05,
        longest: float = 5.0,
        progress: Progress = SILENT,
        stopping: threading.Event | None = None,
    ) -> None:
        super().__init__(inner)
        self._deadline = deadline
        self._first = first
        self._longest = longest
        self._progress = progress
        self._stopping = stopping or threading.Event()

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        return self._retry(lambda: self.inner.stat(digest))

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        return self._retry(lambda: self.inner.read(digest, offset, length))

    def writer(self) -> BlobWriter:
        """Start a blob."""
        return self._retry(self.inner.writer)

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        return self._retry(lambda: self.inner.touch(digest))

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``."""
        return self._retry(lambda: self.inner.delete(digest, older_than=older_than))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``. Listed whole before the first is handed out, so that a failure half-way can be repeated."""
        return iter(self._retry(lambda: tuple(self.inner.list(prefix))))

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        return self._retry(lambda: self.inner.get_ref(name))

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict. A Conflict after a failed try that had done the work is success."""
        failed = False

        def attempt() -> None:
            nonlocal failed
            try:
                self.inner.set_ref(name, new, expected=expected)
            except StoreError:
                failed = True
                raise
            except Conflict:
                if not failed or self._value(name) != new:
                    raise

        self._retry(attempt)

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""
        return iter(self._retry(lambda: tuple(self.inner.list_refs(prefix))))

    def _value(self, name: str) -> Digest | None:
        try:
            return self.inner.get_ref(name).digest
        except NotFound:
            return None

    def _retry(self, call: Callable[[], _T]) -> _T:
        end = time.monotonic() + self._deadline
        wait, corrupt = self._first, 0
        while True:
            try:
                return call()
            except (StoreError, CorruptError) as error:
                corrupt += isinstance(error, CorruptError)
                if corrupt == _CORRUPT_TRIES:
                    raise
                pause = wait * random.uniform(0.5, 1.0)
                if time.monotonic() + pause > end or self._stopping.wait(pause):
                    raise
                self._progress.debug(f"{self.url}: {error}; trying again")
                wait = min(2 * wait, self._longest)
