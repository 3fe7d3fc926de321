"""Whether this host can serve mounts, by which driver, and how."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsec_layers.errors import HostError
from dsec_layers.linux.fanotify import create_group, mark_directory
from dsec_layers.linux.mountinfo import file_system_of

__all__ = ["check_fanotify", "check_root", "kernel_version", "watch"]

_FILE_SYSTEMS: Final = ("ext4", "xfs", "btrfs")
_EVENTS_SINCE: Final = (6, 14)


def kernel_version() -> tuple[int, int]:
    """The running kernel's version."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_root() -> None:
    """Raise HostError unless this process may mount."""
    if os.geteuid() != 0:
        raise HostError(f"mounting needs root, this is uid {os.geteuid()}", hint="sudo; building, importing and inspecting work without")


def check_fanotify(cache: Path) -> None:
    """Raise HostError, saying what is missing, unless the fanotify driver can work with this cache directory."""
    version = kernel_version()
    if version < _EVENTS_SINCE:
        raise HostError(
            f"the fanotify driver needs Linux {_EVENTS_SINCE[0]}.{_EVENTS_SINCE[1]} or newer, this is {platform.release()}",
            hint="use the fuse driver",
        )
    kind = file_system_of(cache)
    if kind not in _FILE_SYSTEMS:
        raise HostError(
            f"the fanotify driver needs its cache on {', '.join(_FILE_SYSTEMS[:-1])} or {_FILE_SYSTEMS[-1]}; {cache} is on {kind}",
            hint="point --cache at a directory on one of them, or use the fuse driver",
        )


def watch(folders: Sequence[Path]) -> int:
    """A fanotify group that watches directories of absent segments. HostError where that does not work."""
    group = create_group()
    try:
        for folder in folders:
            mark_directory(group, folder)
    except BaseException:
        os.close(group)
        raise
    return group
