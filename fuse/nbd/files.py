"""A local file or block device as a source: reads leave by sendfile, holes are known, disks can be written to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from dsec_layers.blocksource import FileSource, check_range
from dsec_layers.digest import Buffer
from dsec_layers.errors import NotFound
from dsec_layers.fsio import data_ranges, map_os_error, pwrite_all
from dsec_layers.fuse.nbd.exports import Piece
from dsec_layers.fuse.nbd.protocol import NBD_STATE_HOLE, NBD_STATE_ZERO
from dsec_layers.linux.fallocate import punch_hole

__all__ = ["LocalDisk", "LocalFile"]

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)
_ZEROES = bytes(1 << 18)


class LocalFile(FileSource):
    """A regular file or block device to read from, open until ``close``."""

    blocking = False

    def __init__(self, path: Path) -> None:
        self._open_file(path, os.O_RDONLY)

    def _open_file(self, path: Path, flags: int) -> None:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"{path} does not exist") from error
        except OSError as error:
            raise map_os_error(error, str(path)) from error
        self._open = True
        FileSource.__init__(self, fd, name=str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; not while it is served."""
        if self._open:
            self._open = False
            os.close(self._fd)

    def sendable(self, offset: int, length: int) -> list[Piece] | None:
        """See Sendable."""
        return [(self._fd, offset, length)]

    def block_status(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """See ExtentSource. What the file system says of holes; a device or file system that says nothing is all data."""
        end = offset + length
        for data, hole in data_ranges(self._fd, end, offset):
            if data > offset:
                yield data - offset, NBD_STATE_HOLE | NBD_STATE_ZERO
            yield hole - data, 0
            offset = hole
        if offset < end:
            yield end - offset, NBD_STATE_HOLE | NBD_STATE_ZERO

    def cache(self, offset: int, length: int) -> None:
        """See PrefetchSource."""
        os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_WILLNEED)


class LocalDisk(LocalFile):
    """A regular file or block device to read from and write to, open until ``close``."""

    fast_zero = True

    def __init__(self, path: Path) -> None:
        self._open_file(path, os.O_RDWR)

    def pwrite(self, offset: int, data: Buffer) -> None:
        """See WritableSource."""
        check_range(offset, len(data), self.size)
        try:
            pwrite_all(self._fd, data, offset)
        except OSError as error:
            raise map_os_error(error, self._name) from error

    def flush(self) -> None:
        """See WritableSource."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise map_os_error(error, self._name) from error

    def trim(self, offset: int, length: int) -> None:
        """See WritableSource. Gives the space back where the file system can."""
        check_range(offset, length, self.size)
        self._punch(offset, length)

    def write_zeroes(self, offset: int, length: int) -> None:
        """See WritableSource. A hole where the file system can make one, else written zeros."""
        check_range(offset, length, self.size)
        if not self._punch(offset, length):
            for start in range(offset, offset + length, len(_ZEROES)):
                self.pwrite(start, memoryview(_ZEROES)[: offset + length - start])

    def _punch(self, offset: int, length: int) -> bool:
        if length == 0:
            return True
        try:
            punch_hole(self._fd, offset, length)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise map_os_error(error, self._name) from error
        return True
