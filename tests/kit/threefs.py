"""A double of a 3FS mount for tests: where 3FS differs from a local POSIX file system, calls below ``root`` behave as on 3FS.

No 3FS can run in a test (it needs FoundationDB and several services), so this is what compatibility is tested against. The differences, from the source of
deepseek-ai/3FS (src/fuse/FuseOps.cc, docs in design_notes.md):

* no xattrs (ENOTSUP), no fallocate (EOPNOTSUPP), SEEK_DATA and SEEK_HOLE know only the end, locks hold on one host only, no atomic append: used, the test fails;
* times have whole seconds; fsync of a directory does nothing;
* each client caches: "no such file" for 5 s, attributes and names for 30 s (here ``negative`` and ``positive`` seconds); a client sees its own changes at once;
* a file opened for reading is not kept when its last name goes: soon its bytes read as zeros, without an error.

``as_client`` switches between clients of the same mount.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_TIMES = {"st_atime", "st_mtime", "st_ctime"}


def _error(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class _Stat:
    """A stat result with whole seconds."""

    def __init__(self, real: os.stat_result) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name in _TIMES:
            return float(int(value))
        return value // 10**9 * 10**9 if name.removesuffix("_ns") in _TIMES else value


class ThreeFS:
    """Makes calls of ``os`` below ``root`` behave as on 3FS until the monkeypatch is undone."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, *, negative: float = 0.2, positive: float = 1.0) -> None:
        self.root = str(root)
        self.client = "one"
        self._negative = negative
        self._positive = positive
        self._missing: dict[tuple[str, str], float] = {}
        self._known: dict[tuple[str, str], tuple[float, os.stat_result]] = {}
        self._real = {name: getattr(os, name) for name in ("stat", "fstat", "open", "pread", "utime", "fsync", "lseek")}
        for name in ("stat", "fstat", "open", "pread", "utime", "fsync", "lseek"):
            patch.setattr(os, name, getattr(self, f"_{name}"))
        for name in ("link", "rename", "replace", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, self._changing(getattr(os, name)))
        for name, number in (("setxattr", errno.ENOTSUP), ("getxattr", errno.ENODATA), ("posix_fallocate", errno.EOPNOTSUPP)):
            patch.setattr(os, name, self._refusing(getattr(os, name), number))
        for name in ("flock", "lockf"):
            patch.setattr(fcntl, name, self._refusing(getattr(fcntl, name), None))

    @contextmanager
    def as_client(self, name: str) -> Iterator[None]:
        """Calls inside come from another host."""
        before, self.client = self.client, name
        try:
            yield
        finally:
            self.client = before

    def _ours(self, path: Any) -> str | None:
        """The path if it is on the mount. A descriptor counts by the path it was opened under."""
        text = self._real_path(path) if isinstance(path, int) else os.fspath(path)
        return text if isinstance(text, str) and text.startswith(self.root) else None

    @staticmethod
    def _real_path(fd: int) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")  # noqa: PTH115
        except OSError:
            return ""

    def _stat(self, path: Any, **options: Any) -> Any:
        ours = self._ours(path)
        if ours is None or isinstance(path, int):
            return self._real["stat"](path, **options)
        key, now = (self.client, ours), time.monotonic()
        if self._missing.get(key, 0) > now:
            raise FileNotFoundError(errno.ENOENT, "cached: no such file", ours)
        expiry, known = self._known.get(key, (0.0, None))
        if known is not None and expiry > now:
            return _Stat(known)
        try:
            found = self._real["stat"](path, **options)
        except FileNotFoundError:
            self._missing[key] = now + self._negative
            raise
        self._known[key] = now + self._positive, found
        return _Stat(found)

    def _fstat(self, fd: int) -> Any:
        found = self._real["fstat"](fd)
        return found if self._ours(fd) is None else _Stat(found)

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        ours = self._ours(path)
        if ours is not None:
            assert not flags & os.O_APPEND, "append is not atomic on 3FS"
            if flags & os.O_CREAT:
                self._forget(ours)
            elif self._missing.get((self.client, ours), 0) > time.monotonic():
                raise FileNotFoundError(errno.ENOENT, "cached: no such file", ours)
        try:
            return int(self._real["open"](path, flags, mode, **options))
        except FileNotFoundError:
            if ours is not None:
                self._missing[self.client, ours] = time.monotonic() + self._negative
            raise

    def _pread(self, fd: int, length: int, offset: int) -> bytes:
        data: bytes = self._real["pread"](fd, length, offset)
        gone = self._ours(fd) is not None and self._real["fstat"](fd).st_nlink == 0
        return bytes(len(data)) if gone else data

    def _utime(self, path: Any, times: Any = None, **options: Any) -> None:
        ours = self._ours(path)
        if ours is None or isinstance(path, int):
            self._real["utime"](path, times, **options)
            return
        expiry, known = self._known.get((self.client, ours), (0.0, None))
        if known is not None and expiry > time.monotonic():
            path = self._by_inode(known.st_ino) or path  # a client goes by the inode that it remembers under this name
        seconds = [int(value) for value in (times or (time.time(), time.time()))]
        self._real["utime"](path, tuple(seconds))
        self._forget(ours)

    def _by_inode(self, number: int) -> str | None:
        for directory, _, names in os.walk(self.root):
            for name in names:
                if self._real["stat"](f"{directory}/{name}").st_ino == number:
                    return f"{directory}/{name}"
        return None

    def _fsync(self, fd: int) -> None:
        if self._ours(fd) is None or not stat.S_ISDIR(self._real["fstat"](fd).st_mode):
            self._real["fsync"](fd)

    def _lseek(self, fd: int, offset: int, whence: int) -> int:
        if self._ours(fd) is None or whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            return int(self._real["lseek"](fd, offset, whence))
        size: int = self._real["fstat"](fd).st_size
        if offset >= size:
            raise _error(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else size

    def _changing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*paths: Any, **options: Any) -> Any:
            try:
                return call(*paths, **options)
            finally:
                for path in paths:
                    if not isinstance(path, int) and (ours := self._ours(path)) is not None:
                        self._forget(ours)

        return run

    def _refusing(self, call: Callable[..., Any], number: int | None) -> Callable[..., Any]:
        def run(subject: Any, *rest: Any, **options: Any) -> Any:
            if self._ours(subject if isinstance(subject, (int, str, Path)) else subject.fileno()) is None:
                return call(subject, *rest, **options)
            assert number is not None, f"{call.__name__} does nothing between hosts on 3FS"
            raise _error(number, subject)

        return run

    def _forget(self, path: str) -> None:
        """What this client did itself it sees."""
        self._missing.pop((self.client, path), None)
        self._known.pop((self.client, path), None)
