"""fanotify pre-content events (include/uapi/linux/fanotify.h, Linux >= 6.14): a reader waits in the kernel until somebody has put the data there.

One group, one mark on a directory: the first access to any file that was opened in that directory while the mark stood gives an event, and sleeps
(killably) until the event is answered. Events carry an open descriptor of the file, which raises no events itself. They are answered by its *number*.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final, NamedTuple

from dsec_layers.digest import Buffer
from dsec_layers.errors import HostError

__all__ = ["Event", "answer", "create_group", "mark_directory", "parse_events"]

_CLASS_PRE_CONTENT: Final = 0x08
_CLOEXEC: Final = 0x01
_NONBLOCK: Final = 0x02
_UNLIMITED_QUEUE: Final = 0x10
_UNLIMITED_MARKS: Final = 0x20
_REPORT_FD_ERROR: Final = 0x2000
_MARK_ADD: Final = 0x01
_MARK_ONLYDIR: Final = 0x08
_PRE_ACCESS: Final = 0x0010_0000
_EVENT_ON_CHILD: Final = 0x0800_0000
_ALLOW: Final = 1
_DENY: Final = 2
_AT_FDCWD: Final = -100
_METADATA: Final = struct.Struct("=IBBHQii")
_RESPONSE: Final = struct.Struct("=iI")
_VERSION: Final = 3

# The errnos that a denial can carry (FAN_DENY_ERRNO); any other becomes EIO.
_DENIALS: Final = frozenset({errno.EPERM, errno.EIO, errno.EBUSY, errno.ETXTBSY, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]


class Event(NamedTuple):
    """A reader waits. ``fd``: descriptor of the file (negative: minus the errno that opening it gave, and the kernel has refused the reader already)."""

    fd: int
    pid: int


def create_group() -> int:
    """A group for pre-content events; returns its descriptor (close-on-exec, non-blocking). Event descriptors are open for reading and writing and survive exec.

    HostError where the kernel or the rights do not allow it.
    """
    flags = _CLASS_PRE_CONTENT | _CLOEXEC | _NONBLOCK | _UNLIMITED_QUEUE | _UNLIMITED_MARKS | _REPORT_FD_ERROR
    fd: int = _libc.fanotify_init(flags, os.O_RDWR | getattr(os, "O_LARGEFILE", 0))
    if fd < 0:
        raise _refused(ctypes.get_errno())
    return fd


def mark_directory(group: int, path: str | os.PathLike[str]) -> None:
    """Watch a directory: files opened in it from now on raise events for as long as they have a name in it. HostError if its file system cannot."""
    if _libc.fanotify_mark(group, _MARK_ADD | _MARK_ONLYDIR, _PRE_ACCESS | _EVENT_ON_CHILD, _AT_FDCWD, os.fsencode(path)) < 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
            raise HostError(
                f"pre-content events do not work on {path}",
                hint="they need Linux 6.14 and ext4, xfs or btrfs; the fuse driver works elsewhere",
            )
        raise HostError(f"cannot watch {path}: {os.strerror(code)}")


def parse_events(data: Buffer) -> list[Event]:
    """The events that one read of a group returned; stops at the first zero length, so that a zeroed buffer may follow the last event."""
    found = []
    at, end = 0, len(data)
    while end - at >= _METADATA.size:
        length, version, _, _, _, fd, pid = _METADATA.unpack_from(data, at)
        if length < _METADATA.size or version != _VERSION or at + length > end:
            break
        found.append(Event(fd, pid))
        at += length
    return found


def answer(group: int, number: int, code: int = 0) -> bool:
    """Let the reader of event ``number`` go on, or give it the errno ``code``. False if no such event waits (any more)."""
    if code == 0:
        verdict = _ALLOW
    else:
        verdict = _DENY | (code if code in _DENIALS else errno.EIO) << 24
    try:
        os.write(group, _RESPONSE.pack(number, verdict))
    except FileNotFoundError:
        return False
    return True


def _refused(code: int) -> HostError:
    if code == errno.EPERM:
        return HostError("fanotify pre-content events need root", hint="run as root (CAP_SYS_ADMIN), or use the fuse driver")
    if code in (errno.EINVAL, errno.ENOSYS):
        return HostError(
            "this kernel has no fanotify pre-content events", hint="they came with Linux 6.14; the fuse driver works on older kernels"
        )
    return HostError(f"cannot make a fanotify group: {os.strerror(code)}")
