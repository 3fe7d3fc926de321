"""The segment table and the chunk table: fixed-size records behind a small header (docs/formats/layer.md).

Both are numpy structured arrays with the on-disk dtype, so that parsing is a view and checking is vectorised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError

__all__ = [
    "CHUNK",
    "MAX_CHUNKS_BYTES",
    "MAX_SEGMENT",
    "MAX_SEGMENTS",
    "MAX_STORED",
    "SEGMENT",
    "Table",
    "dump_segments",
    "pack_chunks",
    "pack_segments",
    "parse_chunks",
    "parse_segments",
]

Table: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"

BLOCK: Final = 4096
MAX_SEGMENT: Final = 16 << 20
MAX_SEGMENTS: Final = 65_535
MAX_STORED: Final = MAX_SEGMENT + (MAX_SEGMENT >> 6) + BLOCK
"""Bytes of the longest frame of a segment: what does not compress grows by less than a 64th and a block (ZSTD_compressBound: a 256th)."""
MAX_CHUNKS: Final = 1 << 24

SEGMENT: Final = np.dtype([("digest", "V32"), ("size", "<u4"), ("blob", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("flags", "<u4")])
"""digest: BLAKE3 of the uncompressed segment; size: uncompressed bytes; blob: index into the manifest's segments blobs;
offset, stored: where its zstd frame is in that blob; flags: 0. Record i is EROFS device i + 1."""

CHUNK: Final = np.dtype([("digest", "V32"), ("segment", "<u4"), ("block", "<u4"), ("blocks", "<u4"), ("size", "<u4")])
"""digest: BLAKE3 of the chunk's bytes; segment: index into the segment table; block, blocks: where in it; size: bytes of the chunk, which zeros fill up to
``blocks`` whole blocks. Sorted by digest, each digest once."""

_HEADER: Final = struct.Struct("<4sHHIQ")  # magic, version, record size, count, reserved: 20 bytes
VERSION: Final = 1

MAX_CHUNKS_BYTES: Final = _HEADER.size + MAX_CHUNKS * CHUNK.itemsize
"""Bytes in the largest chunk table (a TiB of data in 64 KiB chunks)."""


def pack_segments(records: Table) -> bytes:
    """The segment table's bytes."""
    return _HEADER.pack(b"DSEG", VERSION, SEGMENT.itemsize, len(records), 0) + records.tobytes()


def pack_chunks(records: Table) -> bytes:
    """The chunk table's bytes: the records sorted by digest; of several with one digest only the first."""
    keys = _keys(records)
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    first = np.ones(len(records), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    chosen = records[order[first]]
    return _HEADER.pack(b"DCHK", VERSION, CHUNK.itemsize, len(chosen), 0) + chosen.tobytes()


def parse_segments(data: Buffer, blob_sizes: tuple[int, ...]) -> Table:
    """The records of a segment table, checked: sizes in limits, inside their blob, in canonical order (by blob, then offset), not overlapping.

    ``blob_sizes``: the sizes of the manifest's segments blobs, in its order. Raises ImageError.
    """
    table = _parse(data, b"DSEG", SEGMENT, MAX_SEGMENTS)
    if not len(table):
        return table
    blob, offset, stored, size = (table[name].astype(np.uint64) for name in ("blob", "offset", "stored", "size"))
    if (size == 0).any() or (size > MAX_SEGMENT).any() or (size % BLOCK != 0).any():
        raise ImageError("segment table: a segment's size is not 4 KiB to 16 MiB in whole blocks", code=ImageCode.OUT_OF_BOUNDS)
    if (blob >= len(blob_sizes)).any():
        raise ImageError("segment table: a record names a segments blob that the manifest lacks", code=ImageCode.OUT_OF_BOUNDS)
    ends = offset + stored
    if (stored == 0).any() or (ends < offset).any() or (ends > np.array(blob_sizes, dtype=np.uint64)[blob]).any():
        raise ImageError("segment table: a record leaves its blob", code=ImageCode.OUT_OF_BOUNDS)
    if (stored > size + (size >> np.uint64(6)) + BLOCK).any():
        raise ImageError("segment table: a record's frame is longer than its segment can make it", code=ImageCode.OUT_OF_BOUNDS)
    same = blob[1:] == blob[:-1]
    if (blob[1:] < blob[:-1]).any() or (same & (offset[1:] < ends[:-1])).any():
        raise ImageError("segment table: records overlap or are out of order", code=ImageCode.INCONSISTENT)
    if table["flags"].any():
        raise ImageError("segment table: unknown flags", code=ImageCode.UNKNOWN_FEATURE)
    return table


def parse_chunks(data: Buffer, segments: Table) -> Table:
    """The records of a chunk table, checked against the layer's segment table and for order. Raises ImageError."""
    table = _parse(data, b"DCHK", CHUNK, MAX_CHUNKS)
    if not len(table):
        return table
    if (table["segment"] >= len(segments)).any():
        raise ImageError("chunk table: a record names a segment that the layer lacks", code=ImageCode.OUT_OF_BOUNDS)
    blocks, size = table["blocks"].astype(np.uint64), table["size"].astype(np.uint64)
    if ((table["block"] + blocks) * BLOCK > segments["size"][table["segment"]]).any():
        raise ImageError("chunk table: a record leaves its segment", code=ImageCode.OUT_OF_BOUNDS)
    if (size == 0).any() or ((size + (BLOCK - 1)) // BLOCK != blocks).any():
        raise ImageError("chunk table: a chunk's size does not fit its number of blocks", code=ImageCode.INCONSISTENT)
    if not _ascending(_keys(table)):
        raise ImageError("chunk table: records are not in the order of their digests, each once", code=ImageCode.INCONSISTENT)
    return table


def _keys(records: Table) -> "np.ndarray[Any, np.dtype[np.uint64]]":  # noqa: UP037
    """The digests as rows of four integers that compare as the bytes do."""
    return np.ascontiguousarray(records["digest"]).view(">u8").reshape(-1, 4).astype(np.uint64)


def _ascending(keys: "np.ndarray[Any, np.dtype[np.uint64]]") -> bool:  # noqa: UP037
    before, after = keys[:-1], keys[1:]
    larger = np.zeros(len(before), bool)
    for column in reversed(range(keys.shape[1])):
        larger = (after[:, column] > before[:, column]) | ((after[:, column] == before[:, column]) & larger)
    return bool(larger.all())


def dump_segments(data: Buffer) -> Iterator[str]:
    """The segment table as lines: what is in the header, then each record, checked only for its place in the table. Raises ImageError."""
    table = _parse(data, b"DSEG", SEGMENT, MAX_SEGMENTS)
    yield f"{0:08x}+{_HEADER.size} magic DSEG version {VERSION} record {SEGMENT.itemsize} count {len(table)}"
    for number, record in enumerate(table):
        fields = " ".join(f"{name} {record[name].tobytes().hex() if name == 'digest' else record[name]}" for name in SEGMENT.names or ())
        yield f"{_HEADER.size + number * SEGMENT.itemsize:08x}+{SEGMENT.itemsize} segment {number} {fields}"


def _parse(data: Buffer, magic: bytes, dtype: np.dtype[np.void], limit: int) -> Table:
    if len(data) < _HEADER.size:
        raise ImageError(f"{magic.decode()} table is truncated", code=ImageCode.TRUNCATED)
    found, version, record, count, reserved = _HEADER.unpack_from(data)
    if found != magic or version != VERSION or record != dtype.itemsize or reserved:
        raise ImageError(
            f"not a {magic.decode()} table of version {VERSION}", code=ImageCode.BAD_VERSION if found == magic else ImageCode.BAD_MAGIC
        )
    if count > limit or _HEADER.size + count * record != len(data):
        raise ImageError(
            f"{magic.decode()} table says {count} records, which its {len(data)} bytes or the limit {limit} do not allow",
            code=ImageCode.OUT_OF_BOUNDS,
        )
    return np.frombuffer(data, dtype=dtype, count=count, offset=_HEADER.size)
