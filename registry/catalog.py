"""The catalog: which chunk is in which segment of which blob, so that a builder stores nothing twice. SQLite, for any number of processes of one host.

It is an index and never the truth: losing it loses nothing but dedup until ``rebuild``, and what it says is confirmed by ``Store.touch`` before a layer
refers to it. A file that is damaged or of another version is renamed away and made anew. One catalog is about one store; whoever opens it chooses
a path for each store, on a local file system (write-ahead logging needs shared memory).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np

from dsec_layers.digest import Digest
from dsec_layers.errors import Conflict, DsecError, NoSpace
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.tables import Table
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.index_file import IndexFile
from dsec_layers.registry.objects import find_objects, load_chunks, load_layer, load_metadata, reach
from dsec_layers.store.base import Store

__all__ = ["Catalog", "ChunkAt", "Indexed", "SegmentAt"]

VERSION: Final = 1
Column: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_BATCH: Final = 16384
_EACH: Final = "(SELECT value FROM json_each(?))"

_SCHEMA: Final = """
CREATE TABLE blobs (id INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE);
CREATE TABLE segments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, blob INTEGER NOT NULL, offset INTEGER NOT NULL, stored INTEGER NOT NULL, size INTEGER NOT NULL,
    digest BLOB NOT NULL, UNIQUE (blob, offset));
CREATE TABLE chunks (
    key INTEGER PRIMARY KEY, digest BLOB NOT NULL, segment INTEGER NOT NULL, block INTEGER NOT NULL, blocks INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TABLE layers (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE layer_blobs (blob INTEGER NOT NULL, layer TEXT NOT NULL, PRIMARY KEY (blob, layer)) WITHOUT ROWID;
"""
# chunks.key is the first eight bytes of the digest: a table in the order of its integer key is several times smaller and faster than one keyed by
# 32 bytes. Two chunks with the same key: the second is not indexed, and the comparison of the whole digest makes it a miss.


@dataclass(frozen=True, slots=True)
class SegmentAt:
    """A segment and where its zstd frame is: blob, offset and stored bytes; ``size`` and BLAKE3 ``digest`` of what it holds."""

    blob: Digest
    offset: int
    stored: int
    size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChunkAt:
    """A chunk of ``size`` bytes in a segment: first block, number of blocks."""

    segment: SegmentAt
    block: int
    blocks: int
    size: int


@dataclass(frozen=True, slots=True)
class Indexed:
    """What a catalog holds, or what a walk added; ``skipped`` are layers that could not be read."""

    layers: int
    blobs: int
    segments: int
    chunks: int
    skipped: tuple[Digest, ...] = ()


class Catalog:
    """The catalog in the file ``path``, made if absent. For several threads and processes; use as a context or ``close`` it.

    ``store``: if the file had to be made anew, index that store at once. Errors: Conflict when another process keeps it locked for a minute,
    NoSpace, StoreError for anything else that SQLite reports.
    """

    def __init__(self, path: Path, *, store: Store | None = None, progress: Progress = SILENT) -> None:
        self.path = path
        self._progress = progress
        self._segments: dict[int, SegmentAt] = {}
        self._file = IndexFile(path, _SCHEMA, VERSION, progress)
        if self._file.fresh and store is not None:
            self.rebuild(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def empty(self) -> bool:
        """Whether no chunk is known: then there is no use in looking any up."""
        return self._file.run(lambda sql: sql.execute("SELECT 1 FROM chunks LIMIT 1").fetchone() is None, True)

    def lookup(self, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        """Where chunks are, for those of the 32-byte BLAKE3 digests that are known. Made for tens of thousands at once."""
        return self._file.run(lambda sql: self._lookup(sql, digests), {})

    def add_layer(self, store: Store, digest: Digest) -> bool:
        """Index a layer of the store by its tables. False if it is indexed already, or has no chunk table."""
        return not self._knows(digest) and self._add_loaded(store, digest, load_layer(store, digest))

    def add_tables(self, digest: Digest, layer: Layer, segments: Table, chunks: Table) -> None:
        """Index a layer whose tables are at hand (a builder's own)."""
        blobs = [item.digest for item in layer.segments]
        self._file.run(lambda _: self._insert(digest, blobs, segments, chunks), None)

    def layers_of(self, blob: Digest) -> list[Digest]:
        """The indexed layers that refer to a segments blob, in the order of their digests."""
        query = "SELECT layer FROM layer_blobs JOIN blobs ON blobs.id = layer_blobs.blob WHERE digest = ? ORDER BY layer"
        return self._file.run(lambda sql: [row[0] for row in sql.execute(query, (blob,))], [])

    def forget_blob(self, digest: Digest) -> None:
        """Drop everything that is said to be in a blob, because it is gone."""
        self.forget_blobs([digest])

    def forget_blobs(self, digests: Iterable[Digest]) -> None:
        """Drop everything that is said to be in these blobs, in one pass over the index."""
        gone = json.dumps(list(digests))
        self._file.run(lambda _: self._forget(gone), None)

    def update(self, store: Store) -> Indexed:
        """Index the layers that refs name and that are not indexed yet. Returns what was added."""
        return self._index(store, self._referred(store))

    def rebuild(self, store: Store) -> Indexed:
        """Make the index anew from the store: every layer that a ref reaches, and those that nothing refers to. Returns what it holds."""
        self._file.run(lambda _: self._clear(), None)
        added = self._index(store, self._all(store))
        held = self.holds()
        return Indexed(held.layers, held.blobs, held.segments, held.chunks, added.skipped)

    def holds(self) -> Indexed:
        """How much is indexed."""
        return self._file.run(_holds, Indexed(0, 0, 0, 0))

    # Walks over the store

    def _referred(self, store: Store) -> Iterator[tuple[Digest, Layer | None]]:
        for digest in dict.fromkeys(ref.digest for ref in store.list_refs()):
            try:
                for found, value in reach(store, digest):
                    if isinstance(value, Layer):
                        yield found, value
            except DsecError as error:
                self._progress.warning(f"catalog: {digest} is left out: {error}")
                yield digest, None

    def _all(self, store: Store) -> Iterator[tuple[Digest, Layer | None]]:
        yield from self._referred(store)
        yield from ((info.digest, value) for info, value in find_objects(store) if isinstance(value, Layer))

    def _index(self, store: Store, layers: Iterable[tuple[Digest, Layer | None]]) -> Indexed:
        before, skipped = self.holds(), []
        for digest, layer in layers:
            try:
                if layer is None:
                    skipped.append(digest)
                elif not self._knows(digest):
                    self._add_loaded(store, digest, layer)
            except (Conflict, NoSpace):
                raise
            except DsecError as error:
                self._progress.warning(f"catalog: layer {digest} is left out: {error}")
                skipped.append(digest)
        after = self.holds()
        return Indexed(
            after.layers - before.layers,
            after.blobs - before.blobs,
            after.segments - before.segments,
            after.chunks - before.chunks,
            tuple(skipped),
        )

    def _add_loaded(self, store: Store, digest: Digest, layer: Layer) -> bool:
        if layer.chunks is None:
            return False
        _, segments = load_metadata(store, layer)
        self.add_tables(digest, layer, segments, load_chunks(store, layer, segments))
        return True

    def _knows(self, digest: Digest) -> bool:
        return self._file.run(lambda sql: sql.execute("SELECT 1 FROM layers WHERE digest = ?", (digest,)).fetchone() is not None, False)

    # Under IndexFile.run

    def _lookup(self, sql: sqlite3.Connection, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        found: dict[bytes, ChunkAt] = {}
        for at in range(0, len(digests), _BATCH):
            wanted = set(digests[at : at + _BATCH])
            keys = np.frombuffer(b"".join([digest[:8] for digest in wanted]), ">i8")
            ordered = json.dumps(np.sort(keys).tolist())
            query = f"SELECT digest, segment, block, blocks, size FROM chunks WHERE key IN {_EACH}"
            rows = [row for row in sql.execute(query, (ordered,)) if row[0] in wanted]
            self._load_segments(sql, {row[1] for row in rows} - self._segments.keys())
            for digest, segment, *rest in rows:
                if segment in self._segments:
                    found[digest] = ChunkAt(self._segments[segment], *rest)
        return found

    def _load_segments(self, sql: sqlite3.Connection, numbers: set[int]) -> None:
        rows = sql.execute(
            "SELECT segments.id, blobs.digest, offset, stored, size, segments.digest FROM segments JOIN blobs ON blobs.id = segments.blob"
            f" WHERE segments.id IN {_EACH}",
            (json.dumps(list(numbers)),),
        )
        self._segments.update((number, SegmentAt(*rest)) for number, *rest in rows)

    def _insert(self, layer: Digest, blobs: Sequence[Digest], segments: Table, chunks: Table) -> None:
        with self._file.transaction() as sql:
            sql.executemany("INSERT OR IGNORE INTO blobs (digest) VALUES (?)", [(digest,) for digest in blobs])
            known = dict(sql.execute(f"SELECT digest, id FROM blobs WHERE digest IN {_EACH}", (json.dumps(blobs),)))
            owner = _pick([known[digest] for digest in blobs], segments["blob"])
            places = list(zip(owner, segments["offset"].tolist(), strict=True))
            _insert_segments(sql, owner, segments)
            rows = sql.execute(f"SELECT blob, offset, id FROM segments WHERE blob IN {_EACH}", (json.dumps(sorted(known.values())),))
            numbers = {(blob, offset): number for blob, offset, number in rows}
            _insert_chunks(sql, _pick([numbers[place] for place in places], chunks["segment"]), chunks)
            sql.execute("INSERT OR IGNORE INTO layers (digest) VALUES (?)", (layer,))
            sql.executemany("INSERT OR IGNORE INTO layer_blobs (blob, layer) VALUES (?, ?)", [(number, layer) for number in known.values()])

    def _forget(self, gone: str) -> None:
        with self._file.transaction() as sql:
            blobs = json.dumps([row[0] for row in sql.execute(f"SELECT id FROM blobs WHERE digest IN {_EACH}", (gone,))])
            for statement in (
                f"DELETE FROM chunks WHERE segment IN (SELECT id FROM segments WHERE blob IN {_EACH})",
                f"DELETE FROM segments WHERE blob IN {_EACH}",
                f"DELETE FROM layers WHERE digest IN (SELECT layer FROM layer_blobs WHERE blob IN {_EACH})",  # to be indexed again if it comes back
                f"DELETE FROM layer_blobs WHERE blob IN {_EACH}",
                f"DELETE FROM blobs WHERE id IN {_EACH}",
            ):
                sql.execute(statement, (blobs,))
            self._segments.clear()

    def _clear(self) -> None:
        with self._file.transaction() as sql:
            for table in ("chunks", "segments", "blobs", "layers", "layer_blobs"):
                sql.execute(f"DELETE FROM {table}")
            self._segments.clear()


def _holds(sql: sqlite3.Connection) -> Indexed:
    counts = [sql.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("layers", "blobs", "segments", "chunks")]
    return Indexed(*counts)


def _pick(values: Sequence[int], index: Column) -> list[int]:
    """``values[i]`` for each i of a column."""
    table: list[int] = np.array(values, np.int64)[index].tolist() if len(index) else []
    return table


def _insert_segments(sql: sqlite3.Connection, owner: list[int], segments: Table) -> None:
    columns = (segments[name].tolist() for name in ("offset", "stored", "size", "digest"))
    statement = "INSERT OR IGNORE INTO segments (blob, offset, stored, size, digest) VALUES (?, ?, ?, ?, ?)"
    sql.executemany(statement, zip(owner, *columns, strict=True))


def _insert_chunks(sql: sqlite3.Connection, number: list[int], chunks: Table) -> None:
    keys = np.ascontiguousarray(chunks["digest"]).view(">i8").reshape(-1, 4)[:, 0]
    order = np.argsort(keys, kind="stable")  # in the order of the table's key each page is written once
    table = chunks[order]
    columns = (table[name].tolist() for name in ("digest", "block", "blocks", "size"))
    digest, *rest = columns
    statement = "INSERT OR IGNORE INTO chunks (key, digest, segment, block, blocks, size) VALUES (?, ?, ?, ?, ?, ?)"
    sql.executemany(statement, zip(keys[order].tolist(), digest, np.array(number, np.int64)[order].tolist(), *rest, strict=True))
