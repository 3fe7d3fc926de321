"""Reads a directory tree by descriptors: first all attributes, then the content of the files asked for.

No symbolic link is followed and no path is resolved from the outside, so that a tree which changes meanwhile cannot lead the reader out of its root. A file whose
attributes are not the same before, between and after is reported, never taken.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.excludes import Excludes
from dsec_layers.builders.names import Limits, check_xattr, over_limit, shown
from dsec_layers.builders.sources.blocks import BLOCK
from dsec_layers.builders.sources.sparse import Holes
from dsec_layers.digest import Buffer
from dsec_layers.erofs.overlay import is_device_whiteout
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError, LimitError
from dsec_layers.fsio import data_ranges

__all__ = ["Directory", "FileAt", "KeepXattr", "Scan"]

MAX_DEPTH: Final = 512
"""Directories within directories: each level costs a descriptor."""

KeepXattr: TypeAlias = "Callable[[bytes, bool, bytes, bytes], bytes | None]"
"""(path, whether it is a directory, attribute, value) -> the attribute's name in the layer, None to leave it out."""

_Signature: TypeAlias = tuple[int, int, int, int, int]
_OPEN_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FileAt:
    """A regular file that was seen: the first of its paths, its inode, and what must stay as it is while it is read."""

    path: bytes
    inode: Inode
    signature: _Signature


@dataclass(slots=True)
class Scan:
    """What a directory holds: the tree without content, and its regular files, each inode once, directory by directory."""

    tree: Tree = field(default_factory=Tree)
    files: list[FileAt] = field(default_factory=list)


class Directory(AbstractContextManager["Directory"]):
    """An open directory tree. With ``whiteouts`` (an overlayfs upper) each character device 0/0 is an inode of its own, with fixed attributes."""

    def __init__(
        self,
        path: Path,
        keep_xattr: KeepXattr,
        *,
        excludes: Excludes | None = None,
        one_filesystem: bool = False,
        whiteouts: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self._what = str(path)
        self._keep, self._excludes = keep_xattr, excludes or Excludes()
        self._one, self._whiteouts, self._limits = one_filesystem, whiteouts, limits or Limits()
        self._inodes = self._attribute_bytes = 0
        self._holes = Holes(self._limits)
        self._links: dict[tuple[int, int], Inode] = {}
        self.whiteouts = 0
        """Character devices 0/0 that were taken as they are."""
        try:
            root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot open the directory {path}: {error.strerror}") from error
        self._chain: list[tuple[bytes, int]] = [(b"", root)]  # open directories from the root down to the current one

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._chain:
            os.close(self._chain.pop()[1])

    # -- attributes

    def scan(self) -> Scan:
        """All of the tree's attributes. Raises InputError for what cannot be read, LimitError."""
        result = Scan()
        root = self._chain[0][1]
        info = os.fstat(root)
        result.tree.root = self._inode(b"", info, b"/proc/self/fd/%d" % root, follow=True)
        stack = [(b"", result.tree.root, info)]
        device = info.st_dev
        while stack:
            path, directory, info = stack.pop()
            if not self._one or info.st_dev == device:
                stack += reversed(list(self._scan_one(path, directory, info, result.files)))
        return result

    def _scan_one(
        self, path: bytes, directory: Inode, seen: os.stat_result, files: list[FileAt]
    ) -> Iterator[tuple[bytes, Inode, os.stat_result]]:
        """Fill one directory; the directories in it."""
        fd = self._enter(path)
        if not os.path.samestat(os.fstat(fd), seen):
            raise self._changed(path)
        place = b"/proc/self/fd/%d" % fd
        children = directory.children
        assert children is not None
        for name in sorted(self._listed(place, path)):
            below = path + b"/" + name if path else name
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError as error:
                raise self._changed(below) from error
            is_dir = stat.S_ISDIR(info.st_mode)
            if self._excludes.match(below, is_dir=is_dir):
                continue
            linked = self._links.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 and not is_dir else None
            if linked is not None:
                children[name] = linked
                continue
            children[name] = inode = self._inode(below, info, place + b"/" + name, follow=False)
            if is_dir:
                yield below, inode, info
                continue
            if stat.S_ISLNK(info.st_mode):
                inode.data = self._target(name, fd, below)
                inode.size = len(inode.data)
            elif stat.S_ISREG(info.st_mode):
                inode.size = info.st_size
                files.append(FileAt(below, inode, _signature(info)))
            if info.st_nlink > 1 and not (self._whiteouts and is_device_whiteout(info.st_mode, info.st_rdev)):
                self._links[info.st_dev, info.st_ino] = inode

    def _listed(self, place: bytes, path: bytes) -> list[bytes]:
        try:
            return os.listdir(place)  # noqa: PTH208  (names as bytes, whatever the locale)
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _target(self, name: bytes, fd: int, path: bytes) -> bytes:
        try:
            return os.readlink(name, dir_fd=fd)
        except OSError as error:
            raise self._changed(path) from error

    def _inode(self, path: bytes, info: os.stat_result, place: bytes, *, follow: bool) -> Inode:
        self._inodes += 1
        if self._inodes > self._limits.inodes:
            raise over_limit(f"{self._what}: more than {self._limits.inodes} files and directories", "entries")
        if self._whiteouts and is_device_whiteout(info.st_mode, info.st_rdev):
            return Inode(stat.S_IFCHR)  # one spelling, whatever the mode, owner and time that overlayfs gave it
        seconds, nanoseconds = divmod(info.st_mtime_ns, 1_000_000_000)
        inode = Inode(info.st_mode, info.st_uid, info.st_gid, seconds, nanoseconds)
        if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            inode.rdev = info.st_rdev
            self.whiteouts += is_device_whiteout(info.st_mode, info.st_rdev)
        inode.xattrs = self._xattrs(path, place, inode.is_dir, follow)
        return inode

    def _xattrs(self, path: bytes, place: bytes, is_dir: bool, follow: bool) -> tuple[tuple[bytes, bytes], ...]:
        try:
            names = os.listxattr(place, follow_symlinks=follow)
            if not names:
                return ()
            pairs = [(os.fsencode(name), os.getxattr(place, name, follow_symlinks=follow)) for name in names]
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                return ()
            raise self._changed(path) if error.errno in (errno.ENOENT, errno.ENODATA) else self._unreadable(path, error) from error
        kept = []
        for name, value in pairs:
            stored = self._keep(path, is_dir, name, value)
            if stored is not None:
                check_xattr(path, stored, value)
                self._attribute_bytes += len(stored) + len(value)
                kept.append((stored, value))
        if self._attribute_bytes > self._limits.attribute_bytes:
            raise over_limit(
                f"{self._what}: extended attributes are over the limit of {self._limits.attribute_bytes} bytes in all", "attributes"
            )
        return tuple(sorted(kept))

    # -- content

    def feed(self, file: FileAt, sink: ContentSink) -> None:
        """Hand the content of a file to ``sink``. Raises InputError if it is not, or does not stay, what ``scan`` saw."""
        parent, _, name = file.path.rpartition(b"/")
        try:
            fd = os.open(name, _OPEN_FILE, dir_fd=self._enter(parent))
        except FileNotFoundError as error:
            raise self._changed(file.path) from error
        except OSError as error:
            raise self._changed(file.path) if error.errno == errno.ELOOP else self._unreadable(file.path, error) from error
        try:
            info = os.fstat(fd)
            if _signature(info) != file.signature:
                raise self._changed(file.path)
            self._feed(fd, info, file, sink)
            if _signature(os.fstat(fd)) != file.signature:
                raise self._changed(file.path)
        except OSError as error:
            raise self._unreadable(file.path, error) from error
        finally:
            os.close(fd)

    def _feed(self, fd: int, info: os.stat_result, file: FileAt, sink: ContentSink) -> None:
        size = info.st_size
        ranges = [(0, size)] if info.st_blocks * 512 >= size else list(data_ranges(fd, size))
        if size <= BLOCK and ranges in ([(0, size)], []) and (ranges or not size):
            data = os.pread(fd, size + 1, 0)
            if len(data) != size:
                raise self._changed(file.path)
            sink.whole(file.inode, data)
            return
        self._holes.add(self._what, file.path, size, size - sum(end - start for start, end in ranges))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        sink.stream(file.inode, size, self._pieces(fd, size, ranges, file.path))

    def _pieces(self, fd: int, size: int, ranges: Iterable[tuple[int, int]], path: bytes) -> Iterator[Buffer | int]:
        at = 0
        for start, end in ranges:
            if start > at:
                yield start - at
            at = start
            while at < end:
                data = os.pread(fd, min(BLOCK, end - at), at)
                if not data:
                    raise self._changed(path)
                at += len(data)
                yield data
        if size > at:
            yield size - at

    # -- places

    def _enter(self, path: bytes) -> int:
        """A descriptor of the directory at ``path``, reached from the root one name at a time."""
        parts = path.split(b"/") if path else []
        if len(parts) > MAX_DEPTH:
            raise LimitError(f"{self._what}: {shown(path)} is more than {MAX_DEPTH} directories deep")
        chain = self._chain
        common = 1
        while common < len(chain) and common <= len(parts) and chain[common][0] == parts[common - 1]:
            common += 1
        while len(chain) > common:
            os.close(chain.pop()[1])
        for part in parts[common - 1 :]:
            try:
                fd = os.open(part, _OPEN_DIR, dir_fd=chain[-1][1])
            except OSError as error:
                gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
                raise self._changed(path) if gone else self._unreadable(path, error) from error
            chain.append((part, fd))
        return chain[-1][1]

    def _changed(self, path: bytes) -> InputError:
        return InputError(f"{self._what}: {shown(path)} changed while it was read")

    def _unreadable(self, path: bytes, error: OSError) -> InputError:
        hint = "run as root, or exclude it" if error.errno in (errno.EACCES, errno.EPERM) else None
        return InputError(f"{self._what}: cannot read {shown(path)}: {error.strerror}", hint=hint)


def _signature(info: os.stat_result) -> _Signature:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
