"""A model of what a power failure leaves of a disk's directory: every call that changes it is recorded in order, and held against the rules.

The rules: data before the index entries that name it, a generation before the state that names it, the state before anything is written to a generation or removed
that the state before named; a file before its name, a name before the work is done. The journal is left out: it is for the death of the process only.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from dsec_layers import fsio
from dsec_layers.disks.state import STATE, DiskState, parse_state
from dsec_layers.overlaybd.lsmt import SPACE

__all__ = ["Durability"]

_Inode = tuple[int, int]
_JOURNAL: Final = ".journal"


class Durability:
    """Records and judges all calls of this process until the monkeypatch is undone. No sync reaches the disk; ``faults`` are the rules that were broken.

    ``drop``: whether to leave out a sync, given its number and the name of what it is of: the model must notice.
    """

    def __init__(self, patch: pytest.MonkeyPatch, drop: Callable[[int, str], bool] = lambda number, name: False) -> None:
        self.faults: list[str] = []
        self.syncs: list[str] = []
        self._drop = drop
        self._dirty: dict[_Inode, str] = {}  # content that is not durable
        self._names: dict[_Inode, set[str]] = defaultdict(set)  # by directory: names that are not durable
        self._sizes: dict[_Inode, int] = {}  # at the last sync: what streams write is seen by this
        self._open, self._pwrite, self._rename, self._unlink, self._truncate = os.open, os.pwrite, os.rename, os.unlink, os.ftruncate
        for name in ("open", "pwrite", "ftruncate", "rename", "unlink"):
            patch.setattr(os, name, getattr(self, name))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self.sync)
        patch.setattr(fsio, "_renameat2", self._renameat2)

    def rest(self, when: str) -> None:
        """What was asked for is done: all of it must be durable."""
        self.faults += [f"{when}: {name} is not durable" for name in self._dirty.values() if not name.endswith(_JOURNAL)]
        self.faults += [f"{when}: the name {name} is not durable" for names in self._names.values() for name in names]

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """See os.open."""
        new = bool(flags & os.O_CREAT) and dir_fd is None and not os.path.lexists(path)
        fd = self._open(path, flags, mode, dir_fd=dir_fd)
        if new and Path(path).name != "lock":
            self._dirty[_inode(fd)] = Path(path).name
            self._names[_inode(Path(path).parent)].add(Path(path).name)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        """See os.pwrite."""
        path = _path(fd)
        if offset >= SPACE and path.suffix in (".data", ".index"):
            if path.suffix == ".index" and self._is_dirty(path.with_suffix(".data")):
                self.faults.append(f"{path.name} names data that is not durable")
            state = self._state(path.parent)
            if state is None or int(path.stem) not in (*state.frozen, state.upper):
                self.faults.append(f"{path.name} is written to before the state that names it is durable")
        self._dirty[_inode(fd)] = path.name
        return self._pwrite(fd, data, offset)

    def ftruncate(self, fd: int, length: int) -> None:
        """See os.ftruncate."""
        if os.fstat(fd).st_size != length:
            self._dirty[_inode(fd)] = _path(fd).name
        self._truncate(fd, length)

    def sync(self, fd: int) -> None:
        """See os.fsync and os.fdatasync."""
        name = _path(fd).name
        self.syncs.append(name)
        if self._drop(len(self.syncs) - 1, name):
            return
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._names.pop(_inode(fd), None)
        else:
            self._dirty.pop(_inode(fd), None)
            self._sizes[_inode(fd)] = os.fstat(fd).st_size

    def rename(self, source: Any, target: Any) -> None:
        """See os.rename."""
        source, target = Path(source), Path(target)
        if source.is_dir():
            self.faults += [f"the name {name} is not durable in {target.name}" for name in self._names[_inode(source)]]
            self.faults += [f"{path.name} is not durable in {target.name}" for path in source.iterdir() if self._is_dirty(path)]
        elif self._is_dirty(source) or self._sizes.get(_inode(source)) != source.stat().st_size:
            self.faults.append(f"{target.name} gets content that is not durable")
        if target.name == STATE:
            self._check_state(parse_state(source.read_bytes()), target.parent)
        names = self._names[_inode(source.parent)]
        names.discard(source.name)
        self._rename(source, target)
        self._names[_inode(target.parent)].add(target.name)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """See os.unlink. Names need not be gone for good."""
        path = Path(path)
        state = self._state(path.parent) if path.stem.isdigit() and path.exists() else None
        if state is not None and int(path.stem) in (*state.frozen, state.upper):
            self.faults.append(f"{path.name} is removed and the state names it")
        elif path.stem.isdigit() and path.exists() and state is None and (path.parent / STATE).exists():
            self.faults.append(f"{path.name} is removed before the state is durable")
        if path.exists():
            self._dirty.pop(_inode(path), None)
        self._names[_inode(path.parent)].discard(path.name)
        self._unlink(path, dir_fd=dir_fd)

    def _renameat2(self, source_dir: int, source: bytes, target_dir: int, target: bytes, flags: int) -> int:
        assert not os.path.lexists(target)
        self.rename(os.fsdecode(source), os.fsdecode(target))
        return 0

    def _check_state(self, state: DiskState, folder: Path) -> None:
        for suffix in (".data", ".index"):
            path = folder / f"{state.upper:06}{suffix}"
            if path.name in self._names[_inode(folder)] or (self._is_dirty(path) and path.stat().st_size <= SPACE):
                self.faults.append(f"the state names {path.name}, which is not durable")

    def _state(self, folder: Path) -> DiskState | None:
        """The state of a disk, if it is durable."""
        if STATE in self._names[_inode(folder)] or not (folder / STATE).exists():
            return None
        return parse_state((folder / STATE).read_bytes())

    def _is_dirty(self, path: Path) -> bool:
        return _inode(path) in self._dirty and path.suffix != _JOURNAL


def _inode(path: Path | int) -> _Inode:
    status = os.stat(path)  # noqa: PTH116 - descriptors too
    return status.st_dev, status.st_ino


def _path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()
