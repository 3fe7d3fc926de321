"""Small real layers for tests of stores and the registry, packed in the plainest way: one chunk after the other, a few chunks a segment."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import xxhash

from dsec_layers.digest import Digest, content_digest
from dsec_layers.erofs.tree import BLOCK, Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.frames import SeekTable, compress, join_metadata
from dsec_layers.layers.manifest import FOREIGN, Environment, Layer, LayerConfig
from dsec_layers.layers.tables import CHUNK, SEGMENT, Table, pack_chunks, pack_segments
from dsec_layers.progress import SILENT, Task
from dsec_layers.registry.objects import publish_object, put_blob
from dsec_layers.store.base import Store

CHUNK_SIZE = 65536


@dataclass(frozen=True)
class Sample:
    """A published layer and its parts."""

    digest: Digest
    layer: Layer
    segments: Table
    chunks: Table

    @property
    def own(self) -> Descriptor:
        """The segments blob that is its own."""
        return self.layer.segments[0]


class Heard:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> AbstractContextManager[Task]:
        return SILENT.task(title, total=total, unit=unit)

    def info(self, message: str) -> None:
        self.lines.append(message)

    debug = warning = info


def publish_config(store: Store, config: LayerConfig) -> Descriptor:
    """Store a layer's config."""
    return put_blob(store, d.CONFIG, config.to_json())


def content(seed: int, size: int) -> bytes:
    """Bytes that compress a little."""
    return random.Random(seed).randbytes((size + 1) // 2).hex().encode()[:size]


def zeros_frame(size: int) -> bytes:
    """A sound frame of ``size`` zeros, 128 KiB in four bytes each: the most that zstd can do."""
    blocks = size // (1 << 17)
    assert blocks << 17 == size
    runs = b"".join((1 << 20 | 1 << 1 | (number == blocks - 1)).to_bytes(3, "little") + b"\0" for number in range(blocks))
    return struct.pack("<IBQ", 0xFD2FB528, 0b11100000, size) + runs


def make_layer(
    store: Store,
    files: Mapping[str, bytes],
    *,
    kind: Kind = Kind.BASE,
    name: str = "sample",
    per_segment: int = 4,
    borrow: Sample | None = None,
) -> Sample:
    """Pack ``files`` (flat names) and publish. With ``borrow`` the first segment of that layer is referred to as well: a file ``borrowed`` in it."""
    tree, frames, offset, seek = Tree(), bytearray(), 0, SeekTable()
    segments: list[tuple[bytes, int, int, int, int, int]] = []
    chunks: list[tuple[bytes, int, int, int, int]] = []
    pending = [(file, at, data[at : at + CHUNK_SIZE]) for file, data in sorted(files.items()) for at in range(0, len(data), CHUNK_SIZE)]
    places: dict[tuple[str, int], int] = {}
    for first in range(0, len(pending), per_segment):
        body = bytearray()
        for file, at, piece in pending[first : first + per_segment]:
            block, blocks = len(body) // BLOCK, -(-len(piece) // BLOCK)
            places[file, at] = (len(segments) + 1) << 32 | block
            chunks.append((content_digest(piece), len(segments), block, blocks, len(piece)))
            body += piece + bytes(-len(piece) % BLOCK)
        frame = compress(bytes(body))
        segments.append((content_digest(bytes(body)), len(body), 0, offset, len(frame), 0))
        seek.add_checksum(len(frame), len(body), xxhash.xxh64_intdigest(bytes(body)))
        frames += frame
        offset += len(frame)
    blobs = [put_blob(store, d.SEGMENTS, bytes(frames) + seek.frame())] if segments else []
    for file, data in sorted(files.items()):
        _add_file(tree, file, len(data), [places[file, at] for at in range(0, len(data), CHUNK_SIZE)])
    if borrow is not None:
        record = borrow.segments[0]
        segments.append((bytes(record["digest"]), int(record["size"]), len(blobs), int(record["offset"]), int(record["stored"]), 0))
        blobs.append(Descriptor(d.SEGMENTS, borrow.own.digest, borrow.own.size, {FOREIGN: "true"}))
        chunk = next(row for row in borrow.chunks if row["segment"] == 0 and row["block"] == 0)
        chunks.append((bytes(chunk["digest"]), len(segments) - 1, 0, int(chunk["blocks"]), int(chunk["size"])))
        _add_file(tree, "borrowed", int(chunk["size"]), [len(segments) << 32])
    return _publish(store, tree, kind, name, blobs, np.array(segments, SEGMENT), np.array(chunks, CHUNK))


def make_environment(store: Store, members: Sequence[Sample]) -> Digest:
    """An environment of layers, from bottom to top."""
    layers = tuple((member.layer.kind, Descriptor(d.MANIFEST, member.digest, len(member.layer.to_json()))) for member in members)
    return publish_object(store, Environment(layers))


def _add_file(tree: Tree, name: str, size: int, extents: Sequence[int]) -> None:
    inode = Inode(0o100644)
    inode.size = size
    inode.extent_at, inode.extent_count = len(tree.extents), len(extents)
    tree.extents.extend(extents)
    assert tree.root.children is not None
    tree.root.children[name.encode()] = inode


def _publish(store: Store, tree: Tree, kind: Kind, name: str, blobs: Sequence[Descriptor], segments: Table, chunks: Table) -> Sample:
    image = render(tree, [int(size) // BLOCK for size in segments["size"]])
    metadata = put_blob(store, d.METADATA, join_metadata(image, pack_segments(segments)))
    table = put_blob(store, d.CHUNKS, compress(pack_chunks(chunks)))
    config = publish_config(store, LayerConfig(kind, name, counts={"files": len(tree.root.children or {})}))
    layer = Layer(kind, config, metadata, table, tuple(blobs))
    return Sample(publish_object(store, layer), layer, segments, chunks)
