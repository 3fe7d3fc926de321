"""Complete segments for readers inside and outside the kernel, by one fetch code.

A *fetch* is a segment on its way (cache/fetch.py tells how it goes); whoever wants the segment meanwhile joins it. Where a mounted image has the absent file open, that very file must be filled
(the kernel holds it, not its name): a reader in the kernel hands over a descriptor of it with its event, for a reader in user space it is opened by name.

Nothing is visible before it is verified, and nothing is taken for complete by its name alone: a complete segment has the right size and a trusted stamp
(cache/directory.py), which is set after the last byte was written.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from dsec_layers.cache.directio import read_whole, write_whole
from dsec_layers.cache.directory import CacheDirectory, CacheView
from dsec_layers.cache.fetch import Counters, Fetch, Fetcher, Waiter
from dsec_layers.cache.stock import Stock
from dsec_layers.digest import Buffer, content_digest
from dsec_layers.errors import CorruptError, DsecError, NoSpace
from dsec_layers.fsio import map_os_error, pread_exact
from dsec_layers.segment import Segment

__all__ = ["SegmentCache", "Usage", "errno_of", "open_present"]

_log = logging.getLogger(__name__)

_REOPEN: Final = 3
_ROOM: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """Complete segments in the cache: how many, and their bytes on the disk."""

    segments: int
    bytes: int


@dataclass(slots=True)
class _File:
    """The file that a fetch is to fill: the place of a segment. ``fd``: a descriptor of it that raises no events; None to find the file by name."""

    cache: SegmentCache
    piece: Segment
    fd: int | None

    def is_here(self) -> bool:
        """See Place: complete, or suspect and right after all, or in another file of the cache."""
        cache, piece, fd = self.cache, self.piece, self.fd
        # A descriptor that came with an event raises none itself, but one that was opened again after a restart does (fuse/events/adopt.py).
        with cache._writers.claim(piece.name), cache._own_write(piece.name):
            if fd is None:
                return cache._is_here_by_name(piece)
            if cache._is_right(fd, piece):
                cache._publish(fd, piece.name)
                return True
            present = cache.open_present(piece)
            if present is None:
                return False
            try:
                data = read_whole(present, piece.size)
            except EOFError:
                return False
            finally:
                os.close(present)
            if content_digest(data) != piece.digest:
                return False
            cache._fill(fd, data, piece.name)
            return True

    def keep(self, data: Buffer) -> None:
        """See Place."""
        cache, piece = self.cache, self.piece
        with cache._writers.claim(piece.name), cache._own_write(piece.name):
            if self.fd is not None:
                if not cache.directory.is_trusted(os.fstat(self.fd), piece.size):
                    cache._fill(self.fd, data, piece.name)
                return
            try:
                fd = os.open(piece.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=cache.directory.absent_fd)
            except FileNotFoundError:
                present = cache.open_present(piece)
                if present is None:
                    cache._store(piece.name, data)
                else:  # another was faster than this store
                    os.close(present)
                return
            try:
                cache._fill(fd, data, piece.name)
            finally:
                os.close(fd)

    def close(self) -> None:
        """See Place."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class SegmentCache:
    """Segments of a locked cache directory. Thread-safe.

    ``holes``: absent segments are holes of the right size instead of empty files. Empty is better, as a read that nobody holds back fails instead of giving zeros,
    but some kernels take a short read from an image's device for data (fuse/events/probe.py finds out). ``stock``: empty files made in advance, for fast mounts.
    """

    def __init__(self, directory: CacheDirectory, fetcher: Fetcher, *, holes: bool = False, stock: Stock | None = None) -> None:
        self.directory = directory
        self.fetcher = fetcher
        self._holes = holes
        self._stock = None if holes else stock
        self._lock = threading.Lock()
        self._fetches: dict[bytes, Fetch] = {}
        self._names = threading.Lock()
        self._writers = _Claims()
        self._own_writes: set[str] = set()
        self.make_room: Callable[[int], int] = lambda _: 0
        """Called when the disk is full: removes what nobody uses, returns how many bytes that gave."""
        self.published: Callable[[str], None] = lambda _: None
        """Told the name of each segment that became present for a reader in the kernel."""

    # ---- readers in user space

    def open(self, piece: Segment) -> int:
        """A read-only descriptor of the complete segment, which is fetched first if it is absent; the caller closes it.

        Raises CorruptError, NotFound or StoreError (the fetch failed, within its deadline), NoSpace.
        """
        for _ in range(_REOPEN):
            fd = self.open_present(piece)
            if fd is not None:
                return fd
            self.fetch(piece)
        raise CorruptError(f"{piece}: the cache {self.directory.root} loses it as soon as it is there")

    def open_present(self, piece: Segment) -> int | None:
        """As ``open``, but None if the segment is absent or suspect."""
        return open_present(self.directory, piece)

    def read(self, piece: Segment, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset`` of the segment, as ``open``."""
        fd = self.open(piece)
        try:
            return pread_exact(fd, length, offset)
        except EOFError as error:
            raise CorruptError(f"{piece}: {error}") from error
        except OSError as error:
            raise map_os_error(error, str(piece)) from error
        finally:
            os.close(fd)

    def fetch(self, piece: Segment) -> None:
        """Wait until the segment is present. Errors as ``open``."""
        outcome: list[DsecError | None] = []
        ready = threading.Event()

        def done(error: DsecError | None) -> None:
            outcome.append(error)
            ready.set()

        self.want([piece], done)
        ready.wait()
        if outcome[0] is not None:
            raise outcome[0]

    # ---- both

    def want(self, pieces: Sequence[Segment], waiter: Waiter, fd: int | None = None) -> None:
        """Have a segment fetched, and tell ``waiter`` the outcome from another thread.

        ``pieces``: the same segment in one or more places, best first. ``fd``: a descriptor of the file to fill, open for reading and writing, that raises no
        events (it is duplicated). When the waiter is told None, the segment is present, and the file behind ``fd`` is complete.
        """
        piece = pieces[0]
        with self._lock:
            fetch = self._fetches.get(piece.digest)
            if fetch is not None and fetch.join(waiter if fd is None else self._checked(pieces, waiter, fd)):
                return
            new = self._fetches[piece.digest] = Fetch(pieces, _File(self, piece, None if fd is None else os.dup(fd)))
            new.waiters += [lambda _: self._forget(piece.digest, new), waiter]
        self.fetcher.submit(new)

    def is_own_write(self, name: str) -> bool:
        """Whether this process is at work on the absent file ``name``: an event that it raises itself must be let through."""
        return name in self._own_writes

    def _checked(self, pieces: Sequence[Segment], waiter: Waiter, fd: int) -> Waiter:
        """A waiter that joins a fetch which may fill another file than the one it has open: then a fetch of its own follows."""

        def check(error: DsecError | None) -> None:
            try:
                if error is None and not self.directory.is_trusted(os.fstat(fd), pieces[0].size):
                    self.want(pieces, waiter, fd)
                    return
            except OSError as failure:  # no descriptor left, say
                error = map_os_error(failure, f"cache {self.directory.root}")
            waiter(error)

        return check

    def _forget(self, digest: bytes, fetch: Fetch) -> None:
        with self._lock:
            if self._fetches.get(digest) is fetch:
                del self._fetches[digest]

    # ---- finding and storing a segment; in fetcher threads

    def _is_here_by_name(self, piece: Segment) -> bool:
        for folder in (self.directory.present_fd, self.directory.absent_fd):
            try:
                fd = os.open(piece.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                continue
            try:
                right = self._is_right(fd, piece)
                if right and folder == self.directory.absent_fd:
                    self._publish(fd, piece.name)
            finally:
                os.close(fd)
            if right:
                return True
            if folder == self.directory.present_fd:
                self._drop(piece.name)
        return False

    def _is_right(self, fd: int, piece: Segment) -> bool:
        """Whether a file is complete; a suspect one is hashed, and stamped if it is right."""
        status = os.fstat(fd)
        if self.directory.is_trusted(status, piece.size):
            return True
        if status.st_size != piece.size or status.st_blocks == 0:
            return False
        try:
            right = content_digest(read_whole(fd, piece.size)) == piece.digest
        except EOFError:
            return False
        if right:
            self.directory.set_stamp(fd)
        else:
            self.fetcher.count(healed=1)
            _log.warning("cached segment %s is damaged and is fetched again", piece.name)
        return right

    def _fill(self, fd: int, data: Buffer, name: str) -> None:
        """Make ``data`` the content of an absent file, and the file present if it is the one that has the name."""
        try:
            self._write(fd, data)
            self.directory.set_stamp(fd)
        except OSError as error:
            # Nothing half written stays, and its space is given back. Truncating raises an event even through a descriptor whose writes raise none.
            with suppress(OSError):
                os.ftruncate(fd, 0)
                if self._holes:
                    os.ftruncate(fd, len(data))
            raise map_os_error(error, f"cache {self.directory.root}") from error
        self._publish(fd, name)

    def _write(self, fd: int, data: Buffer) -> None:
        """Write, if need be after making room once."""
        try:
            write_whole(fd, data)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.make_room(_ROOM):
                raise
            write_whole(fd, data)

    def _publish(self, fd: int, name: str) -> None:
        """Move a complete file from absent/ to present/, unless the name there belongs to another file."""
        status = os.fstat(fd)
        with self._names:
            try:
                named = os.stat(name, dir_fd=self.directory.absent_fd, follow_symlinks=False)
            except FileNotFoundError:
                return
            if (named.st_dev, named.st_ino) == (status.st_dev, status.st_ino):
                os.rename(name, name, src_dir_fd=self.directory.absent_fd, dst_dir_fd=self.directory.present_fd)
        self.published(name)

    def _store(self, name: str, data: Buffer) -> None:
        """A new present file that no mount has open."""
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self.directory.staging_fd)
            try:
                self._write(fd, data)
                self.directory.set_stamp(fd)
            finally:
                os.close(fd)
            os.rename(name, name, src_dir_fd=self.directory.staging_fd, dst_dir_fd=self.directory.present_fd)
        except OSError as error:
            with suppress(OSError):
                os.unlink(name, dir_fd=self.directory.staging_fd)
            raise map_os_error(error, f"cache {self.directory.root}") from error

    def _drop(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.directory.present_fd)

    @contextmanager
    def _own_write(self, name: str) -> Iterator[None]:
        self._own_writes.add(name)
        try:
            yield
        finally:
            self._own_writes.discard(name)

    # ---- mounts

    @contextmanager
    def devices(self, names: Iterable[str], sizes: Iterable[int]) -> Iterator[list[str]]:
        """Paths of the segments' files for an image's devices, complete or not. No segment changes its name while the context lasts: mount in it.

        A present segment that cannot be trusted is moved to absent/, where its first reader has it hashed; one of the wrong size is dropped.
        """
        with self._names:
            try:
                paths = self._device_paths(names, sizes)
            except OSError as error:
                raise map_os_error(error, f"cache {self.directory.root}") from error
            yield paths
        if self._stock is not None:
            self._stock.refill()

    def has_all(self, names: Iterable[str], sizes: Iterable[int]) -> bool:
        """Whether all these segments are complete."""
        for name, size in zip(names, sizes, strict=True):
            try:
                if not self.directory.is_trusted(os.stat(name, dir_fd=self.directory.present_fd, follow_symlinks=False), size):
                    return False
            except OSError:
                return False
        return True

    def _device_paths(self, names: Iterable[str], sizes: Iterable[int]) -> list[str]:
        directory = self.directory
        present_fd, is_trusted = directory.present_fd, directory.is_trusted
        present, absent = f"{directory.present}/", f"{directory.absent}/"
        paths = []
        for name, size in zip(names, sizes, strict=True):
            try:
                status = os.stat(name, dir_fd=present_fd, follow_symlinks=False)
            except FileNotFoundError:
                self._make_absent(name, size)
            else:
                if is_trusted(status, size):
                    paths.append(present + name)
                    continue
                self._doubt(name, size, status)
            paths.append(absent + name)
        return paths

    def _make_absent(self, name: str, size: int) -> None:
        directory = self.directory
        if self._has_absent(name) or (self._stock is not None and self._stock.take(name)):
            return
        if not self._holes:
            os.mknod(name, stat.S_IFREG | 0o600, dir_fd=directory.absent_fd)
            return
        # Setting the size of a watched file would raise an event: make the hole elsewhere.
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=directory.staging_fd)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        os.rename(name, name, src_dir_fd=directory.staging_fd, dst_dir_fd=directory.absent_fd)

    def _doubt(self, name: str, size: int, status: os.stat_result) -> None:
        directory = self.directory
        if status.st_size == size and stat.S_ISREG(status.st_mode) and not self._has_absent(name):
            os.rename(name, name, src_dir_fd=directory.present_fd, dst_dir_fd=directory.absent_fd)
            return
        self.fetcher.count(healed=1)
        _log.warning("cached segment %s has %d bytes instead of %d and is fetched again", name, status.st_size, size)
        self._drop(name)
        self._make_absent(name, size)

    def _has_absent(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.directory.absent_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    # ---- housekeeping

    def usage(self) -> Usage:
        """What is complete."""
        count = total = 0
        with os.scandir(self.directory.present_fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    count += 1
        return Usage(count, total)

    def clear(self, keep: set[str]) -> Usage:
        """Remove every segment, absent or present, whose name is not in ``keep``; returns what the removed present ones took.

        The caller sees to it that ``keep`` has all segments of live mounts and that none is mounted meanwhile.
        """
        count = total = 0
        for folder in (self.directory.present_fd, self.directory.absent_fd):
            for name in os.listdir(folder):  # noqa: PTH208 - a descriptor
                if name in keep:
                    continue
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    os.unlink(name, dir_fd=folder)
                    if folder == self.directory.present_fd:
                        count += 1
                        total += status.st_blocks * 512
        return Usage(count, total)

    def evict(self, wanted: int, in_use: set[str]) -> int:
        """Remove present segments that are not ``in_use``, those first that came first, until they gave ``wanted`` bytes; returns what they gave.

        One that a mount has open all the same goes on being read there, and gives its space back when that ends.
        """
        candidates = []
        with os.scandir(self.directory.present_fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name not in in_use:
                        candidates.append((status.st_ctime_ns, entry.name, status.st_blocks * 512))
        freed = 0
        for _, name, size in sorted(candidates):
            if freed >= wanted:
                break
            with self._names, suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.directory.present_fd)
                freed += size
        if freed:
            _log.info("removed segments of %d bytes that no mounted layer has", freed)
        return freed

    def counters(self) -> Counters:
        """What was fetched since this object was made."""
        return self.fetcher.snapshot()


def open_present(view: CacheView, piece: Segment) -> int | None:
    """A read-only descriptor of a complete segment of a cache, or None if it is absent or suspect. For any process: needs no lock."""
    try:
        fd = os.open(f"{view.present}/{piece.name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise map_os_error(error, f"cache {view.root}") from error
    if view.is_trusted(os.fstat(fd), piece.size):
        return fd
    os.close(fd)
    return None


class _Claims:
    """At most one thread at a time works on a name."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._free = threading.Condition()

    @contextmanager
    def claim(self, name: str) -> Iterator[None]:
        with self._free:
            while name in self._held:
                self._free.wait()
            self._held.add(name)
        try:
            yield
        finally:
            with self._free:
                self._held.discard(name)
                self._free.notify_all()


def errno_of(error: DsecError | None) -> int:
    """The errno a reader gets for an outcome: 0, ENOSPC or EIO."""
    if error is None:
        return 0
    return errno.ENOSPC if isinstance(error, NoSpace) else errno.EIO
