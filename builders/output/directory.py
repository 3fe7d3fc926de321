"""Writes the tree of a source into a directory, for steps that are to run on it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.names import shown
from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError, LimitError
from dsec_layers.fsio import map_os_error, pwrite_all
from dsec_layers.progress import SILENT, Progress

__all__ = ["materialize"]

MAX_DEPTH: Final = 512
"""Directories within directories: each level costs a descriptor."""

_OPEN_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def materialize(ingest: Callable[[ContentSink, Progress], Tree], target: Path, progress: Progress = SILENT) -> Tree:
    """Read an input and write it into the empty directory ``target``, with owners, modes, times, attributes, hard links and holes; returns its tree.

    Needs root. ``target`` becomes the root, attributes included. Files wait beside it (``.NAME.files``) until the whole tree is known. Raises what the input
    raises, NoSpace or StoreError for the disk.
    """
    waiting = target.with_name(f".{target.name}.files")
    try:
        waiting.mkdir(mode=0o700)
        sink = _Files(waiting)
        tree = ingest(sink, progress)
        _Writer(sink, tree).write(tree, target)
        for left in waiting.iterdir():  # content of files that did not survive
            left.unlink()
        waiting.rmdir()
    except OSError as error:
        raise map_os_error(error, f"writing {target}") from error
    return tree


class _Files:
    """A content sink: each file's content under a number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.numbers: dict[Inode, int] = {}

    def whole(self, inode: Inode, data: Buffer) -> None:
        self.stream(inode, len(data), [data])

    def stream(self, inode: Inode, size: int, pieces: Iterable[Buffer | int]) -> None:
        number = self.numbers[inode] = len(self.numbers)
        fd = os.open(self.directory / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            for piece in pieces:
                if isinstance(piece, int):
                    at += piece
                else:
                    pwrite_all(fd, piece, at)
                    at += len(piece)
            if at != size:
                raise InputError(f"a file of {size} bytes gave {at}")
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        inode.size = size


class _Writer:
    """Puts inodes in place, each relative to the descriptor of its directory: no path of the input is ever resolved."""

    def __init__(self, files: _Files, tree: Tree) -> None:
        self._files = files
        self._several = _with_several_names(tree)
        self._placed: dict[Inode, str] = {}
        self._links = os.open(files.directory, _OPEN_DIR)

    def write(self, tree: Tree, target: Path) -> None:
        chain = [(tree.root, os.open(target, _OPEN_DIR), iter(sorted((tree.root.children or {}).items())))]
        try:
            while chain:
                inode, fd, children = chain[-1]
                name, child = next(children, (b"", None))
                if child is None:
                    # A directory's time is set when nothing more is put into it.
                    _attributes(inode, b"/proc/self/fd/%d" % fd, follow=True)
                    os.close(chain.pop()[1])
                elif child.children is None:
                    self._place(child, name, fd)
                else:
                    if len(chain) > MAX_DEPTH:
                        raise LimitError(f"{shown(name)} is more than {MAX_DEPTH} directories deep")
                    os.mkdir(name, 0o700, dir_fd=fd)
                    chain.append((child, os.open(name, _OPEN_DIR, dir_fd=fd), iter(sorted(child.children.items()))))
        finally:
            for _, fd, _ in chain:
                os.close(fd)
            os.close(self._links)

    def _place(self, inode: Inode, name: bytes, fd: int) -> None:
        kept = self._placed.get(inode)
        if kept is not None:
            os.link(kept, name, src_dir_fd=self._links, dst_dir_fd=fd, follow_symlinks=False)
            return
        kind = stat.S_IFMT(inode.mode)
        if kind == stat.S_IFREG:
            os.rename(str(self._files.numbers[inode]), name, src_dir_fd=self._links, dst_dir_fd=fd)
        elif kind == stat.S_IFLNK:
            os.symlink(inode.data or b"", name, dir_fd=fd)
        else:
            os.mknod(name, kind | 0o600, inode.rdev, dir_fd=fd)
        _attributes(inode, b"/proc/self/fd/%d/%s" % (fd, name), follow=False)
        if inode in self._several:
            # Its other names come from a link beside the waiting files: the tree's own may be anywhere.
            self._placed[inode] = f"link-{len(self._placed)}"
            os.link(name, self._placed[inode], src_dir_fd=fd, dst_dir_fd=self._links, follow_symlinks=False)


def _with_several_names(tree: Tree) -> set[Inode]:
    seen: set[Inode] = set()
    several: set[Inode] = set()
    stack = [tree.root]
    while stack:
        for child in (stack.pop().children or {}).values():
            if child.children is not None:
                stack.append(child)
            elif child in seen:
                several.add(child)
            else:
                seen.add(child)
    return several


def _attributes(inode: Inode, path: bytes, *, follow: bool) -> None:
    os.chown(path, inode.uid, inode.gid, follow_symlinks=follow)
    for name, value in inode.xattrs:
        os.setxattr(path, name, value, follow_symlinks=follow)
    if not stat.S_ISLNK(inode.mode):
        # After the owner: changing that takes set-user-id bits away.
        os.chmod(path, stat.S_IMODE(inode.mode))  # noqa: PTH101 - bytes
    time = inode.mtime * 1_000_000_000 + inode.mtime_ns
    os.utime(path, ns=(time, time), follow_symlinks=follow)
