"""fallocate(2) with flags, which Python's os module lacks."""

from __future__ import annotations

import ctypes
import os

__all__ = ["punch_hole", "reserve"]

_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 1  # linux/falloc.h
_PUNCH_HOLE = 2


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give a range of a file back to the file system; it reads as zeros, the size stays. Raises OSError where that is not supported."""
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def reserve(fd: int, offset: int, length: int) -> None:
    """Set space aside for a range of a file, beyond its end too; content and size stay. Raises OSError where that is not supported."""
    _fallocate(fd, _KEEP_SIZE, offset, length)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
