"""Taking the fanotify group over from systemd's descriptor store, after keeper and worker were both ended.

The readers still wait. The events that the dead worker had in hand are known by number and segment (fuse/events/keeper.py, ``Hand``), but their descriptors went with
it. The kernel tells events apart by their numbers only, and gives the lowest free number to the next: so each number is occupied by a descriptor of
the same file again, before anything else can take it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from dsec_layers.fuse.events.keeper import Hand, inherited_descriptors
from dsec_layers.linux.fanotify import answer
from dsec_layers.linux.process import set_descriptor_limit

__all__ = ["adopt_group"]

_HIGH: Final = 60_000
_LIMIT: Final = 65_536


def adopt_group(cache: Path) -> tuple[int, int] | None:
    """(group, shared memory) that systemd kept, or None. To be called before this process opens anything else."""
    inherited = inherited_descriptors()
    if "group" not in inherited or "hand" not in inherited:
        for fd in inherited.values():
            os.close(fd)
        return None
    high = min(_HIGH, set_descriptor_limit(_LIMIT) - 64)
    group, memory = (_moved(inherited[name], high) for name in ("group", "hand"))
    hand = Hand(memory)
    for number, digest in hand.numbers().items():
        if not (digest and _occupy(cache, number, digest)):
            # Read, but not looked at when the worker ended: nobody can tell which segment it is about. An error, never a wrong byte.
            answer(group, number, errno.EIO)
            hand.drop(number)
            continue
        hand.add(number, digest)
    hand.clear_buffer()
    return group, memory


def _moved(fd: int, at_least: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, at_least)
    os.close(fd)
    return moved


def _occupy(cache: Path, number: int, digest: bytes) -> bool:
    for folder in ("absent", "present"):
        try:
            fd = os.open(cache / folder / digest.hex(), os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        if fd != number:
            os.dup2(fd, number, inheritable=True)
            os.close(fd)
        return True
    return False
