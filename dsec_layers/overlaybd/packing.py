"""Write sealed layers: one upper or a stack of layers packed into one LSMT file, in a ZFile and a tar if wanted.

The LSMT bytes are those that the official ``overlaybd-commit`` and ``overlaybd-merge`` give for the same mapping. They cut data into pieces of 64 sectors
and then join neighbours while the sum stays below 16383 sectors, so where the cuts of a long run fall depends on the cuts of the source; this is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
from blake3 import blake3

from dsec_layers.blocksource import BlockSource
from dsec_layers.errors import LimitError, UsageError
from dsec_layers.overlaybd.layer import LsmtLayer
from dsec_layers.overlaybd.lsmt import ENTRY, MAX_LENGTH, MAX_RO_ENTRIES, NIL_UUID, PAD, SPACE, Flags, Header, encode_entries
from dsec_layers.overlaybd.segments import MAX_SOURCES, SECTOR, Bools, Ints, Segments, stack
from dsec_layers.overlaybd.stream import Write, batches, sequential
from dsec_layers.overlaybd.tarwrap import tar_stream, tar_writes
from dsec_layers.overlaybd.zfile_writer import ZFileOptions, zfile_writes

__all__ = ["Packing", "commit", "content_uuid", "merge", "seal_tail", "stack_layers", "virtual_size"]

_PIECE = 64  # sectors
_FIRST = SPACE // SECTOR
_PADDED = 256  # entries
_READ = 1 << 20
_ROWS = 65536


@dataclass(frozen=True, slots=True)
class Packing:
    """How a new layer is named and wrapped. ``parent_uuid`` None: that of the (lowest) source layer. ``zfile`` None: not compressed."""

    uuid: str = NIL_UUID
    parent_uuid: str | None = None
    user_tag: bytes = b""
    zfile: ZFileOptions | None = None
    tar: bool = False


def commit(layer: LsmtLayer, packing: Packing | None = None) -> Iterator[Write]:
    """The writes that make a sealed layer of ``layer``: dead space gone, data in disk order. Memory use is a few megabytes and a few hundred bytes
    a segment.

    Raises LimitError, before the first write, when the layer is too fragmented for the format.
    """
    return merge([layer], packing)


def merge(layers: Sequence[LsmtLayer], packing: Packing | None = None) -> Iterator[Write]:
    """The writes that make one sealed layer that reads as ``layers``, bottom first, read on top of each other. As ``commit`` otherwise."""
    packing = packing or Packing()
    chunks, size = _chunks(layers, packing)
    if packing.zfile is None and packing.tar:
        return sequential(tar_stream(chunks, size))
    writes = zfile_writes(chunks, packing.zfile) if packing.zfile else sequential(chunks)
    return tar_writes(writes) if packing.tar else writes


def _chunks(layers: Sequence[LsmtLayer], packing: Packing) -> tuple[Iterator[bytes], int]:
    """The bytes of the LSMT file, and how many they are."""
    mapping, sources = stack_layers(layers)
    level = np.repeat(np.arange(len(layers))[::-1], [len(layer.sources) for layer in layers])
    header = Header(
        Flags.LAYER_HEADER,
        virtual_size=virtual_size(layers),
        uuid=packing.uuid,
        parent_uuid=layers[0].header.parent_uuid if packing.parent_uuid is None else packing.parent_uuid,
        user_tag=packing.user_tag,
    )
    return _lsmt(mapping, level, sources, header)


def content_uuid(layers: Sequence[LsmtLayer], parent_uuid: str) -> str:
    """The UUID (version 8, RFC 9562) for a layer that reads as ``layers`` on the one called ``parent_uuid``: the same input has the same.

    It follows from the size, which sectors are mapped and what is in them, however the writes were cut. Reads all data once.
    """
    mapping, sources = stack_layers(layers)
    joins = np.zeros(len(mapping), np.bool_)
    joins[1:] = (mapping.end[:-1] == mapping.lba[1:]) & (mapping.zeroed[:-1] == mapping.zeroed[1:])
    starts = np.flatnonzero(~joins)
    stops = np.append(starts, len(mapping))[1:] - 1
    state = blake3(f"{parent_uuid.upper()} {virtual_size(layers)} {len(starts)}\n".encode())
    for column in (mapping.lba[starts], mapping.end[stops], mapping.zeroed[starts]):
        state.update(column.tobytes())
    for data in _data(mapping, sources):
        state.update(data)
    value = bytearray(state.digest()[:16])
    value[6] = value[6] & 0x0F | 0x80
    value[8] = value[8] & 0x3F | 0x80
    return str(UUID(bytes=bytes(value))).upper()


def stack_layers(layers: Sequence[LsmtLayer]) -> tuple[Segments, tuple[BlockSource, ...]]:
    """The mapping of a whole stack, bottom first, and the sources that it numbers. Raises LimitError above MAX_SOURCES of them, UsageError for none."""
    sources = tuple(source for layer in layers for source in layer.sources)
    if not layers:
        raise UsageError("a disk needs at least one layer")
    if len(sources) > MAX_SOURCES:
        raise LimitError(f"{len(layers)} layers in a stack, more than {MAX_SOURCES}", hint="merge some of them into one")
    parts, first = [], 0
    for layer in layers:
        parts.append(layer.segments.renumber(first))
        first += len(layer.sources)
    return stack(parts), sources


def virtual_size(layers: Sequence[LsmtLayer]) -> int:
    """The size of the disk in bytes: what the topmost layer says that says something."""
    return next((layer.header.virtual_size for layer in reversed(layers) if layer.header.virtual_size), 0)


def seal_tail(mapping: Segments, header: Header, data_end: int) -> bytes:
    """What to append to an upper's data file, which ends at byte ``data_end``, to make it a sealed layer in place: the index and the trailer.

    Raises LimitError for too many segments.
    """
    _check_count(len(mapping))
    index = encode_entries(mapping)
    flags = Flags.LAYER_TRAILER | (header.flags & Flags.SPARSE)
    trailer = replace(header, flags=flags, index_offset=data_end, index_size=len(mapping))
    return index + bytes(-len(index) % SECTOR) + trailer.render()


def _lsmt(mapping: Segments, level: Ints, sources: tuple[BlockSource, ...], header: Header) -> tuple[Iterator[bytes], int]:
    """The bytes of the LSMT file, and how many they are. Raises LimitError."""
    index = encode_entries(_packed_index(replace(mapping, source=level[mapping.source].astype(np.int16))))
    index += PAD * (-(len(index) // ENTRY) % _PADDED)
    _check_count(len(index) // ENTRY)
    end = SPACE + SECTOR * int(np.sum((mapping.end - mapping.lba)[~mapping.zeroed]))

    def chunks() -> Iterator[bytes]:
        yield header.render()
        yield from batches(_data(mapping, sources), _READ)
        yield index
        yield replace(header, flags=Flags.LAYER_TRAILER, index_offset=end, index_size=len(index) // ENTRY).render()

    return chunks(), end + len(index) + SPACE


def _check_count(entries: int) -> None:
    if entries > MAX_RO_ENTRIES:
        raise LimitError(f"a sealed layer of {entries} index entries, more than {MAX_RO_ENTRIES}", hint="merge it with the layers below")


def _packed_index(mapping: Segments) -> Segments:
    """The index of the packed file: moffsets as the data is laid out in it, neighbours joined."""
    pieces = _cut(mapping)
    length = pieces.end - pieces.lba
    joins = np.zeros(len(pieces), np.bool_)
    joins[1:] = (
        (pieces.end[:-1] == pieces.lba[1:]) & (pieces.zeroed[:-1] == pieces.zeroed[1:]) & (pieces.source[:-1] == pieces.source[1:])
    )  # fmt: skip
    starts = _joined(length, joins)
    stops = np.append(starts, len(pieces))[1:] - 1
    return replace(pieces.take(starts), end=pieces.end[stops])


def _cut(mapping: Segments) -> Segments:
    """The pieces that the data is copied in, each mapped to its place in the new file."""
    step = np.where(mapping.zeroed, MAX_LENGTH, _PIECE)
    count = -(-(mapping.end - mapping.lba) // step)
    owner = np.repeat(np.arange(len(mapping)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    lba = mapping.lba[owner] + nth * step[owner]
    end = np.minimum(lba + step[owner], mapping.end[owner])
    stored = np.where(mapping.zeroed[owner], 0, end - lba)
    return Segments(lba, end, _FIRST + np.cumsum(stored) - stored, mapping.source[owner], mapping.zeroed[owner])


def _joined(length: Ints, joins: Bools) -> Ints:
    """Where entries start when pieces are joined from left to right, each with the entry before it if ``joins`` and the sum stays below MAX_LENGTH."""
    chains = np.flatnonzero(~joins)
    if not len(chains):
        return chains
    totals = np.add.reduceat(length, chains)
    through = np.cumsum(length)
    more = [np.empty(0, np.int64)]
    for chain in np.flatnonzero(totals >= MAX_LENGTH).tolist():
        at = int(chains[chain])
        stop = int(chains[chain + 1]) if chain + 1 < len(chains) else len(length)
        while at < stop:
            before = int(through[at]) - int(length[at])
            at += max(1, int(through[at:stop].searchsorted(before + MAX_LENGTH, "left")))
            more.append(np.array([at] if at < stop else [], np.int64))
    return np.sort(np.concatenate([chains, *more]))


def _data(mapping: Segments, sources: tuple[BlockSource, ...]) -> Iterator[bytes]:
    """The mapped data in disk order; what adjoins in its source is read together."""
    data = mapping.take(~mapping.zeroed)
    if not len(data):
        return
    length = data.end - data.lba
    apart = np.ones(len(data), np.bool_)
    apart[1:] = (data.moffset[1:] != data.moffset[:-1] + length[:-1]) | (data.source[1:] != data.source[:-1])
    starts = np.flatnonzero(apart)
    totals = np.add.reduceat(length, starts)
    for low in range(0, len(starts), _ROWS):
        chosen = starts[low : low + _ROWS]
        rows = zip(data.source[chosen].tolist(), data.moffset[chosen].tolist(), totals[low : low + _ROWS].tolist(), strict=True)
        for source, moffset, sectors in rows:
            at, end = moffset * SECTOR, (moffset + sectors) * SECTOR
            for start in range(at, end, _READ):
                yield sources[source].pread(start, min(_READ, end - start))
