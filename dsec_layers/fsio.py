"""Small file operations with the crash rules of this project: publish by temporary name, fsync, rename."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from dsec_layers.digest import Buffer
from dsec_layers.errors import Conflict, DsecError, NoSpace, StoreError

__all__ = [
    "data_ranges",
    "fsync_directory",
    "map_os_error",
    "pread_exact",
    "publish",
    "publish_directory",
    "publish_new",
    "pwrite_all",
    "write_atomic",
]

_AT_FDCWD: Final = -100  # linux/fcntl.h
_RENAME_NOREPLACE: Final = 1  # linux/fs.h
_renameat2 = ctypes.CDLL(None, use_errno=True).renameat2


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


def data_ranges(fd: int, end: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """The (start, end) of the ranges in ``[start, end)`` that hold data, in order, as far as the file system knows: between them are holes.

    What a file system or device does not tell is data. Ranges beyond the end of the file are not given.
    """
    while start < end:
        try:
            first = os.lseek(fd, start, os.SEEK_DATA)
            stop = os.lseek(fd, first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # which means nothing but a hole up to the end
                yield start, end
            return
        if first >= end:
            return
        start = min(stop, end)
        yield first, start


@contextmanager
def publish(path: Path, *, mode: int = 0o644, replace: bool = True) -> Iterator[BinaryIO]:
    """A file that appears under ``path`` whole and durable when the context ends well, and not at all otherwise.

    The temporary name is in the same directory, starts with a dot and carries the process id. Without ``replace``: Conflict if ``path`` is there by then.
    """
    temporary = _temporary(path)
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode), "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if replace:
            temporary.rename(path)
        else:
            _rename_new(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


@contextmanager
def publish_new(path: Path) -> Iterator[Path]:
    """A name under which a program makes a file or directory, which appears under ``path`` whole and durable when the context ends well.

    When it does not, what was made is removed. Raises Conflict if ``path`` is there, be it since a moment ago; then that is left alone.
    """
    if os.path.lexists(path):
        raise _taken(path)
    temporary = _temporary(path)
    try:
        yield temporary
        _fsync_tree(temporary)
        _rename_new(temporary, path)
    except BaseException:
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


@contextmanager
def publish_directory(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """An empty directory to fill: as ``publish_new``. Missing parents are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish_new(path) as work:
        work.mkdir(mode)
        yield work


def _temporary(path: Path) -> Path:
    name = os.fsdecode(os.fsencode(path.name)[:200])  # so that the whole fits into NAME_MAX
    return path.with_name(f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _taken(path: Path) -> Conflict:
    return Conflict(f"{path} exists already", hint="choose another name, or remove it")


def _rename_new(source: Path, target: Path) -> None:
    """Rename to a name that must be free. Raises Conflict if it is not."""
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        raise _taken(target)
    if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), os.fspath(target))
    # A file system that cannot say it in one step (NFS, some FUSE): of two publishers at the same moment the last one wins, but for directories with content.
    if os.path.lexists(target):
        raise _taken(target)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise _taken(target) from error
        raise


def _fsync_tree(path: Path) -> None:
    """Make a file, or a directory with all that is in it, durable: names after what they name. Links and special files have nothing but their name."""
    if path.is_symlink():
        return
    if path.is_dir():
        with os.scandir(path) as entries:
            inside = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)]
        for entry in inside:
            _fsync_tree(entry)
        fsync_directory(path)
        return
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: Buffer, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``, whole and durable."""
    with publish(path, mode=mode) as stream:
        stream.write(data)


def map_os_error(error: OSError, what: str) -> DsecError:
    """The package's error for a failed file operation on ``what``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{what}: no space left on the device", hint="free space there or point --store/--cache elsewhere")
    return StoreError(f"{what}: {error.strerror or error}")
