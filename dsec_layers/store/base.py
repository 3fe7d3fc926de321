"""The store contract: immutable blobs named by SHA-256, and small refs changed by compare-and-swap.

Rules every backend keeps (tests/contract/ is their specification):

* A blob is visible whole or not at all. Its bytes never change. ``commit`` of a blob that is already there succeeds and changes nothing.
* ``read`` returns exactly the bytes asked for. A range beyond the end, a short answer, a missing tail are CorruptError, never a short result.
* A blob or ref that does not exist is NotFound; any trouble in finding out is StoreError ("unknown" is never "absent").
* ``writer`` streams a blob of unknown digest: whoever writes computes the digest (the writer does it for you) and it becomes visible at ``commit``;
  leaving the context without commit leaves nothing.
* A ref is ``name:tag`` -> digest. ``set_ref`` succeeds only if the ref still is ``expected`` (None: must not exist); else Conflict. ``new=None`` removes it.
* Names are validated at the door (``check_ref``): the backends may trust them.
* All methods may be called from several threads, and several processes may use one store.

Differences between stores are data (``Capabilities``), not subclasses to test for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from dsec_layers.digest import Buffer, Digest
from dsec_layers.errors import UsageError

__all__ = ["BlobInfo", "BlobWriter", "Capabilities", "Ref", "Store", "check_ref", "split_ref"]

_NAME = re.compile(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob in a store: its digest and its size in bytes."""

    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A ref as it stands: ``name:tag`` and the digest it names."""

    name: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between stores.

    ``connections``: useful number of parallel reads. ``read_size``: bytes below which a read costs as much as this many. ``local``: blobs are local files.
    """

    connections: int = 8
    read_size: int = 256 << 10
    local: bool = False


class BlobWriter(Protocol):
    """A blob being written. Use as a context; without ``commit`` nothing remains."""

    def write(self, data: Buffer) -> int:
        """Append ``data``; returns its length."""

    def commit(self, expected: Digest | None = None) -> BlobInfo:
        """Make the blob durable and visible; CorruptError if its digest is not ``expected``."""

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
        """The size of a blob, or NotFound."""

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""

    def writer(self) -> BlobWriter:
        """Start a blob."""

    def delete(self, digest: Digest) -> None:
        """Remove a blob; one that is not there is no error."""

    def list(self) -> Iterator[BlobInfo]:
        """Every blob, in no order."""

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""

    def close(self) -> None:
        """Let go of connections and descriptors."""


def split_ref(text: str) -> tuple[str, str]:
    """``name:tag`` in its parts; the tag is ``latest`` when left out. UsageError if it is not a reference."""
    name, colon, tag = text.partition(":")
    tag = tag if colon else "latest"
    if len(name) > MAX_NAME or not _NAME.match(name) or not _TAG.match(tag):
        raise UsageError(
            f"not a reference: {text[:100]!r}",
            hint="a reference is name:tag; name is lower-case letters, digits and . _ - / between them, tag letters, digits and . _ - (at most 128)",
        )
    return name, tag


def check_ref(text: str) -> str:
    """The reference in full form ``name:tag``."""
    return ":".join(split_ref(text))
