"""Giving back page cache that holds the same bytes a second time.

What is read through a mounted image is cached as pages of the mounted file, and as pages of the segment's file beneath. The second copy helps for as long as
neighbours are being read for the first time; after that it is a waste. Segments are written past the page cache (cache/directio.py), so their pages are
always clean and can be dropped at any time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable

from dsec_layers.cache.directory import CacheDirectory

__all__ = ["PageDropper"]


class PageDropper:
    """Drops the pages of present segments ``delay`` seconds after they were fetched. ``later`` may be called from any thread, the rest from one."""

    def __init__(self, directory: CacheDirectory, delay: float) -> None:
        self._directory = directory
        self._delay = delay
        self._due: deque[tuple[float, str]] = deque()

    def later(self, name: str) -> None:
        """A segment was fetched: its reader, and those of its neighbours, are about to read it."""
        self._due.append((time.monotonic() + self._delay, name))

    def run(self) -> None:
        """Drop what is due."""
        now = time.monotonic()
        names = []
        while self._due and self._due[0][0] <= now:
            names.append(self._due.popleft()[1])
        self.drop(names)

    def drop(self, names: Iterable[str]) -> None:
        """Drop the pages of these segments, as far as they are present."""
        for name in names:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME, dir_fd=self._directory.present_fd)
            except OSError:
                continue
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
