"""Directories of running sandboxes, and what to do about those whose owner died.

``STATE/sandboxes/ID`` is locked (flock) as long as its owner lives: the kernel lets go of the lock when the process ends, however it ends. So whoever gets the
lock of somebody else's directory knows that it is abandoned, without process ids that may be used again. ``STATE/sandboxes/.lock`` closes the moment between
making a directory and locking it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_layers import proc
from dsec_layers.errors import Conflict, HostError
from dsec_layers.fsio import map_os_error

__all__ = ["Place", "make_place", "remove_place", "remove_tree", "sweep"]

_LOCK: Final = ".lock"
_NAME: Final = "name"


@dataclass(frozen=True, slots=True)
class Place:
    """The directory of one sandbox, locked by this process. ``fd`` holds the lock."""

    identifier: str
    path: Path
    fd: int


def make_place(state: Path, name: str = "") -> Place:
    """A new sandbox directory, locked. Only root may look inside: what a sandbox writes may be set-user-id or a device.

    ``name``: kept in it as the file ``name``. Raises Conflict if another sandbox is called so.
    """
    top = _top(state)
    identifier = os.urandom(8).hex()
    path = top / identifier
    with _locked(top / _LOCK):
        if name and name in _names(top):
            raise Conflict(f"a sandbox named {name!r} is running", hint="give another name, or wait for its end")
        path.mkdir(mode=0o700)
        if name:
            (path / _NAME).write_text(name)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Place(identifier, path, fd)


def remove_place(place: Place) -> None:
    """Remove a sandbox directory with all that is in it, then let go of its lock."""
    try:
        remove_tree(place.path)
    finally:
        os.close(place.fd)


def sweep(state: Path, clean: Callable[[str], None]) -> list[str]:
    """Remove the sandboxes whose owners are gone; ``clean`` ends their processes and control groups first. Returns their identifiers."""
    top = _top(state)
    abandoned: list[Place] = []
    with _locked(top / _LOCK):
        for entry in top.iterdir():
            if entry.name == _LOCK:
                continue
            try:
                fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            abandoned.append(Place(entry.name, entry, fd))
    for place in abandoned:
        clean(place.identifier)
        remove_place(place)
    return [place.identifier for place in abandoned]


def remove_tree(path: Path) -> None:
    """Remove a tree that a sandbox may have shaped, nested thousands deep and full of odd names, following no link; one that is not there is no error."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (RecursionError, OSError):
        # rmtree recurses, and gives up at the interpreter's limit; rm(1) does not.
        proc.run(["rm", "-rf", "--one-file-system", "--", path])


def _names(top: Path) -> set[str]:
    names = set()
    for entry in top.iterdir():
        with suppress(FileNotFoundError, NotADirectoryError):
            names.add((entry / _NAME).read_text())
    return names


def _top(state: Path) -> Path:
    top = state / "sandboxes"
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise map_os_error(error, f"making {top}") from error
        raise HostError(f"cannot make {top}: {error.strerror}") from error
    if top.stat().st_uid != os.geteuid():
        raise HostError(f"{top} belongs to user {top.stat().st_uid}, not to this one")
    return top


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
