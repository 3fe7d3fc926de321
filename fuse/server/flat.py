"""The FUSE driver: each layer as one read-only file that is its flat image.

    <cache>/flat/<hex of the manifest digest>.erofs

For kernels without pre-content events, and for VMMs that map or read an image. The server is a process of its own: it reads complete segments from the
cache and asks the daemon for the others, so that it outlives the daemon's workers. If it dies itself, readers get errors (ENOTCONN), never wrong bytes.

``python -m dsec_layers.fuse.server.flat --cache DIR`` mounts <cache>/flat and serves it in the background.
"""

from __future__ import annotations

import argparse
import errno
import functools
import logging
import os
import re
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import mfusepy

from dsec_layers.cache.directory import CacheView
from dsec_layers.cache.flat import FlatImage
from dsec_layers.cache.metadata import local_layer_files
from dsec_layers.cache.segments import errno_of
from dsec_layers.errors import DsecError
from dsec_layers.fuse.client.host import HostPool
from dsec_layers.fuse.records import source_of

__all__ = ["FOLDER", "FlatFiles", "main"]

FOLDER: Final = "flat"
_NAME: Final = re.compile(r"/([0-9a-f]{64})\.erofs\Z")
_MOST_IDLE: Final = 16
"""Images that stay open though no file is."""
_THREADS: Final = 512
"""Readers that may wait at once, of all stores; one thread each, made when it is needed."""
_MAX_THREADS_SINCE: Final = (3, 12)
_T = TypeVar("_T", bound=Callable[..., Any])


def _mapped(method: _T) -> _T:
    """Errors of the cache as errnos."""

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except DsecError as error:
            logging.getLogger(__name__).error("%s", error.message)
            raise mfusepy.FuseOSError(errno_of(error)) from error

    return call  # type: ignore[return-value]


class FlatFiles(mfusepy.Operations):  # type: ignore[misc]
    """The file system: a flat directory. A layer's file is there once its metadata is in the cache, whether ``readdir`` shows it or not."""

    use_ns = True

    def __init__(self, cache: Path) -> None:
        self._view = CacheView(cache)
        self._pool = HostPool(cache)
        self._lock = threading.Lock()
        self._images: OrderedDict[str, _Image] = OrderedDict()  # those used last at the end
        self._born = 0

    def init_with_config(self, conn_info: Any, _: Any) -> None:
        """Let the kernel ask for as much at once as there are threads: by default 12 requests to read ahead that wait for one store stop all others."""
        conn_info.max_background = _THREADS
        conn_info.congestion_threshold = _THREADS * 3 // 4

    @_mapped
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Attributes of the directory or of an image."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2, "st_uid": os.geteuid(), "st_gid": os.getegid()}
        return {
            "st_mode": stat.S_IFREG | 0o400,
            "st_nlink": 1,
            "st_size": self._size(path),
            "st_uid": os.geteuid(),
            "st_gid": os.getegid(),
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        """The images that are open, or were looked at lately."""
        with self._lock:
            return [".", "..", *(f"{name}.erofs" for name in sorted(self._images))]

    @_mapped
    def open(self, path: str, flags: int) -> int:
        """Open an image for reading."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise mfusepy.FuseOSError(errno.EROFS)
        self._take(path)
        return 0

    @_mapped
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """A range of an image; what is absent is fetched."""
        image = self._take(path)
        try:
            offset = min(offset, image.size)
            return image.pread(offset, min(size, image.size - offset))
        finally:
            self._drop(path)

    def release(self, path: str, fh: int) -> int:
        """The end of an open file: nobody uses its image, unless it is open otherwise."""
        self._drop(path)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """No free space: nothing can be written."""
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 0, "f_bfree": 0, "f_bavail": 0, "f_namemax": 255}

    def _size(self, path: str) -> int:
        image = self._take(path)
        self._drop(path)
        return image.size

    def _take(self, path: str) -> FlatImage:
        """The image at a path, which stays open until ``_drop``."""
        found = _NAME.match(path)
        if not found:
            raise mfusepy.FuseOSError(errno.ENOENT)
        with self._lock:
            shown = self._images.get(found[1])
            if shown is not None:
                return shown.take()
        digest = f"sha256:{found[1]}"
        store = source_of(self._view.state, digest)
        files = local_layer_files(self._view, store, digest) if store else None
        if files is None:
            raise mfusepy.FuseOSError(errno.ENOENT)
        opened = FlatImage.of_layer(files, self._pool)
        with self._lock:
            shown = self._images.setdefault(found[1], _Image(opened))
            image = shown.take()
        if image is not opened:
            opened.close()
        return image

    def _drop(self, path: str) -> None:
        """The image at a path has one user less. Of those that nobody uses the last few stay open: they are looked at before they are opened."""
        name = path[1:].removesuffix(".erofs")
        with self._lock:
            shown = self._images[name]
            shown.users -= 1
            if shown.users:
                return
            self._images.move_to_end(name)
            idle = [key for key, shown in self._images.items() if not shown.users]
            closing = [self._images.pop(key) for key in idle[:-_MOST_IDLE]]
        for shown in closing:
            shown.image.close()


@dataclass(slots=True)
class _Image:
    image: FlatImage
    users: int = 0

    def take(self) -> FlatImage:
        """The image, for one user more."""
        self.users += 1
        return self.image


def _thread_options() -> dict[str, int]:
    """Libraries before 3.12 start as many threads as are needed, and do not know the option."""
    version = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor)
    return {"max_threads": _THREADS} if version >= _MAX_THREADS_SINCE else {}


def main(argv: list[str] | None = None) -> int:
    """Mount the flat images of a cache and serve them in the background; returns (in the caller's process) when they can be read."""
    parser = argparse.ArgumentParser(
        prog="dsec_layers.fuse.server.flat", description="Serve the layers of a cache as flat images over FUSE."
    )
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="the cache directory")
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground")
    arguments = parser.parse_args(argv)
    cache = arguments.cache.absolute()
    folder = cache / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    log = open(cache / "flat.log", "a")  # noqa: SIM115 - lives as long as the process
    logging.basicConfig(stream=log, level=logging.WARNING, format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s")
    try:
        mfusepy.FUSE(
            FlatFiles(cache),
            str(folder),
            foreground=arguments.foreground,
            ro=True,
            kernel_cache=True,
            fsname="dsec-layers",
            entry_timeout=60,
            attr_timeout=60,
            **_thread_options(),
        )
    except RuntimeError as error:
        sys.stderr.write(f"cannot mount {folder}: libfuse says {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
