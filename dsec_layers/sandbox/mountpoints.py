"""Places to mount on, without a trace in the environment's writable layer.

A runtime creates the mount points that an image lacks, in the writable layer, where they would become part of a build. Here they come instead from a helper
layer, put above the environment's layers and below the writable one: it holds only the missing mount points, and directories leading to them that look
exactly like the environment's own, so that a later copy-up takes nothing foreign along.

The same helper covers hostile shapes. A mount point that is a link or of the wrong type is replaced by one of ours, so that no name the environment
chose is ever followed by the runtime.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from dsec_layers.erofs.overlay import TRUSTED_PREFIX
from dsec_layers.errors import InputError, UsageError
from dsec_layers.sandbox.syscalls import open_in_root

__all__ = ["Plan", "Wanted", "copy_attributes", "plan", "write_helper"]

_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A mount point: absolute path inside, and whether it must be a directory."""

    target: str
    directory: bool


@dataclass(slots=True)
class Plan:
    """Where each wanted target really is (links in its parent directories followed inside the root), and what is missing there.

    ``missing``: path -> whether a directory; parents come before children.
    """

    resolved: dict[str, str] = field(default_factory=dict)
    missing: dict[str, bool] = field(default_factory=dict)

    def add(self, path: str, directory: bool) -> None:
        """Plan for a missing mount point."""
        if self.missing.setdefault(path, directory) is not directory:
            raise UsageError(f"{path} is wanted as a file and as a directory")


def plan(root: Path, wanted: Sequence[Wanted]) -> Plan:
    """Look each target up in the mounted tree ``root``. Raises InputError for a tree that cannot be walked."""
    result = Plan()
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for item in wanted:
            parent = _directory(fd, root, str(PurePosixPath(item.target).parent), result)
            real = str(PurePosixPath(parent) / PurePosixPath(item.target).name)
            result.resolved[item.target] = real
            if real in result.missing or not _is(fd, real, item.directory):
                result.add(real, item.directory)
    except OSError as error:
        raise InputError(f"cannot look up a mount point in the environment: {error.strerror}: {error.filename}") from error
    finally:
        os.close(fd)
    return result


def write_helper(root: Path, helper: Path, missing: dict[str, bool]) -> None:
    """Fill the empty directory ``helper`` with the missing mount points. ``root`` is the mounted tree whose directories the leading ones imitate."""
    made: set[str] = {"/"}
    for path, directory in missing.items():
        for parent in reversed(PurePosixPath(path).parents):
            made.add(str(parent))
            _inside(helper, str(parent)).mkdir(mode=0o755, exist_ok=True)
        place = _inside(helper, path)
        if directory:
            place.mkdir(mode=0o755, exist_ok=True)
        else:
            place.touch(mode=0o644, exist_ok=False)
        os.utime(place, ns=(0, 0))
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Deepest first: making a child changes its parent's times.
        for path in sorted(made, key=len, reverse=True):
            if path in missing:
                os.utime(_inside(helper, path), ns=(0, 0))
            else:
                with _opened(fd, path, os.O_DIRECTORY | os.O_NOFOLLOW) as found:
                    copy_attributes(Path(f"/proc/self/fd/{found}"), _inside(helper, path))
    finally:
        os.close(fd)


def _directory(fd: int, root: Path, path: str, result: Plan) -> str:
    """The real path of a directory inside the root; one that is not there is planned for."""
    if path == "/":
        return path
    try:
        with _opened(fd, path, os.O_DIRECTORY) as found:
            inside = str(Path(f"/proc/self/fd/{found}").readlink())
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
    else:
        prefix = os.fspath(root)
        if inside != prefix and not inside.startswith(prefix + "/"):
            raise InputError(f"{path} of the environment is not inside it")
        real = inside[len(prefix) :] or "/"
        if not any(real == other or real.startswith(other + "/") for other in result.missing):
            return real
    real = str(PurePosixPath(_directory(fd, root, str(PurePosixPath(path).parent), result)) / PurePosixPath(path).name)
    result.add(real, True)
    return real


def _is(fd: int, path: str, directory: bool) -> bool:
    """Whether ``path``, whose parent is a real directory, is of the wanted type itself: a link to one is not."""
    try:
        with _opened(fd, path, os.O_NOFOLLOW) as found:
            mode = os.fstat(found).st_mode
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return False
    return stat.S_ISDIR(mode) if directory else stat.S_ISREG(mode)


def copy_attributes(source: Path, target: Path) -> None:
    """Give the directory ``target`` the owner, mode, extended attributes (overlayfs's own apart) and time of the directory ``source``."""
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)
    target.chmod(stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        if not os.fsencode(name).startswith(TRUSTED_PREFIX):
            with suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _inside(helper: Path, path: str) -> Path:
    return helper / path.lstrip("/")


@contextmanager
def _opened(root: int, path: str, flags: int) -> Iterator[int]:
    fd = open_in_root(root, path, flags)
    try:
        yield fd
    finally:
        os.close(fd)
