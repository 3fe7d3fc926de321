"""Write the EROFS metadata image of a tree: measure every part, then render all parts at their places.

Layout of the image, in this order: superblock at 1024, device table right behind it, shared extended attributes, inodes with what is inline behind
them (attributes, chunk indexes, link targets, small files, ends of directories), then whole blocks (the rest of large directories and what
did not fit inline). Everything is columnar, because a million inodes is an ordinary tree; Python touches an inode only to copy its inline bytes.

The image is a function of its arguments alone. The device table also gives each device the block address it has when the devices are appended to
the image one after another, so that ``image + segment 1 + segment 2 …`` is a self-contained EROFS image too (Linux >= 6.4).
"""

from __future__ import annotations

import stat
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import crc32c
import numpy as np

from dsec_layers.digest import content_digest
from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.columns import Ints, Mask, chunk_lengths, slices
from dsec_layers.erofs.flatten import Flat, flatten
from dsec_layers.erofs.tree import BLOCK, HOLE, Tree, find_path, show_path
from dsec_layers.erofs.xattr import XattrPlan, plan_xattrs
from dsec_layers.errors import ImageCode, ImageError, LimitError

__all__ = ["render"]

_BATCH = 1 << 16
_HOLE_INDEX = np.uint64(HOLE << 32)


@dataclass(slots=True)
class _Dirs:
    """Directory blocks: one element a block, directories in order."""

    owner: Ints
    """Inode number of the directory."""
    first: Ints
    """First entry of the block."""
    entries: Ints
    nth: Ints
    """Which block of its directory it is."""
    used: Ints
    """Bytes used in it."""


@dataclass(slots=True)
class _Layout:
    """Where everything goes. Arrays are parallel to the inodes; ``start`` and ``pos`` are byte offsets in the image."""

    build_time: tuple[int, int]
    dirs: _Dirs
    xattrs: XattrPlan
    xattr_at: int
    inodes_at: int
    compact: Mask
    datalayout: Ints
    area: Ints
    """Bytes of extended attributes."""
    head: Ints
    """Bytes from the inode's start to what is inline behind it."""
    size: Ints
    """i_size: also of directories."""
    inline: Ints
    """Bytes of inline data (not chunk indexes)."""
    pos: Ints
    block: Ints
    """First whole block, NULL_ADDR for none."""
    blocks: int
    """Of the whole image."""

    @property
    def meta_blkaddr(self) -> int:
        """The block that nids count from: chosen so that the first inode's nid is small and never 0, which readdir(3) takes for a deleted entry."""
        return (self.inodes_at - 32) // BLOCK


def render(
    tree: Tree,
    devices: Sequence[int],
    *,
    build_time: tuple[int, int] | None = None,
    uuid: bytes | None = None,
    volume_name: bytes = b"",
    joined: bool = False,
) -> bytes:
    """The metadata image of ``tree``, whose extents lie on ``devices`` (block counts; the first is device 1).

    ``joined``: the devices' blocks follow the image in the same file, and it knows of no devices.

    ``build_time`` (seconds, nanoseconds) is the superblock's; inodes that share it are stored in the short form. Default: the most common
    modification time of the tree. ``uuid`` (16 bytes) defaults to a digest of the image. Raises ImageError for a tree that makes no
    sense and LimitError for one that EROFS cannot express, naming the path and the number. Source: ``fs/erofs/erofs_fs.h``.
    """
    if len(volume_name) > 15 or (uuid is not None and len(uuid) != 16):
        raise ImageError("a volume name has at most 15 bytes, a uuid 16", code=ImageCode.BAD_ENCODING)
    blocks_of = _check_devices(devices)
    flat = flatten(tree)
    extents = np.asarray(tree.extents, np.uint64)
    indexes = _chunk_indexes(flat, extents, blocks_of)
    listed = blocks_of[:0] if joined else blocks_of
    layout = _measure(flat, len(listed), build_time)
    if layout.blocks + int(blocks_of.sum()) > fmt.MAX_BLOCKS:
        raise LimitError(f"{layout.blocks + int(blocks_of.sum())} blocks in image and segments; the limit is {fmt.MAX_BLOCKS}")
    if joined:
        indexes = _joined(indexes, layout.blocks + np.cumsum(blocks_of) - blocks_of)
    image = bytearray(layout.blocks * BLOCK)
    _render_inodes(image, flat, layout)
    _render_xattrs(image, layout)
    _render_chunks(image, flat, layout, indexes)
    _render_data(image, flat, layout)
    _render_dirs(image, flat, layout)
    _render_devices(image, layout, listed)
    total = layout.blocks + (int(blocks_of.sum()) if joined else 0)
    _render_super(image, flat, layout, total, len(listed), uuid, volume_name)
    return bytes(image)


def _check_devices(devices: Sequence[int]) -> Ints:
    if len(devices) > fmt.MAX_DEVICES:
        raise LimitError(f"{len(devices)} segments; the limit is {fmt.MAX_DEVICES}", hint="use larger segments")
    blocks = np.array([*devices], np.int64)
    if len(blocks) and (blocks.min() < 1 or blocks.max() > fmt.MAX_BLOCKS):
        raise ImageError("a device of no blocks or too many", code=ImageCode.OUT_OF_BOUNDS)
    return blocks


def _chunk_indexes(flat: Flat, extents: np.typing.NDArray[np.uint64], blocks_of: Ints) -> np.typing.NDArray[np.uint64]:
    """The chunk indexes of all files in inode order, as 64-bit values; checks that each extent lies within its device."""
    mine = extents[slices(flat.extent_at, flat.extent_count)]
    device = (mine >> np.uint64(32)).astype(np.int64)
    block = (mine & np.uint64(0xFFFFFFFF)).astype(np.int64)
    hole = mine == np.uint64(HOLE)
    need = chunk_lengths(flat.size, flat.chunk_bits, flat.extent_count)
    known = (device >= 1) & (device <= len(blocks_of))
    have = blocks_of[np.where(known, device - 1, 0)] if len(blocks_of) else np.zeros(len(mine), np.int64)
    bad = ~hole & ~(known & (block + need <= have))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        inode = flat.inodes[int(np.searchsorted(np.cumsum(flat.extent_count), at, "right"))]
        path = show_path(find_path(flat.root, inode))
        raise ImageError(
            f"{path}: an extent of {need[at]} blocks at block {block[at]} of device {device[at]}, which is not there",
            code=ImageCode.OUT_OF_BOUNDS,
        )
    return (mine >> np.uint64(32) << np.uint64(16)) | (mine << np.uint64(32))


def _joined(indexes: np.typing.NDArray[np.uint64], starts: Ints) -> np.typing.NDArray[np.uint64]:
    """Chunk indexes with addresses in the one file in place of devices, which start at blocks ``starts``. Holes stay."""
    device = (indexes >> np.uint64(16) & np.uint64(0xFFFF)).astype(np.int64)
    block = (indexes >> np.uint64(32)).astype(np.int64)
    hole = indexes == _HOLE_INDEX
    places = block + (starts[np.where(hole, 1, device) - 1] if len(starts) else 0)
    return np.where(hole, indexes, places.astype(np.uint64) << np.uint64(32))


# --- measure -----------------------------------------------------------------------------------------------------------------------------------


def _measure(flat: Flat, devices: int, build_time: tuple[int, int] | None) -> _Layout:
    time = build_time if build_time is not None else _common_time(flat)
    dirs, dir_size = _measure_dirs(flat)
    size = flat.size.copy()
    size[flat.dir_inode] = dir_size
    compact = (flat.mtime == time[0]) & (flat.mtime_ns == time[1]) & (size <= 0xFFFFFFFF)
    compact &= (flat.uid <= 0xFFFF) & (flat.gid <= 0xFFFF) & (flat.nlink <= 0xFFFF)
    xattr_at = fmt.SUPER_OFFSET + fmt.SUPER_BLOCK.itemsize + fmt.DEVICE_SLOT.itemsize * devices
    xattrs = plan_xattrs(flat.inodes, xattr_at, lambda inode: show_path(find_path(flat.root, inode)))
    area = np.zeros(len(flat.inodes), np.int64)
    for at, data in xattrs.areas:
        area[at] = len(data)
    chunked = flat.extent_count > 0
    head = np.where(compact, 32, 64) + area
    head[chunked] = head[chunked] + 7 & ~7
    # Inline data must not cross a block, so that what is left of the block must be enough for it wherever the inode can start.
    tail = np.where(chunked, 0, size % BLOCK)
    tail[tail + head % 32 > BLOCK] = 0
    start = xattr_at + len(xattrs.shared) + 31 & ~31
    pos, end = _place(head, np.where(chunked, flat.extent_count * 8, 0), tail, start)
    whole = np.where(chunked, 0, (size - tail + BLOCK - 1) // BLOCK)
    ends = np.cumsum(whole)
    first_block = (end + BLOCK - 1) // BLOCK
    return _Layout(
        build_time=time, dirs=dirs, xattrs=xattrs, xattr_at=xattr_at, inodes_at=start, compact=compact,
        datalayout=np.where(chunked, fmt.CHUNK_BASED, np.where(tail > 0, fmt.FLAT_INLINE, fmt.FLAT_PLAIN)),
        area=area, head=head, size=size, inline=tail, pos=pos,
        block=np.where(whole > 0, first_block + ends - whole, fmt.NULL_ADDR), blocks=first_block + int(ends[-1]),
    )  # fmt: skip


def _common_time(flat: Flat) -> tuple[int, int]:
    """The modification time most inodes have, the earliest of several; never negative, because older kernels read it unsigned."""
    order = np.lexsort((flat.mtime_ns, flat.mtime))
    order = order[flat.mtime[order] >= 0]
    if not len(order):
        return 0, 0
    seconds, nanos = flat.mtime[order], flat.mtime_ns[order]
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(seconds) != 0) | (np.diff(nanos) != 0))))
    counts = np.diff(np.append(starts, len(order)))
    best = starts[int(np.argmax(counts))]
    return int(seconds[best]), int(nanos[best])


def _measure_dirs(flat: Flat) -> tuple[_Dirs, Ints]:
    """Cut the entries of each directory into blocks; also the size of each directory."""
    cost = np.fromiter(map(len, flat.names), np.int64, len(flat.names)) + fmt.DIRENT.itemsize
    total = np.add.reduceat(cost, flat.dir_first[:-1])
    cuts = [flat.dir_first[:-1]]
    for at in np.flatnonzero(total > BLOCK).tolist():
        first, last = int(flat.dir_first[at]), int(flat.dir_first[at + 1])
        cuts.append(_cut(np.cumsum(cost[first:last])) + first)
    first_entry = np.sort(np.concatenate(cuts))
    owner = np.searchsorted(flat.dir_first, first_entry, "right") - 1
    used = np.add.reduceat(cost, first_entry)
    first_block = np.searchsorted(owner, np.arange(len(total)))
    count = np.diff(np.append(first_block, len(owner)))
    dirs = _Dirs(
        owner=flat.dir_inode[owner],
        first=first_entry,
        entries=np.diff(np.append(first_entry, len(cost))),
        nth=np.arange(len(owner)) - first_block[owner],
        used=used,
    )
    return dirs, (count - 1) * BLOCK + used[first_block + count - 1]


def _cut(ends: Ints) -> Ints:
    """Where the second and later blocks of one directory start; ``ends`` is the running sum of its entries' sizes."""
    cuts = []
    at = int(np.searchsorted(ends, BLOCK, "right"))
    while at < len(ends):
        cuts.append(at)
        at = int(np.searchsorted(ends, ends[at - 1] + BLOCK, "right"))
    return np.array(cuts, np.int64)


def _place(head: Ints, indexes: Ints, tail: Ints, start: int) -> tuple[Ints, int]:
    """Where each inode starts, and where the last one ends. Inodes start at multiples of 32; a tail does not cross a block.

    In order, but for the gap that a tail leaves when it has to move on to the next block: following inodes that fit it are put there.
    """
    places = array("q")
    at = start
    gap = gap_end = 0
    for before, inline, whole in _rows(head, tail, head + indexes + tail + 31 & ~31):
        if whole <= gap_end - gap:
            places.append(gap)
            gap += whole
            continue
        if inline:
            offset = at + before & 4095
            if offset + inline > BLOCK:
                moved = at + (BLOCK - offset + 31 & ~31)
                if moved - at > gap_end - gap and at // BLOCK == (moved - 1) // BLOCK:
                    gap, gap_end = at, moved
                at = moved
        places.append(at)
        at += whole
    return np.array(places, np.int64), at


def _rows(*columns: Ints) -> Iterator[tuple[int, ...]]:
    """The rows of columns as plain integers. Made a batch at a time: an integer object is five times as large as its place in an array."""
    for first in range(0, len(columns[0]), _BATCH):
        yield from zip(*(column[first : first + _BATCH].tolist() for column in columns), strict=True)


# --- render ------------------------------------------------------------------------------------------------------------------------------------


def _render_inodes(image: bytearray, flat: Flat, layout: _Layout) -> None:
    slots = np.frombuffer(image, "V32")
    kind = flat.mode & 0o170000
    i_u = np.where(layout.datalayout == fmt.CHUNK_BASED, fmt.CHUNK_FORMAT_INDEXES | (flat.chunk_bits - 12), layout.block)
    i_u[(kind != stat.S_IFREG) & (kind != stat.S_IFDIR) & (kind != stat.S_IFLNK)] = 0
    i_u = np.where(flat.i_rdev > 0, flat.i_rdev, i_u)
    icount = np.where(layout.area > 0, (layout.area - fmt.XATTR_IBODY_HEADER) // 4 + 1, 0)
    for short, dtype, at in _batches(layout.compact):
        rows = np.zeros(len(at), dtype)
        rows["i_format"] = (layout.datalayout[at] << fmt.I_DATALAYOUT_BIT) | (0 if short else fmt.I_VERSION_EXTENDED)
        rows["i_xattr_icount"] = icount[at]
        rows["i_mode"] = flat.mode[at]
        rows["i_size"] = layout.size[at]
        rows["i_u"] = i_u[at]
        rows["i_ino"] = at + 1
        rows["i_uid"] = flat.uid[at]
        rows["i_gid"] = flat.gid[at]
        rows["i_nlink"] = flat.nlink[at]
        if not short:
            rows["i_mtime"] = flat.mtime[at]
            rows["i_mtime_nsec"] = flat.mtime_ns[at]
        halves = rows.view("V32").reshape(len(at), dtype.itemsize >> fmt.ISLOT_BITS)
        for half in range(halves.shape[1]):
            slots[(layout.pos[at] >> fmt.ISLOT_BITS) + half] = halves[:, half]


def _batches(compact: Mask) -> Iterator[tuple[bool, np.dtype[np.void], Ints]]:
    """Which inodes are of which form, some at a time: there are a hundred bytes for each on the way."""
    for short, dtype in ((True, fmt.INODE_COMPACT), (False, fmt.INODE_EXTENDED)):
        every = np.flatnonzero(compact == short)
        for first in range(0, len(every), _BATCH):
            yield short, dtype, every[first : first + _BATCH]


def _render_xattrs(image: bytearray, layout: _Layout) -> None:
    out = memoryview(image)
    out[layout.xattr_at : layout.xattr_at + len(layout.xattrs.shared)] = layout.xattrs.shared
    for at, data in layout.xattrs.areas:
        place = int(layout.pos[at]) + (32 if layout.compact[at] else 64)
        out[place : place + len(data)] = data


def _render_chunks(image: bytearray, flat: Flat, layout: _Layout, indexes: np.typing.NDArray[np.uint64]) -> None:
    np.frombuffer(image, "<u8")[slices(layout.pos + layout.head >> 3, flat.extent_count)] = indexes


def _render_data(image: bytearray, flat: Flat, layout: _Layout) -> None:
    """Link targets and small files: inline, or in a block of their own when that did not fit."""
    out = memoryview(image)
    places = np.where(layout.inline > 0, layout.pos + layout.head, layout.block * BLOCK)
    for at in np.flatnonzero(flat.has_data & (flat.size > 0)).tolist():
        data = flat.inodes[at].data or b""
        place = int(places[at])
        out[place : place + len(data)] = data


def _render_dirs(image: bytearray, flat: Flat, layout: _Layout) -> None:
    dirs = layout.dirs
    out = memoryview(image)
    words = np.frombuffer(image, "<u4")
    nid = layout.pos - layout.meta_blkaddr * BLOCK >> fmt.ISLOT_BITS
    file_type = fmt.FILE_TYPE_OF_MODE[flat.mode >> 12]
    full = layout.size[dirs.owner] // BLOCK
    inline = (layout.inline[dirs.owner] > 0) & (dirs.nth == full)
    place = np.where(inline, (layout.pos + layout.head)[dirs.owner], (layout.block[dirs.owner] + dirs.nth) * BLOCK)
    # A batch of blocks at a time: there are ten numbers for each entry on the way.
    step = max(1, _BATCH * len(dirs.first) // len(flat.names))
    for block in range(0, len(dirs.first), step):
        some = slice(block, block + step)
        first, entries, at = dirs.first[some], dirs.entries[some], place[some]
        low, high = int(first[0]), int(first[-1] + entries[-1])
        names = flat.names[low:high]
        lengths = np.fromiter(map(len, names), np.int64, high - low)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        nth = np.arange(low, high) - np.repeat(first, entries)
        names_at = entries * fmt.DIRENT.itemsize
        nameoff = np.repeat(names_at - starts[first - low], entries) + starts
        inode = flat.entry_inode[low:high]
        word = (np.repeat(at, entries) >> 2) + nth * 3
        words[word] = nid[inode] & 0xFFFFFFFF
        words[word + 1] = nid[inode] >> 32
        words[word + 2] = nameoff | file_type[inode].astype(np.int64) << 16
        joined = memoryview(b"".join(names))
        stops = ends[first - low + entries - 1]
        for here, start, stop in zip((at + names_at).tolist(), starts[first - low].tolist(), stops.tolist(), strict=True):
            out[here : here + stop - start] = joined[start:stop]


def _render_devices(image: bytearray, layout: _Layout, blocks_of: Ints) -> None:
    slots = np.zeros(len(blocks_of), fmt.DEVICE_SLOT)
    slots["blocks"] = blocks_of
    slots["mapped_blkaddr"] = layout.blocks + np.cumsum(blocks_of) - blocks_of
    at = fmt.SUPER_OFFSET + fmt.SUPER_BLOCK.itemsize
    image[at : at + slots.nbytes] = slots.tobytes()


def _render_super(image: bytearray, flat: Flat, layout: _Layout, blocks: int, devices: int, uuid: bytes | None, volume_name: bytes) -> None:
    block = np.zeros(1, fmt.SUPER_BLOCK)
    block["magic"] = fmt.SUPER_MAGIC
    block["feature_compat"] = fmt.FEATURE_COMPAT_SB_CHKSUM | fmt.FEATURE_COMPAT_MTIME
    block["blkszbits"] = 12
    block["root_nid"] = int(layout.pos[0]) - layout.meta_blkaddr * BLOCK >> fmt.ISLOT_BITS
    block["inos"] = len(flat.inodes)
    block["build_time"], block["build_time_nsec"] = layout.build_time
    block["blocks"] = blocks
    block["meta_blkaddr"] = layout.meta_blkaddr
    block["xattr_blkaddr"] = layout.xattr_at // BLOCK
    block["volume_name"] = volume_name
    chunked = bool((flat.extent_count > 0).any())
    block["feature_incompat"] = (fmt.FEATURE_INCOMPAT_CHUNKED_FILE if chunked else 0) | (
        fmt.FEATURE_INCOMPAT_DEVICE_TABLE if devices else 0
    )
    block["extra_devices"] = devices
    block["devt_slotoff"] = (fmt.SUPER_OFFSET + fmt.SUPER_BLOCK.itemsize) // fmt.DEVICE_SLOT.itemsize if devices else 0
    end = fmt.SUPER_OFFSET + fmt.SUPER_BLOCK.itemsize
    image[fmt.SUPER_OFFSET : end] = block.tobytes()
    block["uuid"] = uuid if uuid is not None else content_digest(image)[:16]
    image[fmt.SUPER_OFFSET : end] = block.tobytes()
    checksum = crc32c.crc32c(memoryview(image)[fmt.SUPER_OFFSET : BLOCK]) ^ 0xFFFFFFFF  # the kernel does not invert the result
    struct.pack_into("<I", image, fmt.SUPER_OFFSET + 4, checksum)
