"""A directory seen through FUSE, by a process that can be stopped: a store on it then hangs as on a dead network mount.

``python -m tests.kit.stopped_fs SOURCE TARGET`` serves in the foreground. Read-only.
"""

from __future__ import annotations

import os
import sys

import mfusepy

_NAMES = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_mtime_ns", "st_ctime_ns", "st_atime_ns")


class Passed(mfusepy.Operations):  # type: ignore[misc]
    """The files of ``source``."""

    use_ns = True

    def __init__(self, source: str) -> None:
        self._source = source

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Attributes."""
        try:
            found = os.lstat(self._source + path)
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno) from error
        return {name.removesuffix("_ns"): getattr(found, name) for name in _NAMES}

    def readdir(self, path: str, fh: int) -> list[str]:
        """Names."""
        return [".", "..", *os.listdir(self._source + path)]  # noqa: PTH208

    def open(self, path: str, flags: int) -> int:
        """Open."""
        return os.open(self._source + path, os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read."""
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        """Close."""
        os.close(fh)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(Passed(sys.argv[1]), sys.argv[2], foreground=True, ro=True, fsname="stopped")
