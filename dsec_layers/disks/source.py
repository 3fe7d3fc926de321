"""A disk as NBD serves it: what OverlayBD's disk does not know of front ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsec_layers.fuse.nbd.protocol import NBD_STATE_HOLE, NBD_STATE_ZERO
from dsec_layers.overlaybd import Disk

__all__ = ["MINIMUM_BLOCK", "ReadOnlySource", "WritableDiskSource"]

MINIMUM_BLOCK: Final = 512
"""Clients write whole sectors: a write never has to read what lies below, so it never waits for a store."""

_STATES: Final = {"data": 0, "zero": NBD_STATE_HOLE | NBD_STATE_ZERO, "hole": NBD_STATE_HOLE | NBD_STATE_ZERO}
_PREFETCH: Final = 1 << 20


class ReadOnlySource:
    """A disk to read from. Reads of what has to be fetched or unpacked go to the connection's workers."""

    blocking = False

    def __init__(self, disk: Disk) -> None:
        self.size = disk.size
        self.pread = disk.pread
        self.sendable = disk.sendable
        self._disk = disk

    def block_status(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """See fuse.nbd.ExtentSource."""
        return ((extent.length, _STATES[extent.kind]) for extent in self._disk.extents(offset, length))

    def cache(self, offset: int, length: int) -> None:
        """See fuse.nbd.PrefetchSource: reads the range, so that its pieces are here."""
        for at in range(offset, offset + length, _PREFETCH):
            self._disk.pread(at, min(_PREFETCH, offset + length - at))


class WritableDiskSource(ReadOnlySource):
    """A disk to read from and write to."""

    fast_zero = True

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self.pwrite = disk.pwrite
        self.flush = disk.flush
        self.trim = disk.trim
        self.write_zeroes = disk.write_zeroes
