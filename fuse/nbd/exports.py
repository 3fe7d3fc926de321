"""What is served: a source under a name, and what a source may offer beyond ``size`` and ``pread``.

A source is a dsec_layers.blocksource.BlockSource; one that also has the verbs of WritableSource is a disk that can be written to. Everything else
is optional, found by its presence, and has a default that is always right:

========================  ==========================================================================================================
``blocking``              a bool; False promises that ``pread`` and ``pwrite`` never wait for anything but memory or a local disk's
                          cache, so that they may run between two requests of a connection (default: True)
``sendable``              see Sendable: ranges that lie in local files leave by sendfile (default: everything goes through ``pread``)
``block_status``          see ExtentSource (default: everything is data)
``cache``                 see PrefetchSource (default: the command is not offered)
``fast_zero``             a bool; True promises that ``write_zeroes`` is faster than writing (default: False)
========================  ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, TypeAlias, cast, runtime_checkable

from dsec_layers.blocksource import BlockSource, WritableSource
from dsec_layers.errors import UsageError
from dsec_layers.fuse.nbd.protocol import (
    MAX_STRING,
    NBD_FLAG_CAN_MULTI_CONN,
    NBD_FLAG_HAS_FLAGS,
    NBD_FLAG_READ_ONLY,
    NBD_FLAG_SEND_CACHE,
    NBD_FLAG_SEND_DF,
    NBD_FLAG_SEND_FAST_ZERO,
    NBD_FLAG_SEND_FLUSH,
    NBD_FLAG_SEND_FUA,
    NBD_FLAG_SEND_TRIM,
    NBD_FLAG_SEND_WRITE_ZEROES,
)

__all__ = ["Export", "ExtentSource", "Piece", "PrefetchSource", "Sendable", "export_table"]

Piece: TypeAlias = tuple[SupportsIndex, int, int]
"""(descriptor, offset in that file, length) of a part of a range.

The descriptor is an int that stays open as long as the source is served, or an object whose ``__index__`` gives one that stays open as long as
the object lives: it is held until the bytes have left.
"""

MAX_SIZE = (1 << 63) - 1
_WRITE_VERBS = ("pwrite", "flush", "trim", "write_zeroes")


@runtime_checkable
class Sendable(Protocol):
    """A source of which some ranges lie plainly in local files."""

    def sendable(self, offset: int, length: int) -> Sequence[Piece] | None:
        """The pieces that, one after the other, are the range; None where that is not so (absent, compressed). Must not wait, and is called per read."""


@runtime_checkable
class ExtentSource(Protocol):
    """A source that knows where it has data."""

    def block_status(self, offset: int, length: int) -> Iterable[tuple[int, int]]:
        """(length, flags) of consecutive extents from ``offset``; flags are NBD_STATE_HOLE and NBD_STATE_ZERO, 0 for data. It may end early."""


@runtime_checkable
class PrefetchSource(Protocol):
    """A source that can be told what will be read soon."""

    def cache(self, offset: int, length: int) -> None:
        """Make the range fast to read, or do nothing."""


@dataclass(frozen=True, slots=True)
class Export:
    """A source under a name.

    ``name`` is what clients ask for (UTF-8, at most 4096 bytes; "" is the default export). ``description`` is shown to people. A source without the
    write verbs is read-only in any case. Block sizes are in bytes and advertised: requests that are not multiples of ``minimum_block`` are refused.
    """

    source: BlockSource
    name: str = ""
    description: str = ""
    read_only: bool = False
    minimum_block: int = 1
    preferred_block: int = 4096

    def __post_init__(self) -> None:
        for text in (self.name, self.description):
            if "\0" in text or len(text.encode()) > MAX_STRING:
                raise UsageError(f"an export's name and description are at most {MAX_STRING} bytes without NUL: {text[:100]!r}")
        if not 0 <= self.source.size <= MAX_SIZE:
            raise UsageError(f"export {self.name!r}: {self.source.size} is not a size")
        if not (_is_power_of_two(self.minimum_block) and self.minimum_block <= 1 << 16):
            raise UsageError(f"export {self.name!r}: the minimum block size is a power of two up to 65536, not {self.minimum_block}")
        if not (_is_power_of_two(self.preferred_block) and max(self.minimum_block, 512) <= self.preferred_block <= 1 << 25):
            raise UsageError(f"export {self.name!r}: {self.preferred_block} is not a preferred block size: a power of two, 512 or more")
        if self.source.size % self.minimum_block:
            raise UsageError(f"export {self.name!r}: its size {self.source.size} is not a multiple of the block size {self.minimum_block}")

    @property
    def disk(self) -> WritableSource | None:
        """The source as one that can be written to, None for a read-only export."""
        if self.read_only or not all(callable(getattr(self.source, verb, None)) for verb in _WRITE_VERBS):
            return None
        return cast(WritableSource, self.source)

    @property
    def blocking(self) -> bool:
        """Whether reads and writes may wait for something slow."""
        return bool(getattr(self.source, "blocking", True))

    @property
    def fast_zero(self) -> bool:
        """Whether zeroing is faster than writing zeros."""
        return bool(getattr(self.source, "fast_zero", False))

    @property
    def sendable(self) -> Callable[[int, int], Sequence[Piece] | None] | None:
        """The source's ``sendable``, if it has one."""
        return self.source.sendable if isinstance(self.source, Sendable) else None

    @property
    def prefetch(self) -> Callable[[int, int], None] | None:
        """The source's ``cache``, if it has one."""
        return self.source.cache if isinstance(self.source, PrefetchSource) else None

    def block_status(self, offset: int, length: int) -> Iterable[tuple[int, int]]:
        """The source's extents, or one of data."""
        return self.source.block_status(offset, length) if isinstance(self.source, ExtentSource) else [(length, 0)]

    def transmission_flags(self, *, structured: bool) -> int:
        """What this export tells a client it can do.

        All connections share the one source, whose flush covers every completed write whichever connection it came by (the contract of
        WritableSource), so several connections are right for disks too.
        """
        flags = NBD_FLAG_HAS_FLAGS | NBD_FLAG_CAN_MULTI_CONN
        if self.disk is None:
            flags |= NBD_FLAG_READ_ONLY
        else:
            flags |= NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA | NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES | NBD_FLAG_SEND_FAST_ZERO
        if structured:
            flags |= NBD_FLAG_SEND_DF
        if self.prefetch is not None:
            flags |= NBD_FLAG_SEND_CACHE
        return flags


def export_table(exports: Iterable[Export]) -> dict[str, Export]:
    """The exports by name, in order. Raises UsageError for none and for a name used twice."""
    table: dict[str, Export] = {}
    for export in exports:
        if export.name in table:
            raise UsageError(f"two exports have the name {export.name!r}")
        table[export.name] = export
    if not table:
        raise UsageError("nothing to serve: at least one export is needed")
    return table


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
