"""Two stores in a row: what the first cannot give, the second may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from dsec_layers.digest import Digest
from dsec_layers.errors import CorruptError, NotFound, StoreError
from dsec_layers.progress import SILENT, Progress
from dsec_layers.store.base import BlobInfo, Capabilities, Ref, Store
from dsec_layers.store.wrapper import Wrapper

__all__ = ["FallbackStore"]

_T = TypeVar("_T")


class FallbackStore(Wrapper):
    """Reads go to ``first``, and to ``second`` if that says NotFound, StoreError or CorruptError; each kind of failure is reported once a blob.

    A blob that somebody called suspect is asked of the other store first from then on. Everything that changes something, and everything about refs that ``first``
    answers, is ``first``'s alone. When both fail, the answer is NotFound only if both say so: "unknown" is never "absent".
    """

    def __init__(self, first: Store, second: Store, *, progress: Progress = SILENT) -> None:
        super().__init__(first)
        self.second = second
        self._progress = progress
        self._lock = threading.Lock()
        self._suspects: set[Digest] = set()
        self._told: set[tuple[str, str]] = set()

    @property
    def capabilities(self) -> Capabilities:
        """Those of the first, without local files: a file cannot fall back."""
        inner = self.inner.capabilities
        return Capabilities(inner.connections, inner.read_size, local=False)

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        return self._either(digest, lambda store: store.stat(digest))

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        return self._either(digest, lambda store: store.read(digest, offset, length))

    def suspect(self, digest: Digest) -> None:
        """Read this blob from the other store from now on."""
        with self._lock:
            self._suspects ^= {digest}
            now = self.second if digest in self._suspects else self.inner
        self.inner.suspect(digest)
        self.second.suspect(digest)
        self._progress.warning(f"{digest} had wrong bytes; from now on it is read from {now.url}")

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        return self._either(name, lambda store: store.get_ref(name))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob of the first store whose digest begins with ``prefix``."""
        return self.inner.list(prefix)

    def close(self) -> None:
        """Close both."""
        self.inner.close()
        self.second.close()

    def _either(self, subject: str, call: Callable[[Store], _T]) -> _T:
        order = (self.second, self.inner) if subject in self._suspects else (self.inner, self.second)
        try:
            return call(order[0])
        except (NotFound, StoreError, CorruptError) as error:
            self._tell(subject, error)
            try:
                return call(order[1])
            except NotFound:
                raise error from None

    def _tell(self, subject: str, error: Exception) -> None:
        with self._lock:
            if len(self._told) > 4096:
                self._told.clear()
            new = (subject, type(error).__name__) not in self._told
            self._told.add((subject, type(error).__name__))
        if new:
            self._progress.warning(f"{error}; falling back to the other store")
