"""Random-access bytes as the disk formats and the block front ends see them: a size and ``pread``, and for disks one can write to, four verbs more.

Formats are built by stacking sources (a file, a slice of it, a ZFile in the slice, a disk over many); front ends (NBD, FUSE) only translate.
All methods may be called from any thread.
"""

from __future__ import annotations

import os
from typing import Protocol, SupportsIndex

from dsec_layers.digest import Buffer
from dsec_layers.errors import CorruptError, UsageError
from dsec_layers.fsio import map_os_error, pread_exact

__all__ = ["BlockSource", "BytesSource", "FileSource", "MemoryDisk", "SliceSource", "WritableSource", "check_range"]


class BlockSource(Protocol):
    """Immutable or mutable bytes with a fixed size."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``. Raises a DsecError when they cannot be had, UsageError when the range leaves the source."""


class WritableSource(BlockSource, Protocol):
    """A disk: what the last completed write put there is what ``pread`` returns; what was there before ``flush`` began is durable when it returns."""

    def pwrite(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``; not durable before the next flush."""

    def flush(self) -> None:
        """Make every completed write durable. After an error nothing that was written since the last good flush is promised."""

    def trim(self, offset: int, length: int) -> None:
        """The content of the range is of no more interest; it reads as before or as zeros."""

    def write_zeroes(self, offset: int, length: int) -> None:
        """Write zeros, without storing them where that can be avoided."""


def check_range(offset: int, length: int, size: int) -> None:
    """Raise UsageError unless ``[offset, offset + length)`` lies in ``[0, size)``."""
    if offset < 0 or length < 0 or offset + length > size:
        raise UsageError(f"{length} bytes at {offset} are not within the {size} bytes of the source")


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        self.size = len(self._data)

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource."""
        check_range(offset, length, self.size)
        return bytes(self._data[offset : offset + length])


class MemoryDisk:
    """A writable disk in memory, zero at first: the plain model that tests compare other disks with."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._data = bytearray(size)

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource."""
        check_range(offset, length, self.size)
        return bytes(self._data[offset : offset + length])

    def pwrite(self, offset: int, data: Buffer) -> None:
        """See WritableSource."""
        check_range(offset, len(data), self.size)
        self._data[offset : offset + len(data)] = data

    def flush(self) -> None:
        """See WritableSource."""

    def trim(self, offset: int, length: int) -> None:
        """See WritableSource."""
        self.write_zeroes(offset, length)

    def write_zeroes(self, offset: int, length: int) -> None:
        """See WritableSource."""
        check_range(offset, length, self.size)
        self._data[offset : offset + length] = bytes(length)


class FileSource:
    """A file or block device behind a descriptor, which stays the caller's to close. Its size is taken once, unless given."""

    def __init__(self, fd: int, size: int | None = None, *, name: str = "file") -> None:
        self._fd = fd
        self._name = name
        if size is None:
            try:
                size = os.lseek(fd, 0, os.SEEK_END)
            except OSError as error:
                raise map_os_error(error, name) from error
        self.size = size

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource. A file that has become shorter raises CorruptError."""
        check_range(offset, length, self.size)
        try:
            return pread_exact(self._fd, length, offset)
        except EOFError as error:
            raise CorruptError(f"{self._name} has become shorter: {error}") from error
        except OSError as error:
            raise map_os_error(error, self._name) from error

    def sendable(self, offset: int, length: int) -> list[tuple[SupportsIndex, int, int]] | None:
        """(descriptor, offset, length) of the places where a range lies in files; here the range itself."""
        return [(self._fd, offset, length)]


class SliceSource:
    """A range of another source, seen as a source of its own."""

    def __init__(self, source: BlockSource, offset: int, size: int) -> None:
        check_range(offset, size, source.size)
        self._source = source
        self._offset = offset
        self.size = size

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource."""
        check_range(offset, length, self.size)
        return self._source.pread(self._offset + offset, length)

    def sendable(self, offset: int, length: int) -> list[tuple[SupportsIndex, int, int]] | None:
        """See FileSource; None where the other source cannot say."""
        sendable = getattr(self._source, "sendable", None)
        return sendable(self._offset + offset, length) if sendable is not None else None
