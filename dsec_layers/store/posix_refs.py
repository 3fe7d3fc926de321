"""Refs in a directory, changed by compare-and-swap without locks, right on a file system whose clients cache (docs/formats/store.md).

``refs/<name, / spelled +>/<tag>/<20-digit number>`` is one value the ref had: a line with a digest, or ``-`` for "removed". The highest number is the value
now. To change it: read number n, then link(2) a complete file to n + 1. The one file system operation decides: the name is free for exactly one of any number
of writers, and it can only be free if n still is the highest, because numbers have no gaps. A writer killed at any point leaves the old value, or the new.

Old numbers are removed only when an hour old and not among the last eight, so that a writer which looked a moment ago (or whose view of the directory
lags, on 3FS by up to 30 s) never finds n + 1 free again. One that was stopped for longer than that between its look and its link takes the link back.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, Protocol

from dsec_layers.digest import Digest, check_digest, is_digest
from dsec_layers.errors import Conflict, CorruptError, NotFound, StoreError
from dsec_layers.fsio import fsync_directory
from dsec_layers.store.base import Ref, check_ref, split_ref

__all__ = ["PosixRefs", "make_directory"]

_NUMBER: Final = re.compile(r"[0-9]{20}\Z")
_REMOVED: Final = "-"
KEEP: Final = 8
PRUNE_AGE: Final = 3600.0
LATE: Final = 600.0
"""Seconds from look to link after which a link counts as made too late. Far below PRUNE_AGE, to leave room for clocks that differ."""


def make_directory(path: Path) -> None:
    """Make a directory and those above it, if they are not there. Does not look again at what mkdir(2) said was there: that look may be answered from a cache."""
    try:
        with suppress(FileExistsError):
            path.mkdir()
    except FileNotFoundError:
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir()


class Host(Protocol):
    """What the refs need of the store they are in."""

    url: str

    def mapped(self, what: str) -> AbstractContextManager[None]: ...
    def temporary(self) -> Path: ...
    def require_mounted(self) -> None: ...


class PosixRefs:
    """The refs below one directory. ``patience``: seconds to look again when a listed number cannot be opened yet."""

    def __init__(self, host: Host, root: Path, patience: float) -> None:
        self._host = host
        self._root = root
        self._patience = patience
        self._durable: set[Path] = set()

    def get(self, name: str) -> Ref:
        """The ref, or NotFound."""
        name = check_ref(name)
        with self._host.mapped(f"read ref {name}"):
            _, digest = self._current(self._directory(name))
            if digest is None:
                self._host.require_mounted()
                raise NotFound(f"no ref {name} in {self._host.url}")
            return Ref(name, digest)

    def set(self, name: str, new: Digest | None, expected: Digest | None) -> None:
        """Change the ref from ``expected`` to ``new``, or Conflict."""
        name = check_ref(name)
        if new is not None:
            check_digest(new)
        directory = self._directory(name)
        with self._host.mapped(f"change ref {name}"):
            self._host.require_mounted()
            looked = _now()
            number, current = self._current(directory)
            if current != expected:
                raise Conflict(f"{name} is {current or 'absent'}, not {expected or 'absent'}", hint="somebody changed it: look again")
            if new is None and current is None:
                return
            self._link(directory, number + 1, new, name)
            if _now() - looked > LATE:
                (directory / f"{number + 1:020d}").unlink()
                raise StoreError(f"changing {name} took longer than {LATE:g} s; it was taken back")
            self._prune(directory, number + 1)

    def list(self, prefix: str) -> Iterator[Ref]:
        """Every ref that begins with ``prefix``, sorted."""
        found = []
        with self._host.mapped("list refs"):
            self._host.require_mounted()
            for directory in _directories(self._root):
                name = directory.name.replace("+", "/")
                if name.startswith(prefix[: len(name)]):
                    found += [(f"{name}:{tag.name}", tag) for tag in _directories(directory)]
            for name, tag in sorted(found):
                if name.startswith(prefix):
                    _, digest = self._current(tag)
                    if digest is not None:
                        yield Ref(name, digest)

    def _directory(self, name: str) -> Path:
        name, tag = split_ref(name)
        return self._root / name.replace("/", "+") / tag

    def _current(self, directory: Path) -> tuple[int, Digest | None]:
        """The highest number and its value; (0, None) for a ref that never was."""
        deadline = time.monotonic() + self._patience
        while True:
            numbers = _numbers(directory)
            if not numbers:
                return 0, None
            try:
                return numbers[-1], _parse(directory / f"{numbers[-1]:020d}")
            except FileNotFoundError:  # pruned since, or a cached "no such file"
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def _link(self, directory: Path, number: int, value: Digest | None, name: str) -> None:
        make_directory(directory)
        if directory not in self._durable:
            fsync_directory(self._root)
            fsync_directory(directory.parent)
            self._durable.add(directory)
        temporary = self._host.temporary()
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, f"{value or _REMOVED}\n".encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            (directory / f"{number:020d}").hardlink_to(temporary)
        except FileExistsError:
            raise Conflict(f"{name} was changed by somebody else", hint="look again") from None
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(directory)

    def _prune(self, directory: Path, newest: int) -> None:
        now = time.time()
        for number in _numbers(directory):
            path = directory / f"{number:020d}"
            try:
                if number > newest - KEEP or now - path.stat().st_mtime < PRUNE_AGE:
                    return
                path.unlink()
            except FileNotFoundError:
                continue


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps


def _numbers(directory: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in directory.iterdir() if _NUMBER.match(path.name))
    except FileNotFoundError:
        return []


def _parse(path: Path) -> Digest | None:
    text = _text(path).removesuffix("\n")
    if text == _REMOVED:
        return None
    if not is_digest(text):
        raise CorruptError(f"{path} is not a ref", hint="remove this file to go back to the value before")
    return text


def _text(path: Path) -> str:
    """What a ref's file holds; nothing if it is no file. A FIFO would wait for a writer, for good."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            return ""
        raise
    try:
        return os.read(fd, 100).decode(errors="replace") if stat.S_ISREG(os.fstat(fd).st_mode) else ""
    finally:
        os.close(fd)


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
