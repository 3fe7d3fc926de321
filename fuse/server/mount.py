"""Mounting layers by the FUSE driver: the server's file, and EROFS on it (through a loop device where the kernel cannot mount a file)."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Final

from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.errors import DsecError, HostError
from dsec_layers.fuse.client.options import QUIET
from dsec_layers.fuse.server.flat import FOLDER
from dsec_layers.linux.loop import attach_loop
from dsec_layers.linux.mount import mount_erofs, umount
from dsec_layers.linux.mountinfo import is_mount_point, read_mounts
from dsec_layers.proc import inherited_environment, run

__all__ = ["FlatMounter"]

_log = logging.getLogger(__name__)
_START: Final = 60.0


class FlatMounter:
    """Mounts layers on their flat images; starts the server at the first. ``loop``: always through a loop device."""

    def __init__(self, cache: Path, *, loop: bool = False) -> None:
        self._cache = cache
        self._folder = cache / FOLDER
        self._loop = loop
        self._lock = threading.Lock()

    def mount(self, files: LayerFiles, target: Path) -> None:
        """Mount a layer at ``target``. A compressed layer is one image anyway, and needs no server."""
        if files.layer.compressed:
            self._mount_file(files.image, target)
            return
        image = self._folder / f"{files.digest.removeprefix('sha256:')}.erofs"
        with self._lock:
            self._serve()
        self._mount_file(image, target)

    def check(self) -> None:
        """If the server died, detach it and the layers that were mounted on it: they can be mounted anew; who still uses them gets errors."""
        with self._lock:
            if self._is_alive():
                return
            _log.error("the FUSE server of %s died; readers of its mounts get errors", self._folder)
            for mount in read_mounts():
                if mount.target.startswith(f"{self._cache / 'layers'}/") and mount.target.endswith(".fuse"):
                    umount(mount.target, lazy=True)
            umount(self._folder, lazy=True)

    def _is_alive(self) -> bool:
        """Whether the server answers; also true where there is none yet."""
        try:
            os.statvfs(self._folder)  # attributes may be answered from the kernel's cache, this never is
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            return False
        return True

    def stop(self) -> None:
        """End the server. For when no layer is mounted on it."""
        try:
            umount(self._folder, lazy=not self._is_alive())
        except DsecError:
            pass

    def _mount_file(self, image: Path, target: Path) -> None:
        if not self._loop:
            try:
                mount_erofs(image, target)
                return
            except HostError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.ENOTBLK:
                    raise
        fd, device = attach_loop(image)
        try:
            mount_erofs(device, target, (), ("ro",))  # else the kernel opens the device for writing
        finally:
            os.close(fd)  # the mount holds the device

    def _serve(self) -> None:
        """Have a server that answers."""
        if self._folder.is_dir() and (mount := is_mount_point(self._folder)) is not None and mount.kind.startswith("fuse"):
            return
        done = run(
            [sys.executable, "-P", "-m", "dsec_layers.fuse.server.flat", "--cache", self._cache],
            check=False,
            env=inherited_environment() | QUIET,
            timeout=_START,
        )
        if done.code != 0:
            words = done.stderr.decode(errors="replace").strip()
            raise HostError(f"the FUSE server did not start: {words}", hint="is /dev/fuse there, and libfuse3 installed?")
