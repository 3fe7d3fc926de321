"""Empty files made in advance, so that a mount only has to rename them.

Making an inode usually takes a few microseconds, but ext4 may need a hundred times as long where many inodes of a directory's block group were deleted in the
last minutes (it does not use those again at once, and looks at each): a mount of a thousand absent segments would take half a second. A rename does not.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from typing import Final

from dsec_layers.cache.directory import CacheDirectory

__all__ = ["Stock"]

_log = logging.getLogger(__name__)

SIZE: Final = 2048
_BATCH: Final = 32


class Stock:
    """Empty files in stock/, made by a thread of its own. ``take`` by one thread at a time."""

    def __init__(self, directory: CacheDirectory, size: int = SIZE) -> None:
        self._directory = directory
        self._size = size
        self._names = [entry.name for entry in os.scandir(directory.stock_fd) if entry.stat(follow_symlinks=False).st_size == 0]
        self._next = 1 + max((int(name) for name in self._names if name.isdigit()), default=0)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stock", daemon=True)
        self._thread.start()
        self._wake.set()

    def take(self, name: str) -> bool:
        """Make ``absent/name``, which must not exist, from the stock; False if there is none. Raises OSError."""
        try:
            spare = self._names.pop()
        except IndexError:
            return False
        try:
            os.rename(spare, name, src_dir_fd=self._directory.stock_fd, dst_dir_fd=self._directory.absent_fd)
        except FileNotFoundError:  # deleted by hand
            return self.take(name)
        return True

    def refill(self) -> None:
        """Have the stock filled up, in the background."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while len(self._names) < self._size and not self._closing.is_set():
                began = time.monotonic()
                if not self._make(min(_BATCH, self._size - len(self._names))):
                    break
                # A quarter of the time at most: mounts and fetches go first.
                self._closing.wait(3 * (time.monotonic() - began))
            if self._closing.is_set():
                return

    def _make(self, count: int) -> bool:
        for _ in range(count):
            name = str(self._next)
            self._next += 1
            try:
                os.mknod(name, stat.S_IFREG | 0o600, dir_fd=self._directory.stock_fd)
            except FileExistsError:
                continue
            except OSError as error:  # a full disk: mounts make what they need themselves, or say so
                _log.info("stock of empty files: %s", error)
                return False
            self._names.append(name)
        return True
