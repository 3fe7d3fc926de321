"""Reading and writing cache files past the page cache (O_DIRECT).

Why past it: the size of a file that is extended by one direct write changes once, when all of it is on the disk, never half way; errors of the disk come back to the
writer at once; the pages are not cached a second time beneath the file system image that reads them (docs/adr/0021).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading

from dsec_layers.digest import Buffer
from dsec_layers.fsio import pread_exact, pwrite_all

__all__ = ["aligned_buffer", "read_whole", "write_whole"]

_KEPT = 2 << 20
_ALIGNMENT = 4096


class _Local(threading.local):
    buffer: memoryview | None = None


_local = _Local()


def aligned_buffer(size: int) -> memoryview:
    """A page-aligned buffer of at least ``size`` bytes. It is this thread's own: whoever asks again in the same thread may get the same memory."""
    buffer = _local.buffer
    if buffer is not None and len(buffer) >= size:
        return buffer
    buffer = memoryview(mmap.mmap(-1, max(size, _KEPT)))
    if size <= _KEPT:
        _local.buffer = buffer
    return buffer


def write_whole(fd: int, data: Buffer) -> None:
    """Write ``data`` as the content of a file from offset 0; a part of an ``aligned_buffer`` without copying it.

    Raises OSError; the file may then hold a part of it.
    """
    size = len(data)
    if size % _ALIGNMENT == 0 and _set_direct(fd, True):
        try:
            pwrite_all(fd, _as_aligned(data), 0)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system or the disk wants another alignment
                raise
        finally:
            _set_direct(fd, False)
    pwrite_all(fd, data, 0)


def read_whole(fd: int, size: int) -> bytes:
    """The first ``size`` bytes of a file. Raises EOFError if it is shorter, OSError."""
    if size % _ALIGNMENT == 0 and _set_direct(fd, True):
        try:
            view = aligned_buffer(size)[:size]
            if os.preadv(fd, [view], 0) == size:
                return bytes(view)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            _set_direct(fd, False)
    return pread_exact(fd, size, 0)


def _as_aligned(data: Buffer) -> memoryview:
    """``data`` itself if it begins at a page, as a part of an aligned buffer does, else a copy that does."""
    if isinstance(data, memoryview) and isinstance(data.obj, mmap.mmap):
        return data
    view = aligned_buffer(len(data))[: len(data)]
    view[:] = data
    return view


def _set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT; False where the file system has no direct I/O."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
