"""The mount table of this process's namespace, from /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MountPoint", "file_system_of", "is_mount_point", "mount_of", "read_mounts"]

TABLE: Final = Path("/proc/self/mountinfo")
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One mount. ``device`` is major:minor as text; ``target`` and ``source`` are unescaped."""

    identifier: int
    device: str
    root: str
    target: str
    kind: str
    source: str


def read_mounts(table: Path = TABLE) -> list[MountPoint]:
    """All mounts, in the order in which they were made: of several on one target the last is the visible one."""
    return [_parse(line) for line in table.read_bytes().splitlines()]


def is_mount_point(path: Path) -> MountPoint | None:
    """The mount that is visible at exactly ``path`` (absolute, without links), or None."""
    wanted = str(path)
    return next((mount for mount in reversed(read_mounts()) if mount.target == wanted), None)


def mount_of(fd: int) -> MountPoint | None:
    """The mount that an open file was opened in, or None if this namespace has it no more."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines()
    identifier = next(int(line.split()[1]) for line in lines if line.startswith(b"mnt_id:"))
    return next((mount for mount in read_mounts() if mount.identifier == identifier), None)


def file_system_of(path: Path, table: Path = TABLE) -> str:
    """The type of the file system that holds ``path``: ext4, tmpfs, … ; "unknown" if the table does not say. The mount itself is not asked: it may hang.

    Links in ``path`` are followed before.
    """
    wanted = path.resolve()
    best: MountPoint | None = None
    for mount in read_mounts(table):
        target = Path(mount.target)
        if (wanted == target or target in wanted.parents) and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    return best.kind if best else "unknown"


def _parse(line: bytes) -> MountPoint:
    left, _, right = line.partition(b" - ")
    fields = left.split(b" ")
    kind, source = right.split(b" ")[:2]
    return MountPoint(int(fields[0]), fields[2].decode(), _text(fields[3]), _text(fields[4]), _text(kind), _text(source))


def _text(field: bytes) -> str:
    return _ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field).decode(errors="surrogateescape")
