"""A writable disk: a local directory with uppers on top of a sealed disk in a store.

::

    DISK/
      disk.json        the state below; replaced atomically, and the only truth
      NNNNNN.data      an upper's data, one pair a generation: all but the last are frozen
      NNNNNN.index     its index
      config.v1.json   the same stack as overlaybd's own tools know it (made by ``disk convert --format overlaybd`` and at every change)
      lock             held (flock) while somebody has the disk open for writing

**Generations.** A snapshot begins a new pair. The state names the new pair before anything is written to it, while the old one still takes writes: a crash in between leaves a
disk whose last pair is empty, and nothing that was flushed is lost either way.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dsec_layers.digest import Digest, is_digest
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.errors import Conflict, ImageError, NotFound, UsageError
from dsec_layers.fsio import fsync_directory, map_os_error, write_atomic
from dsec_layers.overlaybd import Disk, LsmtLayer, Upper

__all__ = ["DiskState", "LocalDisk", "OpenParent", "Parent", "create_local", "read_state"]

STATE: Final = "disk.json"
SECTOR: Final = 512
MAX_GENERATIONS: Final = 200


@dataclass(frozen=True, slots=True)
class Parent:
    """The sealed disk below: the store's URL and the manifest's digest."""

    store: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class DiskState:
    """What disk.json says: size in bytes, the sealed disk below (None: nothing), frozen generations from bottom to top, and the one that takes writes."""

    virtual_size: int
    parent: Parent | None = None
    frozen: tuple[int, ...] = ()
    upper: int = 1

    def to_json(self) -> bytes:
        """The file's bytes."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()


OpenParent = Callable[[Parent], StoredDisk]
"""Opens the sealed disk below for lazy reading."""


def read_state(path: Path) -> DiskState:
    """The state of the disk in directory ``path``. Raises NotFound or ImageError."""
    try:
        data = (path / STATE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{path} is no disk: it has no {STATE}", hint="make one with dsec-layers disk create") from error
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    try:
        value: dict[str, Any] = json.loads(data)
        parent = value["parent"]
        state = DiskState(value["virtual_size"], Parent(**parent) if parent is not None else None, tuple(value["frozen"]), value["upper"])
        known = value["format"] == 1
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ImageError(f"{path / STATE} is damaged") from error
    numbers = (state.virtual_size, *state.frozen, state.upper)
    proper = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    if not known or not proper or (state.parent and not is_digest(state.parent.digest)):
        raise ImageError(f"{path / STATE} is damaged, or of another version")
    return state


def create_local(path: Path, virtual_size: int, parent: Parent | None = None) -> DiskState:
    """Make a new disk in the new directory ``path``. UsageError for an improper size, Conflict if the directory is there."""
    if virtual_size <= 0 or virtual_size % SECTOR:
        raise UsageError(f"a disk has a whole number of {SECTOR}-byte sectors, not {virtual_size} bytes")
    state = DiskState(virtual_size, parent)
    work = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists():
            raise Conflict(f"{path} exists already", hint="choose another place, or remove it")
        work.mkdir(mode=0o700, parents=True)
        _new_pair(work, state.upper, virtual_size).close()
        write_atomic(work / STATE, state.to_json(), mode=0o600)
        work.rename(path)
        fsync_directory(path.absolute().parent)
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    return state


class LocalDisk:
    """An open writable disk. ``disk`` is what an NBD export serves; ``recovered`` says what a crash tore off, or is empty. Use as a context.

    Raises Conflict if somebody else has it open.
    """

    def __init__(self, path: Path, open_parent: OpenParent) -> None:
        self.path = path
        self.state = read_state(path)
        with ExitStack() as stack:
            stack.callback(os.close, _lock(path))
            self.below = self._open_below(stack, open_parent)
            self._pair = _open_pair(path, self.state.upper)
            stack.callback(lambda: self._pair.close())
            self.recovered = self._pair.upper.recovery.reason
            self.frozen: list[LsmtLayer] = list(self._frozen)
            self.disk = Disk([*self.below, *self.frozen], self._pair.upper)
            self._cleanup = stack.pop_all()

    def _open_below(self, stack: ExitStack, open_parent: OpenParent) -> list[LsmtLayer]:
        self._frozen: list[LsmtLayer] = []
        for number in self.state.frozen:
            pair = _open_pair(self.path, number)
            stack.callback(pair.close)
            self._frozen.append(pair.upper.freeze())
        if self.state.parent is None:
            return []
        stored = open_parent(self.state.parent)
        stack.callback(stored.close)
        return stored.layers

    def snapshot(self) -> LsmtLayer:
        """Freeze the upper, durable as of now, and go on with a new one; returns the frozen one as a layer. Reads and writes go on meanwhile."""
        if len(self.state.frozen) >= MAX_GENERATIONS:
            raise Conflict(f"{self.path} has {len(self.state.frozen)} frozen generations", hint="commit them into one layer")
        before = self.state
        number = before.upper + 1
        with ExitStack() as undo:
            fresh = _new_pair(self.path, number, before.virtual_size)
            undo.callback(_remove_pair, self.path, number)
            undo.callback(fresh.close)
            after = replace(before, frozen=(*before.frozen, before.upper), upper=number)
            self._write(after)
            undo.callback(self._write, before)
            layer = self.disk.snapshot(fresh.upper)
            undo.pop_all()
        old, self._pair = self._pair, fresh
        self._cleanup.callback(old.close)
        self.frozen.append(layer)
        return layer

    def rebase(self, parent: Parent) -> None:
        """Say that all frozen generations are part of the sealed disk ``parent`` now, and forget them. The running disk goes on reading the old files."""
        gone = self.state.frozen
        self._write(replace(self.state, parent=parent, frozen=()))
        for number in gone:
            _remove_pair(self.path, number)

    def close(self) -> None:
        """Flush and close everything."""
        try:
            self.disk.flush()
        finally:
            self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, state: DiskState) -> None:
        write_atomic(self.path / STATE, state.to_json(), mode=0o600)
        self.state = state


def resize_local(path: Path, virtual_size: int) -> DiskState:
    """Give a disk that nobody has open a larger size. UsageError for a smaller one: what lies beyond it would come back at the next growth."""
    if virtual_size % SECTOR:
        raise UsageError(f"a disk has a whole number of {SECTOR}-byte sectors, not {virtual_size} bytes")
    lock = _lock(path)
    try:
        state = read_state(path)
        if virtual_size < state.virtual_size:
            raise UsageError(f"{path} has {state.virtual_size} bytes and cannot shrink to {virtual_size}")
        number = state.upper + 1
        _new_pair(path, number, virtual_size).close()
        after = replace(state, virtual_size=virtual_size, frozen=(*state.frozen, state.upper), upper=number)
        write_atomic(path / STATE, after.to_json(), mode=0o600)
        return after
    finally:
        os.close(lock)


class _Pair:
    """The two open files of an upper."""

    def __init__(self, upper: Upper, fds: tuple[int, int]) -> None:
        self.upper = upper
        self._fds = fds

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _names(number: int) -> tuple[str, str]:
    return f"{number:06}.data", f"{number:06}.index"


def _new_pair(path: Path, number: int, virtual_size: int) -> _Pair:
    # What a killed snapshot left under this number was never part of the disk.
    _remove_pair(path, number)
    data, index = (os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) for name in _names(number))
    pair = _Pair(Upper.create(data, index, virtual_size), (data, index))
    fsync_directory(path)
    return pair


def _open_pair(path: Path, number: int) -> _Pair:
    try:
        data, index = (os.open(path / name, os.O_RDWR | os.O_CLOEXEC) for name in _names(number))
    except FileNotFoundError as error:
        raise ImageError(f"{path}: generation {number} has lost a file: {error.filename}") from error
    try:
        return _Pair(Upper.open(data, index), (data, index))
    except BaseException:
        os.close(data)
        os.close(index)
        raise


def _remove_pair(path: Path, number: int) -> None:
    for name in _names(number):
        (path / name).unlink(missing_ok=True)


def _lock(path: Path) -> int:
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Conflict(f"the disk {path} is open already", hint="it is attached; detach it, or ask it for a snapshot") from error
    return fd
