"""The cache directory: where things are, who may change them, and which segments can be trusted.

::

    absent/HEX      a segment that is not here; empty (or, where the kernel needs it, a hole of the right size). Watched by the daemon
    present/HEX     a complete segment, verified when it was written
    staging/        segments being written for readers outside the kernel, before they are renamed into present/
    stock/          empty files, to become absent segments
    metadata/       metadata images, segment tables and manifests of layers
    images/         whole images of layers in the compressed layout
    layers/         mount points, one a layer
    state/          records of mounts and leases, and of boots that ended well
    poisoned/       absent segments of mounts that must not be served any more (fuse/mounts/aftermath.py)
    lock            held (flock) by the one process that may change any of this

HEX is the segment's BLAKE3 digest. All of it may be deleted by hand while no mount uses it.

**Trust.** A complete segment carries the stamp of the boot in which it was verified, as its modification time. A segment is trusted if its size is right and
its stamp is of this boot or of an earlier one that ended well (everything was synced). So a segment whose data a power loss swallowed, one that was
truncated, and one that somebody wrote into are all *suspect*, and are hashed before they are used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final, Self

from dsec_layers.errors import Conflict, DsecError, StoreError
from dsec_layers.fsio import map_os_error, write_atomic
from dsec_layers.linux.process import boot_id, sync_file_system

__all__ = ["CacheDirectory", "CacheView", "lock", "note_holder", "stamp_of"]

FOLDERS: Final = ("absent", "present", "staging", "stock", "metadata", "images", "layers", "state")
_MAX_BOOTS: Final = 64


def stamp_of(boot: str) -> int:
    """The modification time, in nanoseconds, of segments verified in ``boot``: whole seconds (some file systems keep no more) from 2001 to 2014."""
    return (10**9 + int.from_bytes(hashlib.sha256(boot.encode()).digest()[:6], "big") % (4 * 10**8)) * 10**9


class CacheView:
    """The places of a cache, for whoever only looks: the one who may change things is ``CacheDirectory``."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - links in the user's path stay
        self.absent, self.present, self.staging, self.stock, self.metadata, self.images, self.layers, self.state = (
            self.root / name for name in FOLDERS
        )
        self.boot = boot_id()
        self.stamp = stamp_of(self.boot)
        self._trusted = {self.stamp, *map(stamp_of, self._read_boots())}

    def is_trusted(self, status: os.stat_result, size: int) -> bool:
        """Whether a file with this ``status`` is a complete segment of ``size`` bytes that need not be hashed again."""
        return status.st_size == size and status.st_mtime_ns in self._trusted and stat.S_ISREG(status.st_mode)

    def _read_boots(self) -> list[str]:
        """The boots that ended well."""
        try:
            value: Any = json.loads((self.state / "boots.json").read_bytes())
        except (OSError, ValueError):
            return []  # gone or junk: every segment of an earlier boot is suspect, which is always right
        return [boot for boot in value if isinstance(boot, str)] if isinstance(value, list) else []


class CacheDirectory(CacheView):
    """The directory, locked by this process. Use as a context; raises Conflict if somebody else holds it.

    ``absent_fd``, ``present_fd``, ``staging_fd``, ``stock_fd`` are descriptors of those folders, so that the many small operations in them resolve no paths.
    """

    def __init__(self, root: Path, *, lock_fd: int | None = None) -> None:
        super().__init__(root)
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._lock_fd = lock_fd if lock_fd is not None else lock(self.root)
            for name in FOLDERS:
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
            self.absent_fd, self.present_fd, self.staging_fd, self.stock_fd = map(
                _open_folder, (self.absent, self.present, self.staging, self.stock)
            )
            self._begin()
        except OSError as error:
            raise map_os_error(error, f"cache {self.root}") from error

    def set_stamp(self, fd: int) -> None:
        """Mark an open file as verified in this boot."""
        os.utime(fd, ns=(self.stamp, self.stamp))

    def reopen(self) -> None:
        """Open absent/ again, after another directory has taken its place."""
        os.close(self.absent_fd)
        self.absent_fd = _open_folder(self.absent)

    def end(self) -> None:
        """Record that all is durable: segments of this boot stay trusted after the next one. Call when nothing writes any more."""
        sync_file_system(self.root)
        self._write_boots([*(boot for boot in self._read_boots() if boot != self.boot), self.boot])

    def close(self) -> None:
        """Let go of the lock."""
        for fd in (self.absent_fd, self.present_fd, self.staging_fd, self.stock_fd, self._lock_fd):
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Take back what ``end`` recorded for this boot, as writing goes on, and remove what was being written."""
        boots = self._read_boots()
        if self.boot in boots:
            self._write_boots([boot for boot in boots if boot != self.boot])
        for name in os.listdir(self.staging_fd):  # noqa: PTH208 - a descriptor
            os.unlink(name, dir_fd=self.staging_fd)

    def _write_boots(self, boots: list[str]) -> None:
        write_atomic(self.state / "boots.json", json.dumps(boots[-_MAX_BOOTS:]).encode(), mode=0o600)


def lock(root: Path) -> int:
    """Take the lock of a cache; returns the descriptor that holds it. Conflict, naming the process, if it is held."""
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
        os.close(fd)
        raise Conflict(f"cache {root} is in use by process {holder or 'unknown'}", hint="ask its daemon, or use another cache") from None
    except OSError as error:
        os.close(fd)
        raise _unlockable(root, error) from error
    note_holder(fd, os.getpid())
    return fd


def note_holder(fd: int, pid: int) -> None:
    """Write into a lock that is held who holds it, for messages."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{pid}\n".encode(), 0)


def _unlockable(root: Path, error: OSError) -> DsecError:
    return StoreError(f"cannot lock cache {root}: {error.strerror}", hint="put the cache on a local file system")


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
