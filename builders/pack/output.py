"""Own segments on their way to the store: compressed and hashed by worker threads, written in order by one writer thread.

The calling thread fills buffers and hands them on; it waits only when all buffers are under way, which bounds memory. Everything that depends on
order (offsets, the cut into blobs) happens in the writer thread, in the order of submission, so the number of workers changes no byte.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np
import xxhash
import zstandard

from dsec_layers.digest import content_digest
from dsec_layers.layers.frames import SeekTable
from dsec_layers.layers.tables import SEGMENT, Table
from dsec_layers.store.base import BlobInfo, Store

__all__ = ["BLOB_LIMIT", "BlobOutput", "SegmentBuffer", "SegmentOutput", "Written"]

BLOB_LIMIT: Final = 4 << 30
"""Bytes in a segments blob, its seek table included."""

IN_FLIGHT: Final = 64 << 20
"""Bytes of segment buffers that may be under way at once: reading is faster than compressing, so at the end of the input this much is left to be
compressed while the metadata is made."""

_SEEK_ENTRY: Final = 12
"""Bytes of the seek table a frame."""

_SEEK_REST: Final = 17
"""Bytes of a seek table without entries: frame header and footer."""


class SegmentBuffer:
    """Memory for one segment, used again and again. ``view`` is all of it."""

    __slots__ = ("view",)

    def __init__(self, capacity: int) -> None:
        self.view = memoryview(bytearray(capacity))


class SegmentOutput(Protocol):
    """Where full segments go."""

    def acquire(self, capacity: int) -> SegmentBuffer:
        """A buffer of at least ``capacity`` bytes with anything in it; waits for one if too many are under way."""

    def submit(self, buffer: SegmentBuffer, size: int) -> None:
        """The next segment: the first ``size`` bytes of ``buffer``, which the output takes over."""


@dataclass(slots=True)
class Written:
    """The segments and blobs as they were written: blobs in order, and a SEGMENT record a segment."""

    blobs: list[BlobInfo]
    records: Table


@dataclass(slots=True)
class _Frame:
    """A compressed segment."""

    data: bytes
    digest: bytes
    checksum: int
    size: int


class BlobOutput:
    """Writes segments into segments blobs of ``store``. Use as a context; leaving it on an exception leaves no blob behind.

    ``level`` is zstd's; ``blob_limit`` bounds a blob's size. Errors of the store come out of ``acquire``, ``submit`` or ``result``.
    """

    def __init__(self, store: Store, *, level: int = 3, workers: int = 2, blob_limit: int = BLOB_LIMIT) -> None:
        self._store = store
        self._level = level
        self._blob_limit = blob_limit
        self._local = threading.local()
        self._changed = threading.Condition()
        self._free: list[SegmentBuffer] = []
        self._in_flight = 0
        self._workers = workers
        self._bytes_in_flight = 0
        self._error: BaseException | None = None
        self._abandoned = False
        self._queue: queue.SimpleQueue[tuple[Future[_Frame], SegmentBuffer] | None] = queue.SimpleQueue()
        self._blobs: list[BlobInfo] = []
        self._digests: list[bytes] = []
        self._rows: list[tuple[int, int, int, int]] = []  # size, blob, offset, stored
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="pack-compress")
        self._writer = threading.Thread(target=self._write_all, name="pack-write")
        self._writer.start()
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._abandoned = True
        self.finish()
        self._pool.shutdown(cancel_futures=self._abandoned)
        self._writer.join()

    def acquire(self, capacity: int) -> SegmentBuffer:
        """A buffer of at least ``capacity`` bytes; waits while too much is under way."""
        with self._changed:
            while self._in_flight > self._workers and self._bytes_in_flight + capacity > IN_FLIGHT:
                self._raise_error()
                self._changed.wait()
            for at, buffer in enumerate(self._free):
                if len(buffer.view) >= capacity:
                    return self._free.pop(at)
            self._free.clear()  # all are too small: segments have become larger for good
        return SegmentBuffer(capacity)

    def submit(self, buffer: SegmentBuffer, size: int) -> None:
        """Compress the first ``size`` bytes of ``buffer`` as the next segment."""
        with self._changed:
            self._raise_error()
            self._in_flight += 1
            self._bytes_in_flight += len(buffer.view)
        self._queue.put((self._pool.submit(self._compress, buffer, size), buffer))

    def finish(self) -> None:
        """No more segments come: the last blob is completed and made durable while the caller does something else."""
        if self._open:
            self._open = False
            self._queue.put(None)

    def result(self) -> Written:
        """Wait until every blob is durable in the store."""
        self.finish()
        self._writer.join()
        self._raise_error()
        records = np.zeros(len(self._rows), SEGMENT)
        if len(records):
            records["digest"] = np.frombuffer(b"".join(self._digests), "V32")
            table = np.array(self._rows, np.uint64)
            for column, name in enumerate(("size", "blob", "offset", "stored")):
                records[name] = table[:, column]
        return Written(self._blobs, records)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _compress(self, buffer: SegmentBuffer, size: int) -> _Frame:
        compressor: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=False, write_content_size=True)
            self._local.compressor = compressor
        data = buffer.view[:size]
        return _Frame(compressor.compress(data), content_digest(data), xxhash.xxh64_intdigest(data), size)

    def _write_all(self) -> None:
        try:
            frames = self._frames_in_order()
            frame = next(frames, None)
            while frame is not None:
                frame = self._write_blob(frame, frames)
        except BaseException as error:  # noqa: BLE001  (it is raised again in the calling thread)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _frames_in_order(self) -> Iterator[_Frame]:
        while (item := self._queue.get()) is not None and not self._abandoned:
            future, buffer = item
            frame = future.result()
            with self._changed:
                self._in_flight -= 1
                self._bytes_in_flight -= len(buffer.view)
                self._free.append(buffer)
                self._changed.notify_all()
            yield frame

    def _write_blob(self, frame: _Frame | None, frames: Iterator[_Frame]) -> _Frame | None:
        """One blob, beginning with ``frame``; the frame that did not fit any more, or None at the end."""
        table = SeekTable()
        number, offset, rest = len(self._blobs), 0, _SEEK_REST
        with self._store.writer() as writer:
            while frame is not None and (not offset or offset + len(frame.data) + rest + _SEEK_ENTRY <= self._blob_limit):
                writer.write(frame.data)
                table.add_checksum(len(frame.data), frame.size, frame.checksum)
                self._digests.append(frame.digest)
                self._rows.append((frame.size, number, offset, len(frame.data)))
                offset += len(frame.data)
                rest += _SEEK_ENTRY
                frame = next(frames, None)
            if self._abandoned:
                return None
            writer.write(table.frame())
            self._blobs.append(writer.commit())
        return frame
