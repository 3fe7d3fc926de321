"""The system calls a sandbox needs that Python has no name for."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dsec_layers.errors import HostError

__all__ = ["MNT_DETACH", "mount", "mount_overlay", "open_in_root", "private_namespaces", "umount"]

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWPID: Final = 0x20000000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
MNT_DETACH: Final = 2
_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10

_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_NODEV = 4

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def private_namespaces() -> Iterator[None]:
    """Give the calling *thread* a mount namespace of its own, and its children a new process namespace whose first member they begin with.

    When that first child dies, the kernel kills all processes below it. When the context ends the thread returns to its old mount namespace, and the private
    one goes with all its mounts, at once, if nobody else is in it. The thread stays changed otherwise: it must end with the work. Raises HostError without the
    right to.
    """
    old = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID) != 0:
            number = ctypes.get_errno()
            raise HostError(f"cannot make a mount and process namespace: {os.strerror(number)}", hint="sandboxes need root")
        try:
            # Slave, not private: what the host unmounts later must not stay alive here.
            mount(None, "/", None, _MS_REC | _MS_SLAVE, None)
            yield
        finally:
            if _libc.setns(old, _CLONE_NEWNS) != 0:
                number = ctypes.get_errno()
                raise HostError(f"cannot return to the host's mount namespace: {os.strerror(number)}")
    finally:
        os.close(old)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    """mount(2). Raises OSError."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), None if data is None else os.fsencode(data)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def umount(target: str, flags: int = 0) -> None:
    """umount2(2). Raises OSError."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open ``path`` as a process whose root directory is ``root`` would: links, ``..`` and absolute names stay inside. Raises OSError.

    openat2(2) with RESOLVE_IN_ROOT; the flags O_CLOEXEC, O_NOCTTY and O_NONBLOCK are added, so that a device or pipe in a hostile tree cannot hold the caller.
    """
    more = os.O_CLOEXEC if flags & os.O_PATH else os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    how = struct.pack("=QQQ", flags | more, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    for _ in range(64):
        fd = _libc.syscall(ctypes.c_long(_SYS_OPENAT2), root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
        if fd >= 0:
            return int(fd)
        number = ctypes.get_errno()
        # EAGAIN: something was renamed meanwhile, and the kernel could not be sure that no ".." left the root.
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number), path)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)


def mount_overlay(target: Path, lower: Sequence[Path], upper: Path, work: Path) -> None:
    """Mount an overlay whose upper directory is a plain difference: no redirects, no metadata-only copies, no index. Raises OSError.

    Volatile: the writable layer of a sandbox needs no durability, so fsync inside and the sync at unmount cost nothing. Device files in it do not work.
    """
    fd = _call(_SYS_FSOPEN, b"overlay", _FSOPEN_CLOEXEC)
    try:
        for path in lower:
            _set(fd, b"lowerdir+", os.fsencode(path))
        settings: dict[str, str | Path] = {
            "upperdir": upper,
            "workdir": work,
            "index": "off",
            "redirect_dir": "off",
            "metacopy": "off",
            "nfs_export": "off",
        }
        for name, value in settings.items():
            _set(fd, name.encode(), os.fsencode(value))
        _call(_SYS_FSCONFIG, fd, _FSCONFIG_SET_FLAG, b"volatile", None, 0)
        _call(_SYS_FSCONFIG, fd, _FSCONFIG_CMD_CREATE, None, None, 0)
        tree = _call(_SYS_FSMOUNT, fd, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_NODEV)
    finally:
        os.close(fd)
    try:
        _call(_SYS_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def _set(fd: int, name: bytes, value: bytes) -> None:
    _call(_SYS_FSCONFIG, fd, _FSCONFIG_SET_STRING, name, value, 0)


def _call(number: int, *arguments: int | bytes | None) -> int:
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
