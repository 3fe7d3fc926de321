"""The store contract: immutable blobs named by SHA-256, and small refs changed by compare-and-swap.

Rules every backend keeps (tests/contract/ is their specification):

* A blob is visible whole or not at all. Its bytes never change. ``commit`` of a blob that is already there succeeds and changes nothing.
* ``read`` returns exactly the bytes asked for. A range beyond the end, a short answer, a missing tail are CorruptError, never a short result.
* A blob or ref that does not exist is NotFound; any trouble in finding out is StoreError ("unknown" is never "absent").
* ``writer`` streams a blob of unknown digest: whoever writes computes the digest (the writer does it for you) and it becomes visible at ``commit``;
  leaving the context without commit leaves nothing.
* ``BlobInfo.modified`` is the last time somebody published or touched the blob. A collector deletes only what nobody refers to *and* nobody touched for a
  grace period (``delete(..., older_than=...)``, one atomic step in a good backend); so whoever is about to refer to a blob that is already there
  touches it first, and a touch that succeeds keeps the blob for the grace period.
* A ref is ``name:tag`` -> digest. ``set_ref`` succeeds only if the ref still is ``expected`` (None: must not exist); else Conflict. ``new=None`` removes it.
* Names and digests are validated at the door (``check_ref``, ``check_digest``), in every backend: UsageError.
* A full disk or quota is NoSpace.
* All methods may be called from several threads, and several processes may use one store.

Differences between stores are data (``Capabilities``), not subclasses to test for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

from dsec_layers.digest import Buffer, Digest
from dsec_layers.errors import UsageError

__all__ = ["BlobInfo", "BlobWriter", "Capabilities", "LocalStore", "Ref", "Store", "as_local", "check_range", "check_ref", "split_ref"]

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*\Z")  # as OCI distribution names repositories
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob in a store: its digest, its size in bytes, and when it was last published or touched (seconds since 1970; not part of its identity)."""

    digest: Digest
    size: int
    modified: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Ref:
    """A ref as it stands: ``name:tag`` and the digest it names."""

    name: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between stores.

    ``connections``: useful number of parallel reads. ``read_size``: bytes below which a read costs as much as this many.
    ``local``: blobs are files this host can open (``as_local``).
    """

    connections: int = 8
    read_size: int = 256 << 10
    local: bool = False


class BlobWriter(Protocol):
    """A blob being written. Use as a context; without ``commit`` nothing remains."""

    def write(self, data: Buffer) -> int:
        """Append ``data``; returns its length."""

    def commit(self, expected: Digest | None = None) -> BlobInfo:
        """Make the blob durable and visible; CorruptError (and nothing stored) if its digest is not ``expected``."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...


class Store(Protocol):
    """Where layers live. See the module docstring for the rules."""

    @property
    def url(self) -> str:
        """What opens this store again, and what messages call it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store is good at."""

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""

    def writer(self) -> BlobWriter:
        """Start a blob."""

    def touch(self, digest: Digest) -> BlobInfo:
        """Say that a blob is about to be referred to: its ``modified`` becomes now (or was a few minutes ago). NotFound if it is gone."""

    def suspect(self, digest: Digest) -> None:
        """The caller found bytes of this blob wrong: drop what is cached of it, and read it elsewhere from now on if there is an elsewhere."""

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob, with ``older_than`` only if its ``modified`` is before that time. Whether it is gone now; one that was not there is gone."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``, in no order. One that comes or goes meanwhile may or may not be listed."""

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""

    def close(self) -> None:
        """Let go of connections and descriptors."""


class LocalStore(Store, Protocol):
    """A store whose blobs are files of this host: for zero-copy reads. Reach it by ``as_local``."""

    def local_path(self, digest: Digest) -> Path:
        """The file that is the blob, or NotFound. Only to be read."""

    def open_fd(self, digest: Digest) -> int:
        """A descriptor open for reading, which the caller closes, or NotFound. Cheaper than opening the path where opening costs."""


def as_local(store: Store) -> LocalStore | None:
    """``store`` if its blobs are local files, else None."""
    return cast(LocalStore, store) if store.capabilities.local else None


def check_range(offset: int, length: int) -> None:
    """UsageError for a range that no blob can have."""
    if offset < 0 or length < 0:
        raise UsageError(f"not a range of bytes: {length} at {offset}")


def split_ref(text: str) -> tuple[str, str]:
    """``name:tag`` in its parts; the tag is ``latest`` when left out. UsageError if it is not a reference."""
    name, colon, tag = text.partition(":")
    tag = tag if colon else "latest"
    if name == "sha256":
        raise UsageError(f"not a reference but a digest: {text[:100]!r}", hint="a name of its own tells the two apart: sha256-tools:1")
    if len(name) > MAX_NAME or not _NAME.match(name) or not _TAG.match(tag):
        raise UsageError(
            f"not a reference: {text[:100]!r}",
            hint="a reference is name:tag; name is lower-case letters, digits and . _ - / between them, tag letters, digits and . _ - (at most 128)",
        )
    return name, tag


def check_ref(text: str) -> str:
    """The reference in full form ``name:tag``."""
    return ":".join(split_ref(text))
