"""Check that what an object needs is stored whole, and repair it from another store. Findings are values; nothing is raised for them.

Plain: every blob is there and has its size. ``deep``: every byte is read once; each blob against its SHA-256, each segment against its BLAKE3, each chunk
against its, the metadata by the EROFS reader, and the tables for canonical form.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import numpy as np

from dsec_layers.digest import Digest, content_digest
from dsec_layers.erofs.reader import Image
from dsec_layers.errors import CorruptError, DsecError, ImageError, InputError, LimitError, NotFound
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.disk import DiskImage, DiskLayer, parse_pieces
from dsec_layers.layers.manifest import Environment, Layer
from dsec_layers.layers.tables import BLOCK, CHUNK, Table
from dsec_layers.progress import SILENT, Progress, Task
from dsec_layers.registry.collect import referenced
from dsec_layers.registry.objects import children, load_chunks, load_config, load_disk_config, load_metadata, load_object
from dsec_layers.segment import Segment
from dsec_layers.store.base import BlobInfo, Store
from dsec_layers.store.transfer import PIECE, put_stream, read_blob, read_pieces

__all__ = ["Finding", "Problem", "Report", "orphans", "repair", "verify"]

_T = TypeVar("_T")
_AHEAD: Final = 8
"""Segments on their way through the checks, for each blob that is read."""


class Problem(StrEnum):
    """What is wrong with a blob."""

    MISSING = "missing"
    CORRUPT = "corrupt"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: with which blob, what, and ``owner``, the manifest that needs it. UNREADABLE: the store did not answer, which says nothing."""

    problem: Problem
    digest: Digest
    owner: Digest
    detail: str

    def __str__(self) -> str:
        return f"{self.problem} {self.digest}, needed by {self.owner}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Report:
    """What ``verify`` looked at, blobs and their bytes, and what it found."""

    digest: Digest
    blobs: int
    bytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def verify(store: Store, digest: Digest, *, deep: bool = False, progress: Progress = SILENT) -> Report:
    """Check an object and everything below it. Only UsageError is raised, for a text that is no digest."""
    checker = _Checker(store, deep)
    with progress.task(f"Verifying {digest[7:19]}", unit="B") as task:
        checker.task = task
        checker.object(digest, digest)
    return Report(digest, len(checker.seen), sum(checker.seen.values()), tuple(checker.findings))


def orphans(store: Store) -> list[BlobInfo]:
    """The blobs that no ref reaches: what a collection would delete in time. CorruptError if a ref's object cannot be read."""
    blobs = list(store.list())  # before the refs, as a collector does
    needed = referenced(store)
    return [info for info in blobs if info.digest not in needed]


def repair(store: Store, replica: Store, findings: Iterable[Finding], *, progress: Progress = SILENT) -> tuple[Digest, ...]:
    """Fetch what is missing or corrupt from ``replica``, verified; returns what was repaired. What was not is told as warnings.

    A manifest that was missing hides what it needs: verify again after a repair, until nothing is found.
    """
    done: dict[Digest, None] = {}
    for digest in dict.fromkeys(finding.digest for finding in findings if finding.problem in (Problem.MISSING, Problem.CORRUPT)):
        try:
            size = replica.stat(digest).size
            for _ in read_pieces(replica, digest, size):
                pass  # know that the replica is good before anything is removed here
            store.delete(digest)
            put_stream(store, read_pieces(replica, digest, size), digest)
            store.suspect(digest)
            done[digest] = None
        except DsecError as error:
            progress.warning(f"{digest} is not repaired: {error}")
    return tuple(done)


class _Checker:
    def __init__(self, store: Store, deep: bool) -> None:
        self.findings: list[Finding] = []
        self.seen: dict[Digest, int] = {}
        self.task: Task
        self._store = store
        self._deep = deep
        self._lock = threading.Lock()

    def object(self, digest: Digest, owner: Digest) -> None:
        """A manifest and what is below it."""
        value = self._try(digest, owner, lambda: load_object(self._store, digest))
        if value is None:
            return
        self.seen.setdefault(digest, len(value.to_json()))
        if isinstance(value, Environment):
            for item in dict.fromkeys(item.digest for item in children(value)):
                self.object(item, digest)
            return
        whole = [item for item in value.blobs() if self._present(item, digest)]
        present = {item.digest for item in whole}
        if self._deep:
            self._disk(value, digest, present) if isinstance(value, DiskImage) else self._layer(value, digest, present)

    def _present(self, item: Descriptor, owner: Digest) -> bool:
        info = self._try(item.digest, owner, lambda: self._store.stat(item.digest))
        if info is not None and info.size != item.size:
            self._report(Problem.CORRUPT, item.digest, owner, f"it has {info.size} bytes, the descriptor says {item.size}")
            return False
        self.seen.setdefault(item.digest, item.size)
        return info is not None

    def _disk(self, disk: DiskImage, owner: Digest, whole: set[Digest]) -> None:
        """Its config, and each layer's blob against its pieces list."""
        if disk.config.digest in whole:
            self._try(disk.config.digest, owner, lambda: load_disk_config(self._store, disk))
        for layer in disk.layers:
            if {layer.blob.digest, layer.pieces.digest} <= whole:
                self._pieces(layer, owner)

    def _pieces(self, layer: DiskLayer, owner: Digest) -> None:
        """A disk layer's blob: its own digest, and those of its pieces."""
        item, blob = layer.pieces, layer.blob

        def pieces() -> list[Segment]:
            listed = read_blob(self._store, item.digest, limit=item.size, size=item.size)
            return Segment.of_disk(self._store.url, blob.digest, blob.size, parse_pieces(listed, blob.size))

        self._blob(blob, owner, dict(enumerate(self._try(item.digest, owner, pieces) or [])), _Chunks(0, None))

    def _layer(self, layer: Layer, owner: Digest, whole: set[Digest]) -> None:
        if layer.config.digest in whole:
            self._try(layer.config.digest, owner, lambda: load_config(self._store, layer))
        if layer.metadata.digest not in whole:
            return
        if layer.compressed:
            self._blob(layer.metadata, owner, {}, _Chunks(0, None))
            return
        opened = self._try(layer.metadata.digest, owner, lambda: load_metadata(self._store, layer))
        if opened is None:
            return
        image, table = opened
        self._try(layer.metadata.digest, owner, lambda: Image(image).tree())
        chunks = None
        if layer.chunks and layer.chunks.digest in whole:
            chunks = self._try(layer.chunks.digest, owner, lambda: load_chunks(self._store, layer, table))
        index = _Chunks(len(table), chunks)
        of_record = functools.partial(Segment.of_record, self._store.url, layer, table)
        with ThreadPoolExecutor(max(1, min(self._store.capabilities.connections, len(layer.segments)))) as pool:
            waiting = [
                pool.submit(self._blob, item, owner, {at: of_record(at) for at in np.flatnonzero(table["blob"] == number).tolist()}, index)
                for number, item in enumerate(layer.segments)
                if item.digest in whole
            ]
            for future in waiting:
                future.result()

    def _blob(self, item: Descriptor, owner: Digest, segments: Mapping[int, Segment], chunks: _Chunks) -> None:
        """Read a blob once, from its beginning to its end: its own digest, and those of the segments in it, which are in order."""

        def read() -> None:
            state = hashlib.sha256()
            waiting: list[Future[str | None]] = []
            with ThreadPoolExecutor(2) as pool:
                for data, number in self._spans(item, segments):
                    state.update(data)
                    self.task.advance(len(data))
                    if number is not None:
                        waiting.append(pool.submit(chunks.check, number, segments[number], data))
                    while len(waiting) > _AHEAD:
                        self._told(waiting.pop(0).result(), item.digest, owner)
                for future in waiting:
                    self._told(future.result(), item.digest, owner)
            if f"sha256:{state.hexdigest()}" != item.digest:
                raise CorruptError("the bytes do not match the digest")

        self._try(item.digest, owner, read)

    def _spans(self, item: Descriptor, segments: Mapping[int, Segment]) -> Iterator[tuple[bytes, int | None]]:
        """The bytes of a blob in order: a segment's frame with its number, or what is between them."""
        at = 0
        for number, segment in segments.items():
            segment.check()
            yield from self._gap(item.digest, at, segment.offset)
            yield self._store.read(item.digest, segment.offset, segment.stored), number
            at = segment.offset + segment.stored
        yield from self._gap(item.digest, at, item.size)

    def _gap(self, digest: Digest, at: int, end: int) -> Iterator[tuple[bytes, None]]:
        for offset in range(at, end, PIECE):
            yield self._store.read(digest, offset, min(PIECE, end - offset)), None

    def _told(self, detail: str | None, digest: Digest, owner: Digest) -> None:
        if detail is not None:
            self._report(Problem.CORRUPT, digest, owner, detail)

    def _try(self, digest: Digest, owner: Digest, call: Callable[[], _T]) -> _T | None:
        """The answer of ``call``, or None and a finding."""
        try:
            return call()
        except DsecError as error:
            self._report(_problem(error), digest, owner, error.message)
            return None

    def _report(self, problem: Problem, digest: Digest, owner: Digest, detail: str) -> None:
        with self._lock:
            self.findings.append(Finding(problem, digest, owner, detail))


class _Chunks:
    """Which chunks lie in each of a layer's segments; none in the pieces of a disk."""

    def __init__(self, segments: int, chunks: Table | None) -> None:
        self._chunks = np.zeros(0, CHUNK) if chunks is None else chunks[np.argsort(chunks["segment"], kind="stable")]
        self._first = np.searchsorted(self._chunks["segment"], np.arange(segments + 1)) if chunks is not None else None

    def check(self, number: int, segment: Segment, frame: bytes) -> str | None:
        """What is wrong with a segment."""
        offset = segment.offset
        try:
            data = memoryview(segment.decode(frame))
        except ImageError as error:
            return f"the segment at {offset}: {error.message}"
        first, last = (0, 0) if self._first is None else self._first[number : number + 2]
        for row in self._chunks[first:last]:
            start, size = int(row["block"]) * BLOCK, int(row["size"])
            if content_digest(data[start : start + size]) != row["digest"].tobytes():
                return f"the segment at {offset}: the chunk at block {row['block']} does not match its digest"
            if any(data[start + size : start + int(row["blocks"]) * BLOCK]):
                return f"the segment at {offset}: the chunk at block {row['block']} is not padded with zeros"
        return None


def _problem(error: DsecError) -> Problem:
    if isinstance(error, NotFound):
        return Problem.MISSING
    if isinstance(error, CorruptError):
        return Problem.CORRUPT
    if isinstance(error, (InputError, LimitError)):
        return Problem.MALFORMED
    return Problem.UNREADABLE
