"""The system calls a sandbox needs that Python has no name for."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dsec_layers.errors import HostError

__all__ = ["open_in_root", "private_namespaces"]

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWPID: Final = 0x20000000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000
_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10

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
            if _libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) != 0:
                number = ctypes.get_errno()
                raise HostError(f"cannot cut a mount namespace off from the host's: {os.strerror(number)}")
            yield
        finally:
            if _libc.setns(old, _CLONE_NEWNS) != 0:
                number = ctypes.get_errno()
                raise HostError(f"cannot return to the host's mount namespace: {os.strerror(number)}")
    finally:
        os.close(old)


def open_in_root(root: int, path: str, flags: int = 0) -> int:
    """A descriptor (O_PATH) of ``path`` as a process whose root directory is ``root`` would: links, ``..`` and absolute names stay inside. Raises OSError.

    openat2(2) with RESOLVE_IN_ROOT and O_PATH: nothing is really opened, for in a hostile tree the name may lead to a device or a pipe.
    """
    how = struct.pack("=QQQ", flags | os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    for _ in range(64):
        fd = _libc.syscall(ctypes.c_long(_SYS_OPENAT2), root, os.fsencode(path), how, ctypes.c_size_t(len(how)))
        if fd >= 0:
            return int(fd)
        number = ctypes.get_errno()
        # EAGAIN: something was renamed meanwhile, and the kernel could not be sure that no ".." left the root.
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number), path)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
