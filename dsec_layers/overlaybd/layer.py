"""Open one layer: find the LSMT file within its wrappings, read its index, check it.

A layer is a mapping and the sources it maps to. Sealed layers, unsealed (data, index) pairs and sparse files all come out the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dsec_layers.blocksource import BlockSource
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.overlaybd.lsmt import (
    ENTRY,
    MAX_RO_ENTRIES,
    SPACE,
    Flags,
    Header,
    check_sealed,
    decode_entries,
    log_problems,
    looks_like_lsmt,
)
from dsec_layers.overlaybd.segments import MAX_SEGMENTS, SECTOR, Segments, no_segments, overlay, resolve
from dsec_layers.overlaybd.tarwrap import looks_like_tar, unwrap
from dsec_layers.overlaybd.zfile import BlockCache, ZFile
from dsec_layers.overlaybd.zfile_format import looks_like_zfile

__all__ = ["LsmtLayer", "check_layer", "open_layer", "open_sparse", "open_upper_pair", "parse_log"]

_PROBE = 512
_FIRST = SPACE // SECTOR
_LOG_CHUNK = 1_000_000  # entries of a write log resolved at a time


@dataclass(frozen=True, slots=True)
class LsmtLayer:
    """One layer, open: ``segments`` number their sources from 0, in ``sources``.

    ``header`` is the trailer of a sealed layer and the header of an unsealed one. ``nesting`` says what was unwrapped, outermost first.
    """

    header: Header
    segments: Segments
    sources: tuple[BlockSource, ...]
    nesting: tuple[str, ...] = ("lsmt",)


def open_layer(source: BlockSource, *, cache: BlockCache | None = None, target: BlockSource | None = None) -> LsmtLayer:
    """Open a sealed layer: LSMT, in a ZFile or not, in a tar or not. Raises ImageError.

    ``cache`` holds decompressed blocks and may be shared. ``target`` is given for a warp (turboOCI) layer and only then: the uncompressed tar of the
    original OCI layer, where the file data lies. Nothing in the bytes tells a warp layer from others; its OCI annotations do.
    """
    nesting: list[str] = []
    if looks_like_tar(_probe(source)):
        nesting.append("tar")
        source = unwrap(source)
    if looks_like_zfile(_probe(source)):
        nesting.append("zfile")
        source = ZFile(source, cache)
    if not looks_like_lsmt(_probe(source)):
        raise ImageError(
            f"not an OverlayBD layer: no LSMT header{' within the ' + ' in the '.join(reversed(nesting)) if nesting else ''}",
            code=ImageCode.BAD_MAGIC,
        )
    trailer, segments = _read_sealed(source, warp=target is not None)
    sources: tuple[BlockSource, ...] = (source,)
    if target is not None:
        sources = (source, target)
        _check_warp(segments, trailer.index_offset // SECTOR, target.size)
    else:
        check_sealed(segments, trailer.index_offset // SECTOR)
    return LsmtLayer(trailer, segments, sources, (*nesting, "lsmt"))


def check_layer(source: BlockSource) -> None:
    """Raise ImageError unless the bytes of this source itself are a sealed LSMT layer.

    Entries with the higher of two tags may be those of a warp layer: where they lie in its target is then not looked at.
    """
    trailer, segments = _read_sealed(source, warp=True)
    end = trailer.index_offset // SECTOR
    if len(segments) and int(segments.source.max()) == 1:
        _check_warp(segments, end, SECTOR << 54)
    else:
        check_sealed(segments, end)


def open_upper_pair(data: BlockSource, index: BlockSource) -> LsmtLayer:
    """Read the two files of an unsealed append-mode upper, without changing them. Raises ImageError, also for a torn end (see Upper.open)."""
    header = read_upper_headers(data, index)
    segments, _, problem = parse_log(index, data.size // SECTOR)
    if problem:
        raise ImageError(f"upper index: {problem}", code=ImageCode.INCONSISTENT)
    return LsmtLayer(header, segments, (data,))


def read_upper_headers(data: BlockSource, index: BlockSource) -> Header:
    """The data file's header, after checking that the two files are a pair. Raises ImageError."""
    header = _read_header(data, "upper data header", Flags.UPPER_DATA)
    other = _read_header(index, "upper index header", Flags.UPPER_INDEX)
    if other.index_offset != SPACE:
        raise ImageError(f"upper index header: the index starts at {other.index_offset}, not {SPACE}", code=ImageCode.INCONSISTENT)
    if (header.uuid.upper(), header.virtual_size) != (other.uuid.upper(), other.virtual_size):
        raise ImageError("the data and index files belong to different uppers", code=ImageCode.INCONSISTENT)
    return header


def open_sparse(data: BlockSource, extents: Iterable[tuple[int, int]]) -> LsmtLayer:
    """Read an unsealed sparse upper. ``extents`` are the (offset, length) of its data as SEEK_DATA and SEEK_HOLE tell them, in order. Raises ImageError."""
    header = _read_header(data, "sparse upper header", Flags.SPARSE_DATA)
    spans = np.array(list(extents), np.int64).reshape(-1, 2)
    first = np.maximum(spans[:, 0], SPACE)
    end = np.minimum(spans[:, 0] + spans[:, 1], data.size)
    kept = end > first
    moffset, stop = first[kept] // SECTOR, -(-end[kept] // SECTOR)
    segments = Segments(
        moffset - _FIRST, stop - _FIRST, moffset, np.zeros(len(moffset), np.int16), np.zeros(len(moffset), np.bool_)
    )  # fmt: skip
    check_sealed(segments, data.size // SECTOR)
    return LsmtLayer(header, segments, (data,))


def parse_log(index: BlockSource, data_end: int) -> tuple[Segments, int, str]:
    """Resolve an append-mode index: (mapping, good entries, what stops it or ``""``). ``data_end`` is in sectors of the data file.

    Reading stops at the first entry that cannot be; pads count as good. Raises ImageError above the format's number of entries.
    """
    total = (index.size - SPACE) // ENTRY
    if total > MAX_SEGMENTS:
        raise ImageError(f"upper index: {total} entries, more than {MAX_SEGMENTS}", code=ImageCode.LIMIT)
    mapping, at = no_segments(), 0
    while at < total:
        count = min(_LOG_CHUNK, total - at)
        log, place = decode_entries(index.pread(SPACE + at * ENTRY, count * ENTRY))
        log = replace(log, source=np.zeros(len(log), np.int16))
        bad = log_problems(log, _FIRST, data_end)
        stop = int(bad.argmax()) if bad.any() else len(log)
        mapping = overlay(mapping, resolve(log.take(slice(0, stop))))
        if stop < len(log):
            at += int(place[stop])
            return mapping, at, f"entry {at} of {total} cannot be"
        at += count
    torn = (index.size - SPACE) % ENTRY
    return mapping, total, f"{torn} bytes of an unfinished entry at the end" if torn else ""


def _probe(source: BlockSource) -> bytes:
    return source.pread(0, min(_PROBE, source.size))


def _read_header(source: BlockSource, what: str, flags: int) -> Header:
    if source.size < SPACE:
        raise ImageError(f"{what}: the file is cut short", code=ImageCode.TRUNCATED)
    header = Header.parse(source.pread(0, SPACE), what)
    if header.flags & (Flags.LAYER_HEADER | Flags.SPARSE | Flags.HYBRID) != flags:
        raise ImageError(f"{what}: flags {header.flags:#x}, wanted {flags:#x}", code=ImageCode.INCONSISTENT)
    return header


def _read_sealed(source: BlockSource, *, warp: bool) -> tuple[Header, Segments]:
    """The trailer and the index of a sealed layer, the index unchecked. Tags become source numbers in a warp layer and are dropped in others."""
    if source.size < 2 * SPACE:
        raise ImageError(f"LSMT: {source.size} bytes are too few for a header and a trailer", code=ImageCode.TRUNCATED)
    header = Header.parse(source.pread(0, SPACE))
    if header.flags & Flags.UPPER_DATA != Flags.UPPER_DATA:
        raise ImageError(f"LSMT header: flags {header.flags:#x} are not those of a layer's data file", code=ImageCode.INCONSISTENT)
    end = source.size - SPACE
    tail = source.pread(end, SPACE)
    if not looks_like_lsmt(tail) and not header.flags & Flags.SEALED:
        raise ImageError(
            "LSMT: this is an unsealed upper, it needs its index file", code=ImageCode.INCONSISTENT, hint="seal or commit it first"
        )
    trailer = Header.parse(tail, "LSMT trailer")
    if trailer.flags & Flags.UPPER_DATA != Flags.DATA or not trailer.flags & Flags.SEALED:
        raise ImageError(f"LSMT trailer: flags {trailer.flags:#x} are not those of a sealed layer", code=ImageCode.INCONSISTENT)
    if trailer.virtual_size != header.virtual_size:
        raise ImageError(
            f"LSMT: header and trailer state different disk sizes ({header.virtual_size} and {trailer.virtual_size})",
            code=ImageCode.INCONSISTENT,
        )
    if trailer.index_size > MAX_RO_ENTRIES:
        raise ImageError(f"LSMT trailer: {trailer.index_size} index entries, more than {MAX_RO_ENTRIES}", code=ImageCode.LIMIT)
    if trailer.index_offset < SPACE or trailer.index_offset + ENTRY * trailer.index_size > end:
        raise ImageError("LSMT trailer: the index is outside of the file", code=ImageCode.OUT_OF_BOUNDS)
    segments, _ = decode_entries(source.pread(trailer.index_offset, ENTRY * trailer.index_size))
    if not warp:
        return trailer, replace(segments, source=np.zeros(len(segments), np.int16))
    lowest = int(segments.source.min()) if len(segments) else 0
    return trailer, segments.renumber(-lowest)


def _check_warp(segments: Segments, data_end: int, target_size: int) -> None:
    """Raise ImageError unless tags are 0 (in the blob) and 1 (in the target) and every segment lies within what its tag names."""
    if len(segments) and int(segments.source.max()) > 1:
        raise ImageError(f"warp layer: unknown tag {int(segments.source.max())}", code=ImageCode.UNKNOWN_FEATURE)
    check_sealed(
        replace(
            segments, zeroed=segments.zeroed | (segments.source == 1), moffset=np.where(segments.source == 1, _FIRST, segments.moffset)
        ),
        data_end,
    )
    remote = segments.take(segments.source == 1)
    if len(remote) and bool(log_problems(remote, 0, target_size // SECTOR).any()):
        raise ImageError("warp layer: a segment is outside of the target", code=ImageCode.OUT_OF_BOUNDS)
