"""Small file operations with the crash rules of this project: publish by temporary name, fsync, rename."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dsec_layers.digest import Buffer
from dsec_layers.errors import DsecError, NoSpace, StoreError

__all__ = ["fsync_directory", "map_os_error", "pread_exact", "publish", "pwrite_all", "write_atomic"]


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable. A file system that cannot (FUSE without fsyncdir) is trusted to be synchronous."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def pread_exact(fd: int, length: int, offset: int) -> bytes:
    """Read exactly ``length`` bytes, or raise EOFError: a short file is corruption here, never an end."""
    data = os.pread(fd, length, offset)
    if len(data) == length:
        return data
    parts = [data]
    got = len(data)
    while got < length and parts[-1]:
        parts.append(os.pread(fd, length - got, offset + got))
        got += len(parts[-1])
    if got != length:
        raise EOFError(f"wanted {length} bytes at {offset}, file has {got}")
    return b"".join(parts)


def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


@contextmanager
def publish(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file that appears under ``path`` whole and durable when the context ends well, and not at all otherwise.

    The temporary name is in the same directory, starts with a dot and carries the process id.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode), "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_atomic(path: Path, data: Buffer, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``, whole and durable."""
    with publish(path, mode=mode) as stream:
        stream.write(data)


def map_os_error(error: OSError, what: str) -> DsecError:
    """The package's error for a failed file operation on ``what``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{what}: no space left on the device", hint="free space there or point --store/--cache elsewhere")
    return StoreError(f"{what}: {error.strerror or error}")
