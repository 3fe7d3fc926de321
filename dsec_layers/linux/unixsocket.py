"""Unix sockets that have a name: one way to listen and one to connect, for paths of any length.

A socket appears under its name when it listens already, and what is under a name is looked at and replaced only by who has locked the directory (flock(2)):
so of two servers that want one name at the same time one gets it, and the other hears of that. An address holds 107 bytes (unix(7)), a path may be
longer: addresses go through descriptors in /proc/self/fd.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dsec_layers.errors import Conflict, HostError

__all__ = ["connect_unix", "listen_unix", "remove_socket", "socket_identity"]

_BACKLOG: Final = 256
_PROBE: Final = 1.0
"""Seconds a listening server is given to take a connection; one that is too busy lives."""
_PATIENCE: Final = 10.0
"""Seconds for which somebody else may have the directory locked: it takes milliseconds, if nothing is wrong."""
_PAUSE: Final = 0.002


def listen_unix(path: Path, *, owned: bool = False) -> socket.socket:
    """A listening socket at ``path``, mode 0600. One that a dead server left there is replaced; Conflict if a living one's or another file is there.

    ``owned``: the caller has a lock of its own that says that no other server lives, so that whatever socket is there may be replaced.
    HostError when it cannot be made.
    """
    try:
        with _locked(path.parent) as directory:
            if _is_taken(path):
                _check_replaceable(path, owned=owned)
            return _appear(directory, path.name)
    except OSError as error:
        raise HostError(f"cannot listen on {path}: {error.strerror or error}") from error


def connect_unix(path: Path, timeout: float | None = None) -> socket.socket:
    """A connection to the server at ``path``. Raises OSError: FileNotFoundError or ConnectionRefusedError when there is none."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            channel.settimeout(timeout)
            channel.connect(f"/proc/self/fd/{fd}")
        except BaseException:
            channel.close()
            raise
        return channel
    finally:
        os.close(fd)


def socket_identity(path: Path) -> tuple[int, int]:
    """What tells a socket from another one that was put in its place, as long as it is open."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def remove_socket(path: Path, identity: tuple[int, int]) -> None:
    """Remove the name of a listening socket, which is still open, unless another server has put its own there meanwhile."""
    with suppress(OSError, Conflict), _locked(path.parent):
        if socket_identity(path) == identity:
            path.unlink()


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """A descriptor of a directory in which nobody else names or removes sockets meanwhile."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        due = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > due:
                    raise Conflict(
                        f"another program holds a lock on the directory {directory}", hint="end it, or use another directory"
                    ) from None
            time.sleep(_PAUSE)
        yield fd
    finally:
        os.close(fd)


def _is_taken(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _check_replaceable(path: Path, *, owned: bool) -> None:
    """Raise Conflict unless ``path`` is a socket that nobody listens on. Its name leads to sockets that listen only, so who refuses is dead."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise Conflict(f"{path} exists and is not a socket", hint="remove it, or choose another path")
    if owned:
        return
    try:
        connect_unix(path, _PROBE).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return
    except OSError as error:
        raise Conflict(f"{path} is in use: {error.strerror or error}") from error
    raise Conflict(f"another server listens on {path}", hint="stop it, or choose another path")


def _appear(directory: int, name: str) -> socket.socket:
    """A socket that gets its name when it listens. The temporary one is short, as ``name`` may fill an address, and what a crash left of it is in nobody's use."""
    temporary = f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.sock"
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        os.fchmod(channel.fileno(), 0o600)  # what bind() gives the name, less the umask, which is the whole process's
        channel.bind(f"/proc/self/fd/{directory}/{temporary}")
        try:
            channel.listen(_BACKLOG)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(temporary, dir_fd=directory)
            raise
    except BaseException:
        channel.close()
        raise
    return channel
