"""Decoding of inodes in bulk: a table of columns for any number of nids, with every length and place checked against the image."""

from __future__ import annotations

import stat
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.columns import Ints, Mask, Narrow, chunk_lengths, slices
from dsec_layers.erofs.tree import BLOCK, HOLE
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["Geometry", "InodeTable", "decode_chunks", "decode_inodes", "inode_modes"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decoding needs of an image: its bytes in several widths, and the superblock's numbers."""

    raw: memoryview
    words: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.void]
    length: int
    meta_at: int
    xattr_at: int
    build_time: int
    build_time_nsec: int
    device_blocks: Ints
    """Blocks of each device; index 0 is everything that unified addresses reach."""


@dataclass(slots=True)
class InodeTable:
    """Parallel columns, one element an inode. Places are byte offsets in the image."""

    nid: Ints
    pos: Ints
    mode: Narrow
    nlink: Narrow
    uid: Narrow
    gid: Narrow
    mtime: Ints
    mtime_ns: Narrow
    size: Ints
    ino: Narrow
    layout: Narrow
    i_u: Ints
    area_at: Ints
    area: Narrow
    """Bytes of extended attributes, and where they start."""
    body_at: Ints
    """What follows the extended attributes: inline data, or (aligned to its unit) the chunk indexes."""
    whole: Ints
    """Blocks at ``i_u`` (plain and inline layouts)."""
    inline: Ints
    """Bytes at ``body_at`` (inline layout)."""
    chunk_bits: Narrow
    chunks: Ints
    """Number of chunks, 0 for what is not chunk-based."""
    unit: Narrow
    """Bytes of a chunk index."""

    def refuse(self, bad: Mask, what: str, code: ImageCode) -> None:
        """Raise ImageError with the nid of the first inode for which ``bad`` holds, if any does."""
        if bad.any():
            raise ImageError(f"inode {self.nid[np.flatnonzero(bad)[0]]}: {what}", code=code)


def _positions(geometry: Geometry, nids: npt.NDArray[np.uint64]) -> Ints:
    room = max(0, geometry.length - geometry.meta_at) >> fmt.ISLOT_BITS
    bad = nids >= room
    if bad.any():
        raise ImageError(f"inode {nids[np.flatnonzero(bad)[0]]}: outside the image", code=ImageCode.OUT_OF_BOUNDS)
    return np.asarray(nids.astype(np.int64) * (1 << fmt.ISLOT_BITS) + geometry.meta_at, np.int64)


def inode_modes(geometry: Geometry, nids: npt.NDArray[np.uint64]) -> Ints:
    """Only the modes of some inodes, which is what walking directories needs."""
    modes: Ints = (geometry.words[(_positions(geometry, nids) >> 2) + 1] & 0xFFFF).astype(np.int64)
    return modes


def decode_inodes(geometry: Geometry, nids: npt.NDArray[np.uint64]) -> InodeTable:
    """Decode and check the inodes ``nids``. Raises ImageError naming the nid."""
    table, extended = _decode_short(geometry, nids)
    _decode_extended(geometry, table, extended)
    table.refuse(fmt.FILE_TYPE_OF_MODE[table.mode >> 12] == fmt.FT_UNKNOWN, "a mode without a file type", ImageCode.BAD_ENCODING)
    table.refuse(table.mtime_ns >= 1_000_000_000, "nanoseconds out of range", ImageCode.OUT_OF_BOUNDS)
    table.refuse(table.body_at > geometry.length, "extended attributes beyond the end of the image", ImageCode.OUT_OF_BOUNDS)
    table.refuse(table.area == fmt.XATTR_IBODY_HEADER, "an extended attribute area that holds none", ImageCode.INCONSISTENT)
    _locate_flat(geometry, table)
    _locate_chunks(geometry, table)
    return table


def _decode_short(geometry: Geometry, nids: npt.NDArray[np.uint64]) -> tuple[InodeTable, Ints]:
    """What both forms of an inode have in the same place, and which ones are extended."""
    pos = _positions(geometry, nids)
    short = geometry.slots[pos >> fmt.ISLOT_BITS].view(fmt.INODE_COMPACT)
    i_format = short["i_format"].astype(np.int64)
    extended = (i_format & fmt.I_VERSION_EXTENDED) != 0
    area = short["i_xattr_icount"].astype(np.int32)
    area = np.where(area > 0, fmt.XATTR_IBODY_HEADER + 4 * (area - 1), 0).astype(np.int32)
    area_at = pos + np.where(extended, fmt.INODE_EXTENDED.itemsize, fmt.INODE_COMPACT.itemsize)
    zeros = np.zeros(len(pos), np.int64)
    table = InodeTable(
        nid=nids.astype(np.int64), pos=pos, mode=short["i_mode"].astype(np.int32), nlink=short["i_nlink"].astype(np.uint32),
        uid=short["i_uid"].astype(np.uint32), gid=short["i_gid"].astype(np.uint32),
        mtime=geometry.build_time + short["i_reserved"].astype(np.int64), mtime_ns=np.full(len(pos), geometry.build_time_nsec, np.uint32),
        size=short["i_size"].astype(np.int64), ino=short["i_ino"].astype(np.uint32),
        layout=(i_format >> fmt.I_DATALAYOUT_BIT & fmt.I_DATALAYOUT_MASK).astype(np.int8),
        i_u=short["i_u"].astype(np.int64), area_at=area_at, area=area, body_at=area_at + area,
        whole=zeros, inline=zeros, chunk_bits=np.full(len(pos), 12, np.int8), chunks=zeros, unit=np.full(len(pos), 8, np.int8),
    )  # fmt: skip
    table.refuse((i_format & ~fmt.I_ALL) != 0, "an inode format from a newer EROFS", ImageCode.UNKNOWN_FEATURE)
    table.refuse(table.layout > fmt.CHUNK_BASED, "an unknown data layout", ImageCode.UNKNOWN_FEATURE)
    table.refuse(area_at > geometry.length, "cut off by the end of the image", ImageCode.TRUNCATED)
    return table, np.flatnonzero(extended)


def _decode_extended(geometry: Geometry, table: InodeTable, at: Ints) -> None:
    """Overwrite the columns of the inodes that have the 64-byte form."""
    slot = table.pos[at] >> fmt.ISLOT_BITS
    rows = np.stack((geometry.slots[slot], geometry.slots[slot + 1]), axis=1).view(fmt.INODE_EXTENDED).reshape(-1)
    oversize = np.zeros(len(table.nid), np.bool_)
    oversize[at] = rows["i_size"] > np.uint64(0x7FFFFFFFFFFFFFFF)
    table.refuse(oversize, "a size of 2^63 bytes or more", ImageCode.OUT_OF_BOUNDS)
    table.size[at] = rows["i_size"].astype(np.int64)
    table.i_u[at] = rows["i_u"]
    table.ino[at] = rows["i_ino"]
    table.uid[at] = rows["i_uid"]
    table.gid[at] = rows["i_gid"]
    table.mtime[at] = rows["i_mtime"]
    table.mtime_ns[at] = rows["i_mtime_nsec"]
    table.nlink[at] = rows["i_nlink"]


def _locate_flat(geometry: Geometry, table: InodeTable) -> None:
    """Whole blocks and inline bytes of the plain and inline layouts; inline bytes may not cross a block, and all metadata must be in the image."""
    blocks = (table.size >> 12) + ((table.size & 4095) > 0)
    is_inline = (table.layout == fmt.FLAT_INLINE) & (table.size > 0)
    table.whole = np.where(is_inline, blocks - 1, np.where(table.layout == fmt.FLAT_PLAIN, blocks, 0))
    table.inline = np.where(is_inline, table.size - (table.whole << 12), 0)
    table.refuse((table.inline > 0) & ((table.body_at & 4095) + table.inline > BLOCK), "inline data across blocks", ImageCode.OUT_OF_BOUNDS)
    table.refuse(
        (table.inline > 0) & (table.body_at + table.inline > geometry.length),
        "inline data beyond the end of the image",
        ImageCode.OUT_OF_BOUNDS,
    )
    kind = table.mode & 0o170000
    holds_data = (kind == stat.S_IFREG) | (kind == stat.S_IFDIR) | (kind == stat.S_IFLNK)
    table.refuse(~holds_data & (table.size > 0), "a size on a device, pipe or socket", ImageCode.INCONSISTENT)
    absent = (table.whole > 0) & (table.i_u == fmt.NULL_ADDR)
    table.refuse(absent & (kind != stat.S_IFREG), "metadata in a hole", ImageCode.INCONSISTENT)
    reach = geometry.device_blocks[0]
    table.refuse((table.whole > 0) & ~absent & (table.i_u + table.whole > reach), "data beyond the last block", ImageCode.OUT_OF_BOUNDS)
    inside = (kind == stat.S_IFDIR) | (kind == stat.S_IFLNK) | (table.size < BLOCK)
    outside = (table.whole > 0) & ~absent & ((table.i_u + table.whole) * BLOCK > geometry.length)
    table.refuse(inside & outside, "metadata beyond the end of the image", ImageCode.OUT_OF_BOUNDS)


def _locate_chunks(geometry: Geometry, table: InodeTable) -> None:
    chunked = table.layout == fmt.CHUNK_BASED
    table.refuse(chunked & ((table.mode & 0o170000) != stat.S_IFREG), "chunks on something else than a file", ImageCode.INCONSISTENT)
    layout = np.where(chunked, table.i_u & 0xFFFF, 0)
    table.refuse((layout & ~fmt.CHUNK_FORMAT_KNOWN) != 0, "48-bit chunk indexes, which are not supported", ImageCode.UNKNOWN_FEATURE)
    table.chunk_bits = (12 + (layout & fmt.CHUNK_FORMAT_BLKBITS_MASK)).astype(np.int8)
    table.chunks = np.where(chunked & (table.size > 0), (table.size - 1 >> table.chunk_bits) + 1, 0)
    table.unit = np.where((layout & fmt.CHUNK_FORMAT_INDEXES) != 0, 8, 4).astype(np.int8)
    table.body_at = np.where(chunked, table.body_at + table.unit - 1 & -table.unit, table.body_at)
    # The count alone is compared first: times the unit it could overflow.
    over = table.chunks > geometry.length
    table.refuse(
        over | (table.body_at + table.chunks * table.unit > geometry.length) & (table.chunks > 0),
        "chunk indexes beyond the end of the image",
        ImageCode.OUT_OF_BOUNDS,
    )


def decode_chunks(geometry: Geometry, table: InodeTable) -> npt.NDArray[np.uint64]:
    """The extents of all chunk-based inodes of the table, one after another, as ``device << 32 | block`` and HOLE.

    The caller bounds the sum of ``chunks``. Raises ImageError for an extent outside its device.
    """
    words = geometry.words
    at = slices(table.body_at, table.chunks)
    nth = at - np.repeat(table.body_at, table.chunks)
    unit = np.repeat(table.unit, table.chunks)
    at = np.repeat(table.body_at, table.chunks) + nth * unit >> 2
    indexed = unit == 8
    low = np.zeros(len(at), np.int64)
    block = words[np.where(indexed, at + 1, at)].astype(np.int64) if len(at) else low
    prefix = np.where(indexed, words[at].astype(np.int64), 0) if len(at) else low
    hole = block == fmt.NULL_ADDR
    device = np.where(hole, 0, prefix >> 16)
    owner = np.repeat(np.arange(len(table.nid)), table.chunks)
    need = chunk_lengths(table.size, table.chunk_bits, table.chunks)
    _refuse_chunk(
        table, owner, ~hole & ((prefix & 0xFFFF) != 0), "a 48-bit block address, which is not supported", ImageCode.UNKNOWN_FEATURE
    )
    _refuse_chunk(
        table, owner, device >= len(geometry.device_blocks), "a chunk on a device that is not in the table", ImageCode.OUT_OF_BOUNDS
    )
    _refuse_chunk(
        table,
        owner,
        ~hole & (block + need > geometry.device_blocks[device]),
        "a chunk beyond the end of its device",
        ImageCode.OUT_OF_BOUNDS,
    )
    return np.where(hole, HOLE, device << 32 | block).astype(np.uint64)


def _refuse_chunk(table: InodeTable, owner: Ints, bad: Mask, what: str, code: ImageCode) -> None:
    if bad.any():
        raise ImageError(f"inode {table.nid[owner[np.flatnonzero(bad)[0]]]}: {what}", code=code)
