"""The writable layer: data appended to one file, what it means appended to another.

This module and upper_journal are the only ones of the package that work on files, through descriptors that the caller opened and keeps.

What is acknowledged is on the disk: ``flush`` first makes the data durable, then appends the index entries that name it, then makes those durable. So an
entry in the index file never names data that could be missing, and a crash can only tear the end of the index. ``Upper.open`` drops such an end and says
so. Nothing is ever overwritten; space comes back by punching holes where no segment reaches any more, and only after the entries that killed the old data
are durable and the reads that could still see it are done.

With a journal, what is acknowledged but not flushed survives the process too, if not the host; see upper_journal.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from uuid import uuid4

import numpy as np

from dsec_layers.blocksource import FileSource
from dsec_layers.digest import Buffer
from dsec_layers.errors import Conflict, ImageCode, ImageError, LimitError, StoreError
from dsec_layers.fsio import map_os_error, pread_exact, pwrite_all
from dsec_layers.linux.fallocate import punch_hole, reserve
from dsec_layers.overlaybd.layer import LsmtLayer, parse_log, read_upper_headers
from dsec_layers.overlaybd.lsmt import ENTRY, MAX_LENGTH, NIL_UUID, SPACE, Flags, Header, encode_entries
from dsec_layers.overlaybd.packing import seal_tail
from dsec_layers.overlaybd.segments import MAX_SEGMENTS, SECTOR, Ints, Segments
from dsec_layers.overlaybd.upper_index import UpperIndex, dead_blocks
from dsec_layers.overlaybd.upper_journal import RING, Journal

__all__ = ["MAX_PENDING", "Recovery", "Upper", "UpperFile"]

MAX_PENDING = 65536
"""Index entries kept in memory between flushes; one more makes a flush."""

_MAX_WRITE = 8192  # sectors in a data segment, as the official tools write them
_BLOCK = 4096  # bytes; what the file system gives back
_ROOM = 4096  # index entries for which space is set aside at a time
_PUNCHES = 4096  # holes made by one flush, so that it does not take long; the rest waits for the next
_NO_BLOCKS: Ints = np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening an upper found: ``entries`` good ones, and what was cut off behind them (``dropped`` whole entries, ``reason`` empty if none).

    ``replayed`` of the good ones came from the journal of a process that was killed.
    """

    entries: int
    dropped: int = 0
    reason: str = ""
    replayed: int = 0


@dataclass(frozen=True, slots=True)
class _Grave:
    """Dead blocks, as (first, end) rows, and the last generation of reads that may still look at them."""

    generation: int
    blocks: Ints


class UpperFile:
    """An upper's data file, usable where a descriptor is: it keeps what lay in it when it was made from being given back to the file system."""

    __slots__ = ("_done", "_fd")

    def __init__(self, fd: int, done: Callable[[], None]) -> None:
        self._fd = fd
        self._done = done

    def __index__(self) -> int:
        return self._fd

    def __del__(self) -> None:
        self._done()


class Upper:
    """An append-mode read-write layer. Sectors in, sectors out: whole 512-byte sectors only; alignment and what lies below are the disk's affair.

    Thread-safe. The process that has an upper open holds an advisory lock on its data file; it goes with the descriptor.
    """

    def __init__(
        self, data_fd: int, index_fd: int, header: Header, mapping: Segments, recovery: Recovery, journal: Journal | None = None
    ) -> None:
        """Use ``create`` or ``open``."""
        self.header = header
        self.recovery = recovery
        self._data_fd = data_fd
        self._index_fd = index_fd
        self._tail = os.fstat(data_fd).st_size
        self._entries = recovery.entries
        self._next = recovery.entries  # the number of the next entry, counting those in memory
        self._journal = journal
        self._index = UpperIndex(mapping)
        self._pending: list[tuple[int, int, int, bool]] = []
        self._state = ""  # why nothing can be written any more
        self._lock = threading.Lock()  # guards everything here; not held while a sync waits for the disk
        self._flush_lock = threading.Lock()
        self._generation = 0
        self._readers: Counter[int] = Counter()
        self._left: deque[int] = deque()
        self._since = 0  # sectors written or discarded since dead blocks were last looked for
        self._freed = _NO_BLOCKS
        self._graves: list[_Grave] = []
        self._punching = True
        self._reserved = 0  # entries that the index file has space for; -1: the file system cannot say

    @classmethod
    def create(
        cls, data_fd: int, index_fd: int, virtual_size: int, *, uuid: str | None = None, parent_uuid: str = NIL_UUID, user_tag: bytes = b"",
        journal_fd: int | None = None,
    ) -> Upper:  # fmt: skip
        """Make a new upper of two empty files open for reading and writing, and a third one if it is to have a journal.

        ``virtual_size`` is in bytes, 0 for that of the layers below.

        Durable when it returns, but for the files' names, which are the caller's. Raises Conflict for files that are in use or not empty.
        """
        with _mapped("upper"):
            _lock_file(data_fd)
            if os.fstat(data_fd).st_size or os.fstat(index_fd).st_size:
                raise Conflict("a new upper needs empty files")
            header = Header(Flags.UPPER_DATA, 0, 0, virtual_size, uuid or str(uuid4()).upper(), parent_uuid, user_tag)
            pwrite_all(index_fd, replace(header, flags=Flags.UPPER_INDEX, index_offset=SPACE).render(), 0)
            pwrite_all(data_fd, header.render(), 0)
            os.fsync(index_fd)
            os.fsync(data_fd)
        return cls(data_fd, index_fd, header, UpperIndex().settle(), Recovery(0), _journal(journal_fd, header))

    @classmethod
    def open(cls, data_fd: int, index_fd: int, *, max_dropped: int = MAX_PENDING, journal_fd: int | None = None) -> Upper:
        """Open the files of an upper for writing; an end of the index torn by a crash is cut off, and ``recovery`` says so.

        What the journal has of a process that was killed since the host started comes back, and is durable when this returns.

        A crash can tear no more than what one flush appends. More than ``max_dropped`` unusable entries are damage of another kind and raise ImageError,
        as do files that are not a pair or already sealed. Raises Conflict when another process has the upper open.
        """
        with _mapped("upper"):
            _lock_file(data_fd)
            data, index = FileSource(data_fd, name="upper data"), FileSource(index_fd, name="upper index")
            header = read_upper_headers(data, index)
            _refuse_sealed(data, header)
            mapping, good, reason = parse_log(index, data.size // SECTOR)
            dropped = (index.size - SPACE) // ENTRY - good
            if dropped > max_dropped:
                raise ImageError(
                    f"upper index: {reason}; {dropped} entries would be lost, more than a crash can tear",
                    code=ImageCode.TRUNCATED,
                    hint="raise max_dropped to salvage the rest",
                )
            os.ftruncate(data_fd, -(-data.size // SECTOR) * SECTOR)  # entries to come name its end in whole sectors
            if reason:
                os.ftruncate(index_fd, SPACE + good * ENTRY)
                os.fdatasync(index_fd)
            journal = _journal(journal_fd, header)
            replayed = _replay(journal, good, data_fd, index_fd) if journal is not None else 0
            if replayed:
                mapping, good, wrong = parse_log(FileSource(index_fd, name="upper index"), os.fstat(data_fd).st_size // SECTOR)
                if wrong:
                    raise ImageError(f"upper journal: {wrong}", code=ImageCode.INCONSISTENT)
        return cls(data_fd, index_fd, header, mapping, Recovery(good, dropped, reason, replayed), journal)

    @property
    def virtual_size(self) -> int:
        """Bytes of the disk, 0 when the layers below say."""
        return self.header.virtual_size

    def write(self, first: int, data: Buffer) -> None:
        """Write whole sectors from sector ``first`` on. After an error each of them holds what it held or what it was to hold."""
        with self._lock, _mapped("upper data"):
            self._check_writable()
            at = self._tail
            if not len(data) % _BLOCK:  # keeps whole blocks whole in the file, so that they can be given back one by one
                at = -(-at // _BLOCK) * _BLOCK
            pwrite_all(self._data_fd, data, at)
            self._tail = at + len(data)
            end = first + len(data) // SECTOR
            self._make_room(1 + (end - first) // _MAX_WRITE)
            self._since += end - first
            for lba in range(first, end, _MAX_WRITE):
                self._append(lba, min(lba + _MAX_WRITE, end), at // SECTOR + lba - first)
            full = len(self._pending) >= MAX_PENDING
        if full:
            self.flush()

    def discard(self, first: int, end: int) -> None:
        """Let ``[first, end)`` read as zeros, whatever lies below."""
        with self._lock, _mapped("upper index"):
            self._check_writable()
            self._make_room(1 + (end - first) // MAX_LENGTH)
            place = self._tail // SECTOR
            for lba in range(first, end, MAX_LENGTH):
                self._enter(lba, min(lba + MAX_LENGTH, end), place, True)
            self._since += end - first
            full = len(self._pending) >= MAX_PENDING
        if full:
            self.flush()

    def read(self, first: int, end: int) -> list[tuple[int, int, bytes | None]]:
        """What the upper has of ``[first, end)``, in order: (sector, end sector, data, or None for zeros). What it does not have is left out."""
        with self._lock:
            pieces = list(self._index.pieces(first, end))
            if not pieces:
                return []
            generation = self._generation
            self._readers[generation] += 1
        try:
            return self._load(pieces)
        finally:
            with self._lock:
                self._leave(generation)

    def places(self, first: int, end: int) -> tuple[list[tuple[int, int, int, bool]], UpperFile | None]:
        """As ``read``, but where the data lies: (sector, end sector, first sector in the data file, zeroed), and that file, for sendfile(2) and the like.

        What a place holds does not change while the file object lives; None if there are no places.
        """
        with self._lock:
            pieces = list(self._index.pieces(first, end))
            if not pieces:
                return [], None
            self._let_go()
            self._readers[self._generation] += 1
            return pieces, UpperFile(self._data_fd, functools.partial(self._left.append, self._generation))

    def _leave(self, generation: int) -> None:
        """A read that began in ``generation`` is done. Called with the lock held."""
        self._readers[generation] -= 1
        if not self._readers[generation]:
            del self._readers[generation]

    def _let_go(self) -> None:
        """Count out the file objects that are gone. They only leave a note: the collector may take one while this very thread holds the lock."""
        while self._left:
            self._leave(self._left.popleft())

    def mapped(self, first: int, end: int, limit: int) -> list[tuple[int, int, bool]]:
        """As ``read`` without the data, at most ``limit`` pieces: (sector, end sector, whether zeroed)."""
        with self._lock:
            return [(lba, stop, zeroed) for lba, stop, _, zeroed in islice(self._index.pieces(first, end), limit)]

    def flush(self) -> None:
        """Make everything that was written before durable. After a failure, other than a full disk, the upper takes no more writes: reopen it."""
        with self._flush_lock:
            with self._lock:
                if self._state and self._pending:
                    raise StoreError(f"the upper {self._state}")
                batch, self._pending = self._pending, []
                if batch and self._since * SECTOR >= 256 * len(self._index):
                    self._bury()
            if batch:
                self._persist(batch)
            self._reap()

    def freeze(self) -> LsmtLayer:
        """Flush, then take no more writes: the upper as a layer that can be read, stacked and committed, while the descriptors are open. Idempotent."""
        self.flush()
        with self._flush_lock, self._lock:
            if self._pending:
                raise Conflict("the upper was written to while it was being frozen")
            self._state = self._state or "is frozen"
            self._graves.clear()
            if self._journal is not None:
                with _mapped("upper journal"):
                    self._journal.forget()
            return LsmtLayer(self.header, self._index.settle(), (FileSource(self._data_fd, self._tail, name="upper data"),))

    def seal(self) -> LsmtLayer:
        """Freeze, then append index and trailer to the data file, which makes it a sealed layer by itself. The index file is then of no more use.

        Raises LimitError above the format's number of segments; the upper is frozen all the same.
        """
        layer = self.freeze()
        tail = seal_tail(layer.segments, self.header, self._tail)
        with _mapped("upper data"):
            os.ftruncate(self._data_fd, self._tail)
            pwrite_all(self._data_fd, tail, self._tail)
            os.fsync(self._data_fd)
        return replace(layer, header=Header.parse(tail[-SPACE:]))

    def _check_writable(self) -> None:
        if self._state:
            raise StoreError(f"the upper {self._state}")

    def _make_room(self, count: int) -> None:
        """Set space aside for ``count`` more entries: a full disk must refuse the write, not the flush after it, which a guest's file system does not forgive."""
        wanted = self._next + count
        if wanted <= self._reserved or self._reserved < 0:
            return
        try:
            reserve(self._index_fd, SPACE, (wanted + _ROOM) * ENTRY)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self._reserved = -1
        else:
            self._reserved = wanted + _ROOM

    def _append(self, lba: int, end: int, moffset: int) -> None:
        """Enter a data segment, as the continuation of the one before if it is."""
        if self._pending:
            start, stop, place, zeroed = self._pending[-1]
            if stop == lba and place + stop - start == moffset and not zeroed and end - start <= _MAX_WRITE:
                self._record(self._next - 1, start, end, place, False)
                if self._index.extend(start, stop, end):
                    self._pending[-1] = (start, end, place, False)
                    return
        self._enter(lba, end, moffset, False)

    def _enter(self, lba: int, end: int, moffset: int, zeroed: bool) -> None:
        self._record(self._next, lba, end, moffset, zeroed)
        self._next += 1
        self._index.insert(lba, end, moffset, zeroed)
        self._pending.append((lba, end, moffset, zeroed))

    def _record(self, number: int, lba: int, end: int, moffset: int, zeroed: bool) -> None:
        if self._journal is None:
            return
        if number - self._entries >= RING:
            raise StoreError("the upper has taken more than it could flush")
        self._journal.put(number, lba, end, moffset, zeroed)

    def _load(self, pieces: list[tuple[int, int, int, bool]]) -> list[tuple[int, int, bytes | None]]:
        loaded: list[tuple[int, int, bytes | None]] = []
        at = 0
        while at < len(pieces):
            lba, end, moffset, zeroed = pieces[at]
            at += 1
            while (
                at < len(pieces) and pieces[at][0] == end and pieces[at][3] == zeroed and (zeroed or pieces[at][2] == moffset + end - lba)
            ):
                end = pieces[at][1]
                at += 1
            loaded.append((lba, end, None if zeroed else self._pread(moffset, end - lba)))
        return loaded

    def _pread(self, moffset: int, sectors: int) -> bytes:
        try:
            return pread_exact(self._data_fd, sectors * SECTOR, moffset * SECTOR)
        except EOFError as error:
            raise StoreError(f"upper data: {error}") from error
        except OSError as error:
            raise map_os_error(error, "upper data") from error

    def _persist(self, batch: list[tuple[int, int, int, bool]]) -> None:
        """Data, then entries, each durable before the next step. Entries go out in portions, so that a crash tears no more than one of them."""
        done, retry = 0, False
        try:
            if self._entries + len(batch) > MAX_SEGMENTS:
                raise LimitError(f"the upper's index would have more than {MAX_SEGMENTS} entries", hint="commit it and start a new one")
            os.fdatasync(self._data_fd)
            while done < len(batch):
                portion = batch[done : done + MAX_PENDING]
                retry = True
                pwrite_all(self._index_fd, _encode(portion), SPACE + self._entries * ENTRY)
                retry = False
                os.fdatasync(self._index_fd)
                self._entries += len(portion)
                done += len(portion)
        except (OSError, LimitError) as error:
            with self._lock:
                self._pending = batch[done:] + self._pending
                # After a failed sync the kernel may have dropped the pages and report success the next time: only a fresh start knows the truth.
                if not retry:
                    if self._journal is not None:
                        self._journal.forget()
                    self._state = f"could not be flushed ({error})"
            raise (map_os_error(error, "upper") if isinstance(error, OSError) else error) from error

    def _bury(self) -> None:
        """Find the blocks that will be dead once the present flush is durable. Called with the lock held."""
        mapping = self._index.settle()
        end = self._tail // SECTOR
        block = _BLOCK // SECTOR
        blocks = dead_blocks(mapping, self._freed, SPACE // SECTOR, end, block)
        self._since = 0
        if self._punching and len(blocks):
            self._graves.append(_Grave(self._generation, blocks))
            self._freed = dead_blocks(mapping, _NO_BLOCKS, SPACE // SECTOR, end, block)
            self._generation += 1

    def _reap(self) -> None:
        """Give back dead blocks that no read can see any more. Called with the flush lock held, after a good flush."""
        budget = _PUNCHES
        while self._graves and budget and self._punching:
            with self._lock:
                self._let_go()
                if not self._graves or min(self._readers, default=self._generation) <= self._graves[0].generation:
                    return
                grave = self._graves.pop(0)
                now, later = grave.blocks[:budget], grave.blocks[budget:]
                if len(later):
                    self._graves.insert(0, replace(grave, blocks=later))
            budget -= len(now)
            try:
                for first, end in now.tolist():
                    punch_hole(self._data_fd, first * SECTOR, (end - first) * SECTOR)
            except OSError:  # a file system without holes: the space stays taken, nothing else is lost
                self._punching = False


def _encode(batch: list[tuple[int, int, int, bool]]) -> bytes:
    rows = np.array(batch, np.int64).reshape(-1, 4)
    return encode_entries(Segments(rows[:, 0], rows[:, 1], rows[:, 2], np.zeros(len(rows), np.int16), rows[:, 3].astype(np.bool_)))


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise map_os_error(error, what) from error


def _journal(fd: int | None, header: Header) -> Journal | None:
    return Journal(fd, header.uuid) if fd is not None else None


def _replay(journal: Journal, good: int, data_fd: int, index_fd: int) -> int:
    """Append what the journal has to the index, in the order of a flush; how many entries that is."""
    entries = journal.after(good)
    if entries:
        os.fdatasync(data_fd)
        pwrite_all(index_fd, entries, SPACE + good * ENTRY)
        os.fdatasync(index_fd)
    return len(entries) // ENTRY


def _lock_file(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict("the upper is open elsewhere") from error
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):  # a file system without locks
            raise


def _refuse_sealed(data: FileSource, header: Header) -> None:
    """Raise ImageError for an upper that was sealed in place. What a guest wrote last may look like a trailer, but has another UUID."""
    try:
        trailer = Header.parse(data.pread(max(0, data.size - SPACE), SPACE))
    except ImageError:
        return
    if trailer.flags & Flags.SEALED and trailer.uuid.upper() == header.uuid.upper():
        raise ImageError("the upper has been sealed: it is a read-only layer now", code=ImageCode.INCONSISTENT)
