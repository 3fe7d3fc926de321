"""A store that counts what goes through it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dsec_layers.digest import Buffer, Digest
from dsec_layers.store.base import BlobInfo, BlobWriter, Capabilities, Ref, Store
from tests.kit.store_wrapper import Wrapper

__all__ = ["CountStore", "Counts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Calls by kind (failed ones too), bytes read, and bytes of blobs written and committed."""

    stats: int = 0
    reads: int = 0
    bytes_read: int = 0
    blobs_written: int = 0
    bytes_written: int = 0
    touches: int = 0
    deletes: int = 0
    lists: int = 0
    ref_calls: int = 0

    @property
    def requests(self) -> int:
        """All calls."""
        return self.stats + self.reads + self.blobs_written + self.touches + self.deletes + self.lists + self.ref_calls


class CountStore(Wrapper):
    """Counts calls and bytes, from any number of threads. Reports no local files, so that nothing passes it by."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped store, without local files."""
        inner = self.inner.capabilities
        return Capabilities(inner.connections, inner.read_size, local=False)

    @property
    def counts(self) -> Counts:
        """The counts up to now."""
        with self._lock:
            return Counts(**self._counts)

    def reset(self) -> Counts:
        """The counts up to now, and begin at zero."""
        with self._lock:
            counts, self._counts = Counts(**self._counts), {}
        return counts

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        self.add("stats")
        return self.inner.stat(digest)

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        self.add("reads")
        data = self.inner.read(digest, offset, length)
        self.add("bytes_read", len(data))
        return data

    def writer(self) -> BlobWriter:
        """Start a blob."""
        return _CountWriter(self, self.inner.writer())

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        self.add("touches")
        return self.inner.touch(digest)

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``."""
        self.add("deletes")
        return self.inner.delete(digest, older_than=older_than)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``."""
        self.add("lists")
        return self.inner.list(prefix)

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        self.add("ref_calls")
        return self.inner.get_ref(name)

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""
        self.add("ref_calls")
        self.inner.set_ref(name, new, expected=expected)

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""
        self.add("ref_calls")
        return self.inner.list_refs(prefix)

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one of the counts."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount


class _CountWriter:
    def __init__(self, counts: CountStore, inner: BlobWriter) -> None:
        self._counts = counts
        self._inner = inner

    def write(self, data: Buffer) -> int:
        return self._inner.write(data)

    def commit(self, expected: Digest | None = None) -> BlobInfo:
        info = self._inner.commit(expected)
        self._counts.add("blobs_written")
        self._counts.add("bytes_written", info.size)
        return info

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, value, trace)
