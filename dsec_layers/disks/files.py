"""The directory of a writable disk: its state, its generations, its lock.

::

    DISK/
      disk.json        the state (state.py); replaced atomically, and the only truth
      NNNNNN.data      an upper's data, one pair a generation: all but the last are frozen
      NNNNNN.index     its index
      NNNNNN.journal   what a server acknowledged but did not flush, for the case that it is killed
      lock             held (flock) while somebody may change any of this
      control, nbd.sock, attach.log    of a server (attach.py)

**Generations.** A new pair is made whole and durable before the state names it, and the state names it before anything is written to it, while the old one still
takes writes. So a crash at any point leaves the old state, and perhaps two files that nobody names; or the new state, with an empty last pair. Nothing that was
flushed is lost either way.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

from dsec_layers.blocksource import FileSource
from dsec_layers.disks.state import MAX_GENERATIONS, SECTOR, STATE, DiskState, Parent, read_state
from dsec_layers.errors import Conflict, DsecError, ImageCode, ImageError, LimitError, UsageError
from dsec_layers.fsio import fsync_directory, map_os_error, publish_directory, write_atomic
from dsec_layers.overlaybd import LsmtLayer, Upper, open_upper_pair
from dsec_layers.overlaybd.lsmt import MAX_LBA

__all__ = ["DiskFiles", "Fill", "Generation", "GenerationReader", "check_size", "create_files"]

_LOCK: Final = "lock"


class Generation:
    """An open pair of files. ``upper`` writes to it."""

    def __init__(self, number: int, upper: Upper, fds: Sequence[int]) -> None:
        self.number = number
        self.upper = upper
        self._fds = fds

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written to it."""
        return not self.upper.mapped(0, MAX_LBA, 1)

    def close(self) -> None:
        """Close the files. What was not flushed is lost."""
        for fd in self._fds:
            os.close(fd)


class GenerationReader:
    """Frozen generations as layers, for reading beside the process that has the disk open. Use as a context."""

    def __init__(self, path: Path, numbers: tuple[int, ...]) -> None:
        self.layers: list[LsmtLayer] = []
        self._fds = ExitStack()
        try:
            for number in numbers:
                data, index = _open_files(path, number, os.O_RDONLY)
                self._fds.callback(os.close, data)
                self._fds.callback(os.close, index)
                self.layers.append(open_upper_pair(FileSource(data, name=f"{path}/{number:06}.data"), FileSource(index)))
        except BaseException:
            self._fds.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._fds.close()


class DiskFiles:
    """A disk's directory, locked by this process. Use as a context. Raises NotFound, ImageError, and Conflict if somebody else has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        read_state(path)  # no lock file appears where there is no disk
        self._lock = _lock(path)
        try:
            self.state = read_state(path)
        except BaseException:
            os.close(self._lock)
            raise

    def open(self, number: int) -> Generation:
        """Open a generation for writing; what a crash tore off its end is cut off (``upper.recovery``)."""
        fds = [*_open_files(self.path, number, os.O_RDWR)]
        try:
            fds.append(_open_journal(self.path, number))
            return Generation(number, Upper.open(fds[0], fds[1], journal_fd=fds[2]), fds)
        except DsecError as error:
            for fd in fds:
                os.close(fd)
            raise error.located(f"{self.path}, generation {number}") from error

    def begin(self, *, virtual_size: int | None = None) -> Generation:
        """A new, empty generation above the present one, which is frozen by this; named in the state when this returns. LimitError when there are too many."""
        before = self.state
        if len(before.frozen) >= MAX_GENERATIONS:
            raise LimitError(f"{self.path} has {len(before.frozen)} frozen generations", hint="commit them: that makes one layer of all")
        size = before.virtual_size if virtual_size is None else virtual_size
        number = before.upper + 1
        fresh = _new_generation(self.path, number, size)
        try:
            self._write(DiskState(size, before.parent, (*before.frozen, before.upper), number))
        except BaseException:
            fresh.close()
            _remove(self.path, number)
            raise
        return fresh

    def undo(self, before: DiskState, fresh: Generation) -> None:
        """Take ``begin`` back. Raises if that cannot be made durable; then the new state stays true on the disk."""
        self._write(before)
        fresh.close()
        _remove(self.path, fresh.number)

    def rebase(self, expected: Parent | None, parent: Parent, gone: tuple[int, ...]) -> DiskState:
        """Say that the generations ``gone`` are part of the sealed disk ``parent`` now, and forget them.

        They must be the lowest, on the sealed disk ``expected``: Conflict if something else has happened to the disk meanwhile.
        """
        if self.state.parent != expected or self.state.frozen[: len(gone)] != gone:
            raise Conflict(f"{self.path} has been committed by somebody else meanwhile", hint="what was published stays published")
        self._write(replace(self.state, parent=parent, frozen=self.state.frozen[len(gone) :]))
        for number in gone:
            _remove(self.path, number)
        return self.state

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, state: DiskState) -> None:
        try:
            write_atomic(self.path / STATE, state.to_json(), mode=0o600)
        except OSError as error:
            raise map_os_error(error, str(self.path)) from error
        self.state = state


Fill: TypeAlias = Callable[[Path, Path], None]
"""Puts content into a new upper, given the paths of its data and its index file; durable when it returns."""


def create_files(path: Path, virtual_size: int, parent: Parent | None = None, fill: Fill | None = None) -> DiskState:
    """Make the disk directory ``path``, which must not be there: it appears whole. UsageError for an improper size, Conflict, NoSpace.

    ``fill``: makes the content of its first upper.
    """
    check_size(virtual_size)
    state = DiskState(virtual_size, parent)
    try:
        with publish_directory(path, mode=0o700) as work:
            _new_generation(work, state.upper, virtual_size).close()
            if fill is not None:
                data, index, _ = _names(state.upper)
                fill(work / data, work / index)
            write_atomic(work / STATE, state.to_json(), mode=0o600)
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    return state


def check_size(virtual_size: int) -> None:
    """Raise UsageError unless a disk can have that many bytes."""
    if virtual_size <= 0 or virtual_size % SECTOR or virtual_size > MAX_LBA * SECTOR:
        raise UsageError(f"a disk has a whole number of {SECTOR}-byte sectors, not {virtual_size} bytes")


def _names(number: int) -> tuple[str, str, str]:
    return f"{number:06}.data", f"{number:06}.index", f"{number:06}.journal"


def _new_generation(path: Path, number: int, virtual_size: int) -> Generation:
    # What a killed snapshot left under this number was never part of the disk.
    _remove(path, number)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with ExitStack() as opened:
            fds = []
            for name in _names(number):
                fds.append(os.open(path / name, flags, 0o600))
                opened.callback(os.close, fds[-1])
            made = Generation(number, Upper.create(fds[0], fds[1], virtual_size, journal_fd=fds[2]), fds)
            fsync_directory(path)
            opened.pop_all()
            return made
    except BaseException as error:
        with suppress(OSError):
            _remove(path, number)
        if isinstance(error, OSError):
            raise map_os_error(error, str(path)) from error
        raise


def _open_files(path: Path, number: int, flags: int) -> tuple[int, int]:
    data_name, index_name, _ = _names(number)
    try:
        data = os.open(path / data_name, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return data, os.open(path / index_name, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            os.close(data)
            raise
    except FileNotFoundError as error:
        raise ImageError(f"{path}: generation {number} has lost a file: {error.filename}", code=ImageCode.TRUNCATED) from error
    except OSError as error:
        raise map_os_error(error, f"{path}: generation {number}") from error


def _open_journal(path: Path, number: int) -> int:
    try:
        return os.open(path / _names(number)[2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise map_os_error(error, f"{path}: generation {number}") from error


def _remove(path: Path, number: int) -> None:
    for name in _names(number):
        (path / name).unlink(missing_ok=True)


def _lock(path: Path) -> int:
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Conflict(f"the disk {path} is open already", hint="it is attached; detach it, or ask it for a snapshot") from error
    except OSError as error:
        os.close(fd)
        raise map_os_error(error, f"lock of {path}") from error
    return fd
