"""The control groups of one sandbox, on cgroup v1, v2 and the two mixed.

A sandbox has a group of ours, ``/dsec-layers-ID``, and in it ``box``, which belongs to the runtime and carries the limits. The runtime removes ``box`` with the
container; ours stays long enough to tell whether memory ran out, and is what an abandoned sandbox is found and ended by.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_layers.errors import HostError

__all__ = ["CgroupHost", "OomWatch", "default_limits", "group_path", "read_cgroup_mounts"]

DEFAULT_MEMORY: Final = 2 << 30
DEFAULT_PIDS: Final = 1024

_PREFIX: Final = "dsec-layers-"
_END_WAIT: Final = 10.0
_PAGE: Final = 4096


def group_path(identifier: str) -> str:
    """The runtime's group of a sandbox, as config.json names it."""
    return f"/{_PREFIX}{identifier}/box"


@dataclass(frozen=True, slots=True)
class CgroupHost:
    """The control group hierarchies mounted on this host. ``v1``: controller -> mount point. ``v2``: mount point, or None."""

    v1: dict[str, Path]
    v2: Path | None

    @property
    def hybrid(self) -> Path | None:
        """The mount point of a unified hierarchy that has no controllers because v1 has them."""
        return self.v2 if self.v1 else None

    def roots(self) -> list[Path]:
        """Every hierarchy, each once."""
        return list(dict.fromkeys([*self.v1.values(), *([self.v2] if self.v2 else [])]))

    def limits_swap(self) -> bool:
        """Whether swap can be limited: v1 needs swap accounting, which a kernel may lack or have off."""
        memory = self.v1.get("memory")
        if memory is not None:
            # The root group of v1 has the file exactly when every group has it.
            return (memory / "memory.memsw.limit_in_bytes").exists()
        return self.v2 is not None and any(self.v2.glob("*/memory.swap.max"))

    def limits(self, controller: str) -> bool:
        """Whether the host has a controller, such as ``memory`` or ``pids``."""
        if controller in self.v1:
            return True
        try:
            return self.v2 is not None and controller in (self.v2 / "cgroup.controllers").read_text().split()
        except OSError:
            return False

    def pids_of(self, identifier: str) -> set[int]:
        """Processes of a sandbox, as seen by this process."""
        found: set[int] = set()
        for root in self.roots():
            for members in _groups(root / f"{_PREFIX}{identifier}"):
                with suppress(OSError):
                    found |= {int(line) for line in (members / "cgroup.procs").read_text().split()}
        return found - {0}

    def end(self, identifier: str) -> None:
        """Kill whatever is left of a sandbox and remove its groups. Raises HostError if something outlives SIGKILL."""
        deadline = time.monotonic() + _END_WAIT
        delay = 0.0005
        while pids := self.pids_of(identifier):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise HostError(f"processes {sorted(pids)} of sandbox {identifier} do not die")
            time.sleep(delay)
            delay = min(delay * 2, 0.05)
        for root in self.roots():
            for group in reversed(_groups(root / f"{_PREFIX}{identifier}")):
                _remove(group, deadline)


def default_limits(host: CgroupHost | None = None) -> dict[str, int]:
    """``memory`` (bytes) and ``pids`` of a sandbox whose caller says nothing about them; what this host cannot limit is left out."""
    found = host or read_cgroup_mounts(Path("/proc/self/mounts").read_text())
    return {name: limit for name, limit in (("memory", DEFAULT_MEMORY), ("pids", DEFAULT_PIDS)) if found.limits(name)}


class OomWatch:
    """Tells afterwards whether the kernel killed something because the sandbox's memory limit of ``limit`` bytes was reached. Make it before the runtime starts."""

    def __init__(self, host: CgroupHost, identifier: str, limit: int) -> None:
        self._events: Path | None = None
        self._fd = -1
        memory = host.v1.get("memory")
        if memory is None:
            # v2 counts a group's events in its parents too, so that our own group still knows when the runtime has removed its box.
            self._events = host.v2 / f"{_PREFIX}{identifier}" / "memory.events" if host.v2 else None
            return
        # v1 tells only the group that ran out. One page less than the box makes that always ours; the box keeps the number programs inside look at.
        group = memory / f"{_PREFIX}{identifier}"
        group.mkdir()
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            if (group / name).exists():
                (group / name).write_text(str(limit - _PAGE))
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        control = os.open(group / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            (group / "cgroup.event_control").write_text(f"{self._fd} {control}")
        finally:
            os.close(control)

    def happened(self) -> bool:
        """Whether memory ran out. Call after the end and before the groups are removed."""
        with suppress(OSError):
            if self._fd >= 0:
                return os.eventfd_read(self._fd) > 0
            if self._events is not None:
                fields = dict(line.split() for line in self._events.read_text().splitlines())
                return int(fields.get("oom_kill", "0")) > 0
        return False

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_cgroup_mounts(mounts: str) -> CgroupHost:
    """The hierarchies in a /proc/self/mounts text."""
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        if fields[2] == "cgroup2" and v2 is None:
            v2 = Path(fields[1])
        elif fields[2] == "cgroup":
            for option in fields[3].split(","):
                if option.startswith("name=") or option in _CONTROLLERS:
                    v1.setdefault(option, Path(fields[1]))
    return CgroupHost(v1, v2)


_CONTROLLERS: Final = frozenset(
    (
        "cpu",
        "cpuacct",
        "cpuset",
        "memory",
        "devices",
        "freezer",
        "blkio",
        "pids",
        "net_cls",
        "net_prio",
        "perf_event",
        "hugetlb",
        "rdma",
        "misc",
    )
)


def _groups(top: Path) -> list[Path]:
    """``top`` and all groups below it, parents first; nothing if it is not there."""
    found: list[Path] = []
    stack = [top]
    while stack:
        group = stack.pop()
        try:
            with os.scandir(group) as entries:
                stack.extend(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            continue
        found.append(group)
    return found


def _remove(group: Path, deadline: float) -> None:
    """Remove one empty group. A group whose last process is just going is busy for a moment."""
    delay = 0.0005
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise HostError(f"cannot remove control group {group}: {error.strerror}") from error
        time.sleep(delay)
        delay = min(delay * 2, 0.05)
