"""Results of build steps on local disk, by key.

An entry is a directory ``KEY`` with what was made in it (``tree``, or ``root.tar``). It appears by a rename after everything in it is durable, and is locked
(flock, shared) as long as a build uses it, so that eviction by another process leaves it alone. What a build that died left half made is unlocked and goes at
the next start. The whole cache may be deleted at any time while no build runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dsec_layers.errors import Conflict, HostError
from dsec_layers.fsio import fsync_directory, map_os_error
from dsec_layers.linux.process import sync_file_system
from dsec_layers.sandbox.state import remove_tree

__all__ = ["StepCache"]

_KEY: Final = re.compile(r"[0-9a-f]{64}\Z")
_NEW: Final = ".new-"
_SIZE: Final = "size"
LIMIT: Final = 20 << 30
"""Bytes on disk beyond which the least recently used entries go."""


class StepCache:
    """The entries of one directory. Use as a context: what was got or put stays until it ends. ``fresh``: nothing kept from before is used."""

    def __init__(self, directory: Path, *, fresh: bool = False, limit: int = LIMIT) -> None:
        self._directory = directory
        self._fresh = fresh
        self._limit = limit
        self._held: dict[str, int] = {}

    def __enter__(self) -> Self:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.chmod(0o700)  # what a step wrote may be set-user-id
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise map_os_error(error, f"making {self._directory}") from error
            raise HostError(f"cannot make {self._directory}: {error.strerror}") from error
        with self._locked():
            left = [path for path in self._directory.iterdir() if path.name.startswith(_NEW)]
            abandoned = [(path, fd) for path in left if (fd := _lock(path, fcntl.LOCK_EX)) is not None]
        for path, fd in abandoned:
            remove_tree(path)
            os.close(fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        if kind is None:
            self.prune()

    def get(self, key: str) -> Path | None:
        """The directory of an entry, None if there is none."""
        if key in self._held:
            return self._directory / key
        return None if self._fresh else self._hold(key)

    @contextmanager
    def new(self, key: str) -> Iterator[Path]:
        """A directory to fill. When the context ends well it becomes the entry ``key``, unless another build was faster: then theirs stays."""
        assert _KEY.match(key), key
        place = self._directory / f"{_NEW}{os.urandom(8).hex()}"
        with self._locked():
            place.mkdir(mode=0o700)
            fd = _lock(place, fcntl.LOCK_EX)
        assert fd is not None
        try:
            yield place
            try:
                self._publish(place, key, fd)
            except OSError as error:
                raise map_os_error(error, f"the step cache {self._directory}") from error
        finally:
            remove_tree(place)
            if self._held.get(key) != fd:
                os.close(fd)

    def prune(self) -> list[str]:
        """Remove the least recently used entries that no build uses, until the rest fits the limit; returns their keys."""
        entries = []
        for path in self._directory.iterdir():
            if _KEY.match(path.name):
                with suppress(FileNotFoundError, ValueError):
                    entries.append((path.stat().st_mtime_ns, path, int((path / _SIZE).read_text())))
        total = sum(size for _, _, size in entries)
        removed = []
        for _, path, size in sorted(entries):
            if total <= self._limit:
                break
            if self._remove(path):
                total -= size
                removed.append(path.name)
        return removed

    def _remove(self, path: Path) -> bool:
        """Take an entry out of sight, then away. False if a build uses it."""
        with self._locked():
            fd = _lock(path, fcntl.LOCK_EX)
            if fd is None:
                return False
            hidden = path.with_name(f"{_NEW}old-{os.urandom(8).hex()}")
            path.rename(hidden)
        remove_tree(hidden)
        os.close(fd)
        return True

    def _publish(self, place: Path, key: str, fd: int) -> None:
        (place / _SIZE).write_text(str(_disk_use(place)))
        # The layers of a sandbox are volatile: nothing in them has been made durable yet.
        sync_file_system(place)
        target = self._directory / key
        if self._fresh and target.exists() and not self._remove(target):
            raise Conflict(f"another build uses the cached step {key[:12]}", hint="wait for it to end, or build without --no-cache")
        with self._locked():
            try:
                place.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                found = _lock(target, fcntl.LOCK_SH)
            else:
                fsync_directory(self._directory)
                fcntl.flock(fd, fcntl.LOCK_SH)
                found = fd
        if found is None:
            raise Conflict(f"the cached step {key[:12]} is being removed by somebody else", hint="build again")
        self._held[key] = found

    def _hold(self, key: str) -> Path | None:
        path = self._directory / key
        with self._locked():
            fd = _lock(path, fcntl.LOCK_SH)
            if fd is None:
                return None
            os.utime(path)
        self._held[key] = fd
        return path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _lock(path: Path, how: int) -> int | None:
    """Lock a directory without waiting: its descriptor, None if it is gone or somebody else has it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _disk_use(path: Path) -> int:
    total = 0
    stack = [path]
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                total += status.st_blocks * 512
                if stat.S_ISDIR(status.st_mode):
                    stack.append(Path(entry.path))
    return total
