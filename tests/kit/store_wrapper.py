"""The base of wrappers: a store that passes everything on to another. Override what the wrapper is about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsec_layers.digest import Digest
from dsec_layers.errors import StoreError
from dsec_layers.store.base import BlobInfo, BlobWriter, Capabilities, Ref, Store, as_local

__all__ = ["Wrapper"]


class Wrapper:
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def url(self) -> str:
        """The URL of the wrapped store."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped store."""
        return self.inner.capabilities

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        return self.inner.stat(digest)

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        return self.inner.read(digest, offset, length)

    def writer(self) -> BlobWriter:
        """Start a blob."""
        return self.inner.writer()

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        return self.inner.touch(digest)

    def suspect(self, digest: Digest) -> None:
        """The caller found bytes of this blob wrong."""
        self.inner.suspect(digest)

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``."""
        return self.inner.delete(digest, older_than=older_than)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``."""
        return self.inner.list(prefix)

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        return self.inner.get_ref(name)

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""
        self.inner.set_ref(name, new, expected=expected)

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""
        return self.inner.list_refs(prefix)

    def close(self) -> None:
        """Close the wrapped store."""
        self.inner.close()

    def local_path(self, digest: Digest) -> Path:
        """The file that is the blob, where the wrapped store has files."""
        local = as_local(self.inner)
        if local is None:
            raise StoreError(f"the blobs of {self.url} are not local files")
        return local.local_path(digest)

    def open_fd(self, digest: Digest) -> int:
        """A descriptor open for reading, where the wrapped store has files."""
        local = as_local(self.inner)
        if local is None:
            raise StoreError(f"the blobs of {self.url} are not local files")
        return local.open_fd(digest)
