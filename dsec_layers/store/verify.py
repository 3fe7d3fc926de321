"""A store whose whole-blob reads are checked against the digest, and whose blobs have one size for good."""

from __future__ import annotations

import threading

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.errors import CorruptError
from dsec_layers.store.base import BlobInfo, Store
from dsec_layers.store.wrapper import Wrapper

__all__ = ["VerifyStore"]

_KEEP = 65536
"""Sizes remembered. More blobs than that, and all are forgotten and asked for again."""


class VerifyStore(Wrapper):
    """A read of a whole blob must match its digest, a read of a part must have its length, and a size that was seen once must not change: CorruptError.

    What a part *should* contain only its reader knows (segments have digests of their own); who finds it wrong calls ``suspect``.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._sizes: dict[Digest, int] = {}

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        return self._seen(self.inner.stat(digest))

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        return self._seen(self.inner.touch(digest))

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        size = self._sizes.get(digest)
        if size is None:
            size = self.stat(digest).size
        data = self.inner.read(digest, offset, length)
        if len(data) != length or offset + length > size:
            self.suspect(digest)
            raise CorruptError(f"{digest} in {self.url}: wanted {length} bytes at {offset} of {size}, got {len(data)}")
        if not offset and length == size and sha256_digest(data) != digest:
            self.suspect(digest)
            raise CorruptError(f"{digest} in {self.url}: the bytes do not match the digest")
        return data

    def suspect(self, digest: Digest) -> None:
        """Forget the size that was seen."""
        with self._lock:
            self._sizes.pop(digest, None)
        self.inner.suspect(digest)

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``."""
        with self._lock:
            self._sizes.pop(digest, None)
        return self.inner.delete(digest, older_than=older_than)

    def _seen(self, info: BlobInfo) -> BlobInfo:
        with self._lock:
            if len(self._sizes) >= _KEEP:
                self._sizes.clear()
            known = self._sizes.setdefault(info.digest, info.size)
        if known != info.size:
            self.suspect(info.digest)
            raise CorruptError(f"{info.digest} in {self.url} had {known} bytes, now it has {info.size}")
        return info
