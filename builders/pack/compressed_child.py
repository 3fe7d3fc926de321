"""The part of the compressed layout that runs in a mount namespace of its own: it mounts the scratch image and then works on the mount.

    unshare --mount python -m dsec_layers.builders.pack.compressed_child mkfs METADATA DATA POINT PROGRAM ARGUMENT...
    unshare --mount python -m dsec_layers.builders.pack.compressed_child compare METADATA DATA POINT IMAGE OTHER-POINT

The mounts end with the process. ``compare`` exits 1 and names the first difference of two trees, content included.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from dsec_layers.errors import DsecError
from dsec_layers.linux.mount import mount_erofs

__all__ = ["compare_trees", "main"]

_PIECE = 1 << 20


def main(arguments: Sequence[str]) -> int:
    """Mount and do what the first argument says; the exit code."""
    verb, metadata, data, point, *rest = arguments
    try:
        mount_erofs(metadata, point, [data] if Path(data).exists() else [])
        if verb == "mkfs":
            os.execv(rest[0], rest)
        mount_erofs(rest[0], rest[1])
        difference = compare_trees(os.fsencode(point), os.fsencode(rest[1]))
    except (DsecError, OSError) as error:
        difference = str(error)
    if difference:
        print(difference, file=sys.stderr)
    return 1 if difference else 0


def compare_trees(one: bytes, two: bytes) -> str | None:
    """The first difference between two directory trees: names, attributes, links, extended attributes, content. None if there is none."""
    links: dict[int, int] = {}
    back: dict[int, int] = {}
    stack = [b""]
    while stack:
        path = stack.pop()
        left, right = os.lstat(one + path), os.lstat(two + path)
        what = _attributes(left, right)
        if links.setdefault(left.st_ino, right.st_ino) != right.st_ino or back.setdefault(right.st_ino, left.st_ino) != left.st_ino:
            what = "hard links"
        what = what or _more(one + path, two + path, left)
        if what:
            return f"{os.fsdecode(path) or '/'}: {what}"
        if stat.S_ISDIR(left.st_mode):
            stack += [path + b"/" + name for name in _names(one + path)]
    return None


def _attributes(left: os.stat_result, right: os.stat_result) -> str | None:
    for name in ("st_mode", "st_uid", "st_gid", "st_mtime_ns", "st_nlink", "st_rdev"):
        if getattr(left, name) != getattr(right, name):
            return name
    sized = stat.S_ISREG(left.st_mode) or stat.S_ISLNK(left.st_mode)
    return "st_size" if sized and left.st_size != right.st_size else None


def _more(left: bytes, right: bytes, found: os.stat_result) -> str | None:
    names = sorted(os.listxattr(left, follow_symlinks=False))
    if names != sorted(os.listxattr(right, follow_symlinks=False)):
        return "names of extended attributes"
    if any(os.getxattr(left, name, follow_symlinks=False) != os.getxattr(right, name, follow_symlinks=False) for name in names):
        return "extended attributes"
    if stat.S_ISLNK(found.st_mode):
        return "target" if os.readlink(left) != os.readlink(right) else None  # noqa: PTH115  (paths are bytes here)
    if stat.S_ISDIR(found.st_mode):
        return "names" if _names(left) != _names(right) else None
    if stat.S_ISREG(found.st_mode):
        return None if _same_content(left, right) else "content"
    return None


def _names(directory: bytes) -> list[bytes]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries)


def _same_content(left: bytes, right: bytes) -> bool:
    with open(left, "rb", buffering=0) as one, open(right, "rb", buffering=0) as two:
        while True:
            piece = one.read(_PIECE)
            other = b"" if not piece else two.read(len(piece))
            while len(other) < len(piece) and (more := two.read(len(piece) - len(other))):
                other += more
            if piece != other:
                return False
            if not piece:
                return not two.read(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
