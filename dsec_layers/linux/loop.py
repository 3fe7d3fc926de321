"""Loop devices (include/uapi/linux/loop.h): a file as a block device, for kernels whose EROFS cannot mount a file."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

from dsec_layers.errors import HostError

__all__ = ["attach_loop"]

_SET_FD, _CLR_FD, _SET_STATUS64, _CTL_GET_FREE = 0x4C00, 0x4C01, 0x4C04, 0x4C82
_READ_ONLY, _AUTOCLEAR = 1, 4
_INFO: Final = struct.Struct("=QQQQQIIII64s64s32sQQ")
_ATTEMPTS: Final = 16


def attach_loop(path: str | os.PathLike[str]) -> tuple[int, str]:
    """(descriptor, path) of a read-only loop device over a file. It is freed when the last user of the device, this descriptor among them, is gone.

    Raises HostError.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
            try:
                return _attach(file, control, path)
            finally:
                os.close(control)
        finally:
            os.close(file)
    except OSError as error:
        raise HostError(f"cannot make a loop device of {os.fspath(path)}: {error.strerror}", hint="modprobe loop") from error


def _attach(file: int, control: int, path: str | os.PathLike[str]) -> tuple[int, str]:
    for _ in range(_ATTEMPTS):
        name = f"/dev/loop{fcntl.ioctl(control, _CTL_GET_FREE)}"
        device = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _SET_FD, file)
        except OSError:  # somebody else was faster
            os.close(device)
            continue
        try:
            info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _READ_ONLY | _AUTOCLEAR, os.fsencode(path)[-63:], b"", b"", 0, 0)
            fcntl.ioctl(device, _SET_STATUS64, info)
        except OSError:
            fcntl.ioctl(device, _CLR_FD)
            os.close(device)
            raise
        return device, name
    raise HostError("no free loop device")
