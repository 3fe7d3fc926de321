"""The caller's terminal and the one inside.

The runtimes make the terminal inside and move the bytes; they differ in what they do about its size (crun: nothing), so that is done here.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
from contextlib import suppress
from typing import Any, Final

from dsec_layers.sandbox.syscalls import open_in_root

__all__ = ["resize_inside", "restore", "save", "window_size"]

_SLAVES: Final = 136
"""First of the device majors of pseudo-terminal slaves (UNIX98_PTY_SLAVE_MAJOR in linux/major.h); the last is 143."""


def window_size(fd: int) -> tuple[int, int]:
    """Rows and columns of a terminal."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    return rows, columns


def resize_inside(pid: int, size: tuple[int, int]) -> None:
    """Set the size of the terminal of a sandbox whose first process is ``pid``; those who use it are told by SIGWINCH. Nothing happens if it is gone."""
    with suppress(OSError):
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _resize(root, size)
        finally:
            os.close(root)


def save(fd: int) -> list[Any]:
    """The settings of a terminal, for ``restore``."""
    return termios.tcgetattr(fd)


def restore(fd: int, settings: list[Any]) -> None:
    """Give a terminal its settings back: a runtime that was killed leaves it raw."""
    with suppress(termios.error):
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)


def _resize(root: int, size: tuple[int, int]) -> None:
    """The OCI specification puts the terminal at /dev/console; whoever is root inside may have put something else there."""
    found = open_in_root(root, "/dev/console", os.O_NOFOLLOW)
    try:
        status = os.fstat(found)
        if not stat.S_ISCHR(status.st_mode) or not _SLAVES <= os.major(status.st_rdev) < _SLAVES + 8:
            return
        fd = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)
    try:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    finally:
        os.close(fd)
