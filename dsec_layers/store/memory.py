"""A store in memory, for tests and for composing objects that are then copied elsewhere."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from dsec_layers.digest import Buffer, Digest, check_digest
from dsec_layers.errors import Conflict, CorruptError, NotFound, StoreError
from dsec_layers.store.base import BlobInfo, BlobWriter, Capabilities, Ref, Store, check_range, check_ref

__all__ = ["MemoryStore", "open_url"]

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def open_url(url: str, *, create: bool = True) -> Store:
    """``mem://`` is a new store, ``mem://name`` the one store of that name in this process."""
    name = url.partition("://")[2]
    if not name:
        return MemoryStore()
    with _named_lock:
        return _named.setdefault(name, MemoryStore(url))


class MemoryStore:
    """Blobs and refs in dictionaries, every operation atomic under one lock. ``clock`` gives the time of ``modified``."""

    def __init__(self, url: str = "mem://", *, clock: Callable[[], float] = time.time) -> None:
        self.url = url
        self.capabilities = Capabilities(connections=4, read_size=1)
        self._clock = clock
        self._lock = threading.Lock()
        self._blobs: dict[Digest, tuple[bytes, float]] = {}
        self._refs: dict[str, Digest] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        data, modified = self._blob(digest)
        return BlobInfo(digest, len(data), modified)

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        check_range(offset, length)
        data, _ = self._blob(digest)
        if offset + length > len(data):
            raise CorruptError(f"{digest}: wanted {length} bytes at {offset}, the blob has {len(data)}")
        return data[offset : offset + length]

    def writer(self) -> BlobWriter:
        """Start a blob."""
        return _MemoryWriter(self)

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        with self._lock:
            data, _ = self._blob(digest)
            now = self._clock()
            self._blobs[digest] = data, now
        return BlobInfo(digest, len(data), now)

    def suspect(self, digest: Digest) -> None:
        """Nothing is cached here."""

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``."""
        check_digest(digest)
        with self._lock:
            found = self._blobs.get(digest)
            if found and older_than is not None and found[1] >= older_than:
                return False
            self._blobs.pop(digest, None)
        return True

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``."""
        with self._lock:
            found = [BlobInfo(digest, len(data), modified) for digest, (data, modified) in self._blobs.items() if digest.startswith(prefix)]
        return iter(found)

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        name = check_ref(name)
        digest = self._refs.get(name)
        if digest is None:
            raise NotFound(f"no ref {name} in {self.url}")
        return Ref(name, digest)

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""
        name = check_ref(name)
        if new is not None:
            check_digest(new)
        with self._lock:
            current = self._refs.get(name)
            if current != expected:
                raise Conflict(f"{name} is {current or 'absent'}, not {expected or 'absent'}")
            if new is None:
                self._refs.pop(name, None)
            else:
                self._refs[name] = new

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""
        with self._lock:
            found = sorted((name, digest) for name, digest in self._refs.items() if name.startswith(prefix))
        return iter([Ref(name, digest) for name, digest in found])

    def close(self) -> None:
        """Keeps everything: a named store may be opened again."""

    def _blob(self, digest: Digest) -> tuple[bytes, float]:
        found = self._blobs.get(check_digest(digest))
        if found is None:
            raise NotFound(f"no blob {digest} in {self.url}")
        return found

    def _put(self, data: bytes) -> BlobInfo:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        with self._lock:
            now = self._clock()
            self._blobs[digest] = data, now
        return BlobInfo(digest, len(data), now)


class _MemoryWriter:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._data: bytearray | None = bytearray()

    def write(self, data: Buffer) -> int:
        if self._data is None:
            raise StoreError("write after the end of a blob")
        self._data += data
        return memoryview(data).nbytes

    def commit(self, expected: Digest | None = None) -> BlobInfo:
        if self._data is None:
            raise StoreError("a blob is committed once")
        data, self._data = bytes(self._data), None
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if expected is not None and digest != expected:
            raise CorruptError(f"wrote {digest}, expected {expected}")
        return self._store._put(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._data = None
