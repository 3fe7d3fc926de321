"""Read an EROFS image from a buffer: superblock, device table, inodes, directories, extended attributes, chunk indexes, inline data.

Made for bytes from anywhere: whatever the buffer holds, the answer is a value or ImageError, in time and memory bounded by the buffer's size.
Reads what this project's writer and mkfs.erofs 1.5 to 1.9 write with 4 KiB blocks; the data of compressed files is recognised and refused, their
metadata is readable.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import crc32c
import numpy as np

from dsec_layers.digest import Buffer
from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.inodes import Geometry, InodeTable, decode_chunks, decode_inodes
from dsec_layers.erofs.scan import Scan, read_directories, scan
from dsec_layers.erofs.tree import BLOCK, HOLE, Inode, Tree
from dsec_layers.erofs.xattr import Pair, decode_area, decode_entry
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["Device", "Image", "InodeInfo", "Superblock"]


@dataclass(frozen=True, slots=True)
class Superblock:
    """The superblock's fields under the kernel's names."""

    checksum: int
    feature_compat: int
    feature_incompat: int
    root_nid: int
    inos: int
    build_time: int
    build_time_nsec: int
    blocks: int
    meta_blkaddr: int
    xattr_blkaddr: int
    uuid: bytes
    volume_name: bytes
    extra_devices: int
    devt_slotoff: int


@dataclass(frozen=True, slots=True)
class Device:
    """One extra device: its size and its unified address in blocks, and the 64 bytes of its tag."""

    blocks: int
    mapped_blkaddr: int
    tag: bytes


@dataclass(frozen=True, slots=True)
class InodeInfo:
    """What one inode says of itself; ``layout`` is the data layout (``format.FLAT_PLAIN`` …), ``rdev`` as os.makedev spells it."""

    nid: int
    mode: int
    nlink: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    size: int
    rdev: int
    layout: int
    chunk_bits: int


class Image:
    """An EROFS image in a buffer: a metadata image alone, or one with its data behind it (a flat view)."""

    def __init__(self, buffer: Buffer) -> None:
        """Read superblock and device table. Raises ImageError when they are not well-formed, or the checksum is wrong."""
        self._raw = memoryview(buffer).cast("B")
        self.superblock = _read_super(self._raw)
        self.devices = _read_devices(self._raw, self.superblock)
        length = len(self._raw)
        bytes_ = np.frombuffer(self._raw, np.uint8)
        # mkfs.erofs 1.5 and 1.6 record 0 blocks for a blob device: then its size is unknown, not nothing.
        sizes = [device.blocks or fmt.MAX_BLOCKS for device in self.devices]
        reach = max([self.superblock.blocks, *(device.mapped_blkaddr + device.blocks for device in self.devices)])
        self.geometry = Geometry(
            raw=self._raw,
            words=bytes_[: length & ~3].view("<u4"),
            slots=bytes_[: length & ~31].view("V32"),
            length=length & ~31,
            meta_at=self.superblock.meta_blkaddr * BLOCK,
            xattr_at=self.superblock.xattr_blkaddr * BLOCK,
            build_time=self.superblock.build_time,
            build_time_nsec=self.superblock.build_time_nsec,
            device_blocks=np.array([reach, *sizes], np.int64),
        )

    def scan(self) -> Scan:
        """Every reachable inode and name as columns. Raises ImageError."""
        return scan(self.geometry, self.superblock.root_nid)

    def tree(self, *, metadata_only: bool = False) -> Tree:
        """The whole tree as values; a hard link becomes one Inode under several names.

        Files of whole blocks in the image itself have extents of device 0. A file of a block or more whose end is stored inline has both: extents for its
        whole blocks, and the rest in ``data``. Compressed files are refused, unless ``metadata_only`` is true: then they have no extents.
        """
        found = self.scan()
        table = found.inodes
        if not metadata_only:
            compressed = (table.layout == fmt.COMPRESSED_FULL) | (table.layout == fmt.COMPRESSED_COMPACT)
            found.refuse(compressed, "a compressed file, whose data cannot be read", ImageCode.UNKNOWN_FEATURE)
        columns = (table.mode, table.uid, table.gid, table.mtime, table.mtime_ns)
        inodes = [Inode(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        tree = Tree(inodes[int(found.dir_inode[0])])
        self._fill_data(table, inodes, tree)
        for at, xattrs in self.xattr_lists(table):
            inodes[at].xattrs = xattrs
        kids = [inodes[at] for at in found.child.tolist()]
        for at, first, last in zip(found.dir_inode.tolist(), found.first[:-1].tolist(), found.first[1:].tolist(), strict=True):
            inodes[at].children = dict(zip(found.names[first:last], kids[first:last], strict=True))
        return tree

    def _fill_data(self, table: InodeTable, inodes: list[Inode], tree: Tree) -> None:
        """Sizes, device numbers, inline data and extents."""
        kind = table.mode & 0o170000
        has_size = (kind == stat.S_IFREG) | (kind == stat.S_IFLNK)
        for at, size in zip(np.flatnonzero(has_size).tolist(), table.size[has_size].tolist(), strict=True):
            inodes[at].size = size
        for at in np.flatnonzero((kind == stat.S_IFCHR) | (kind == stat.S_IFBLK)).tolist():
            inodes[at].rdev = fmt.decode_dev(int(table.i_u[at]))
        chunked = np.flatnonzero(table.chunks > 0)
        tree.extents.frombytes(decode_chunks(self.geometry, table).astype("=u8").tobytes())
        firsts = np.cumsum(table.chunks) - table.chunks
        for at, first, count, bits in zip(
            chunked.tolist(), firsts[chunked].tolist(), table.chunks[chunked].tolist(), table.chunk_bits[chunked].tolist(), strict=True
        ):
            inode = inodes[at]
            inode.extent_at, inode.extent_count, inode.chunk_bits = first, count, bits
        flat = has_size & (table.chunks == 0) & ((table.layout == fmt.FLAT_PLAIN) | (table.layout == fmt.FLAT_INLINE))
        for at, data in self.small_data(table, np.flatnonzero(flat & (table.size < BLOCK))):
            inodes[at].data = data
        for at in np.flatnonzero(flat & (table.size >= BLOCK)).tolist():
            self._large_flat(table, at, inodes[at], tree)

    def small_data(self, table: InodeTable, which: np.typing.NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
        """(position in the table, content) of files and links shorter than a block in the plain or inline layout."""
        places = np.where(table.inline > 0, table.body_at, np.where(table.whole > 0, table.i_u * BLOCK, 0))
        absent = (table.whole > 0) & (table.i_u == fmt.NULL_ADDR)
        places[absent] = -1
        raw = self._raw
        for first in range(0, len(which), 1 << 16):  # a batch at a time: as objects the numbers are five times as large
            some = which[first : first + (1 << 16)]
            for at, place, size in zip(some.tolist(), places[some].tolist(), table.size[some].tolist(), strict=True):
                yield at, bytes(raw[place : place + size]) if place >= 0 else bytes(size)

    def _large_flat(self, table: InodeTable, at: int, inode: Inode, tree: Tree) -> None:
        """One extent for the whole blocks of a plain file, and the inline rest."""
        blocks, start = int(table.whole[at]), int(table.i_u[at])
        bits = max(12, ((blocks << 12) - 1).bit_length())
        if bits > fmt.MAX_CHUNK_BITS:
            raise ImageError(f"inode {table.nid[at]}: a file of {blocks} blocks", code=ImageCode.LIMIT)
        inode.chunk_bits, inode.extent_at, inode.extent_count = bits, len(tree.extents), 1
        tree.extents.append(HOLE if start == fmt.NULL_ADDR else start)
        if table.inline[at]:
            place = int(table.body_at[at])
            inode.data = bytes(self._raw[place : place + int(table.inline[at])])

    # --- extended attributes -------------------------------------------------------------------------------------------------------------------

    def xattr_lists(self, table: InodeTable) -> list[tuple[int, tuple[Pair, ...]]]:
        """(position in the table, attributes sorted by name) of every inode that has attributes. Raises ImageError."""
        shared: dict[int, Pair] = {}
        known: dict[bytes, tuple[Pair, ...]] = {}
        lists = []
        budget = self.geometry.length
        has = np.flatnonzero(table.area > 0)
        for at, place, size in zip(has.tolist(), table.area_at[has].tolist(), table.area[has].tolist(), strict=True):
            area = bytes(self._raw[place : place + size])
            pairs = known.get(area)
            if pairs is None:
                try:
                    ids, own = decode_area(area)
                    for id_ in ids:
                        if id_ not in shared:
                            shared[id_], used = self._shared_xattr(id_)
                            budget -= used
                            if budget < 0:
                                raise ImageError("shared extended attributes that overlap", code=ImageCode.INCONSISTENT)
                except ImageError as error:
                    raise error.located(f"inode {table.nid[at]}") from None
                pairs = known[area] = tuple(sorted(chain(own, (shared[id_] for id_ in ids))))
                if len({name for name, _ in pairs}) != len(pairs):
                    raise ImageError(f"inode {table.nid[at]}: an extended attribute twice", code=ImageCode.INCONSISTENT)
            lists.append((at, pairs))
        return lists

    def _shared_xattr(self, id_: int) -> tuple[Pair, int]:
        at = self.geometry.xattr_at + 4 * id_
        pair, after = decode_entry(self._raw, at, len(self._raw))
        return pair, after - at

    # --- single inodes -------------------------------------------------------------------------------------------------------------------------

    def inode(self, nid: int) -> InodeInfo:
        """What inode ``nid`` says of itself. Raises ImageError."""
        table = self._one(nid)
        kind = int(table.mode[0]) & 0o170000
        rdev = fmt.decode_dev(int(table.i_u[0])) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
        names = [name for name in InodeInfo.__slots__ if name not in ("nid", "rdev")]
        return InodeInfo(nid=nid, rdev=rdev, **{name: int(getattr(table, name)[0]) for name in names})

    def xattrs(self, nid: int) -> tuple[Pair, ...]:
        """The extended attributes of inode ``nid``, sorted by name. Raises ImageError."""
        lists = self.xattr_lists(self._one(nid))
        return lists[0][1] if lists else ()

    def directory(self, nid: int, parent: int | None = None) -> dict[bytes, int]:
        """Names and nids in directory ``nid``, whose ``..`` must be ``parent`` (None: its own root). Raises ImageError."""
        table = self._one(nid)
        if int(table.size[0]) > self.geometry.length:
            raise ImageError(f"inode {nid}: a directory larger than the image", code=ImageCode.OUT_OF_BOUNDS)
        parents = np.array([nid if parent is None else parent], np.uint64)
        entries, _ = read_directories(self.geometry, table, parents)
        return dict(zip(entries.names, entries.nid.tolist(), strict=True))

    def lookup(self, path: bytes) -> int | None:
        """The nid at ``path`` (``/`` between names; empty: the root), None when there is none. Links are not followed. Raises ImageError."""
        nid, parent = self.superblock.root_nid, None
        for name in filter(None, path.split(b"/")):
            if not stat.S_ISDIR(self.inode(nid).mode):
                return None
            found = self.directory(nid, parent).get(name)
            if found is None:
                return None
            nid, parent = found, nid
        return nid

    def extents(self, nid: int) -> array[int]:
        """The extents (``device << 32 | block``, HOLE) of a chunk-based file; empty for other layouts. Raises ImageError."""
        extents = array("Q")
        extents.frombytes(decode_chunks(self.geometry, self._one(nid)).astype("=u8").tobytes())
        return extents

    def read(self, nid: int, offset: int, size: int) -> bytes:
        """At most ``size`` bytes of a file or link target from ``offset``, fewer at its end.

        Reads plain, inline and chunk-based layouts; data on another device is read from its unified address, so the buffer must be a flat view.
        Raises ImageError when the data is compressed or not in the buffer.
        """
        table = self._one(nid)
        layout = int(table.layout[0])
        if layout in (fmt.COMPRESSED_FULL, fmt.COMPRESSED_COMPACT):
            raise ImageError(f"inode {nid}: a compressed file, whose data cannot be read", code=ImageCode.UNKNOWN_FEATURE)
        end = min(int(table.size[0]), offset + size)
        extents = decode_chunks(self.geometry, table).tolist() if layout == fmt.CHUNK_BASED else []
        parts: list[bytes] = []
        while offset < end:
            if extents:
                bits = int(table.chunk_bits[0])
                stop = min(end, ((offset >> bits) + 1) << bits)
                place = self._unified(nid, extents[offset >> bits])
                place = place if place is None else place + (offset & ((1 << bits) - 1))
            elif offset < int(table.whole[0]) << 12:
                stop = min(end, int(table.whole[0]) << 12)
                place = None if int(table.i_u[0]) == fmt.NULL_ADDR else int(table.i_u[0]) * BLOCK + offset
            else:
                stop, place = end, int(table.body_at[0]) + offset - (int(table.whole[0]) << 12)
            if place is not None and place + stop - offset > len(self._raw):
                raise ImageError(f"inode {nid}: its data is not in this buffer", code=ImageCode.OUT_OF_BOUNDS)
            parts.append(bytes(stop - offset) if place is None else bytes(self._raw[place : place + stop - offset]))
            offset = stop
        return b"".join(parts)

    def _unified(self, nid: int, extent: int) -> int | None:
        """The byte offset in the flat view of an extent, None for a hole."""
        if extent == HOLE:
            return None
        device, block = extent >> 32, extent & 0xFFFFFFFF
        if device:
            mapped = self.devices[device - 1].mapped_blkaddr
            if not mapped:
                raise ImageError(f"inode {nid}: its data is on device {device}, which is not in this buffer", code=ImageCode.OUT_OF_BOUNDS)
            block += mapped
        return block * BLOCK

    def _one(self, nid: int) -> InodeTable:
        if not 0 <= nid < 1 << 63:
            raise ImageError(f"inode {nid}: outside the image", code=ImageCode.OUT_OF_BOUNDS)
        return decode_inodes(self.geometry, np.array([nid], np.uint64))


def _read_super(raw: memoryview) -> Superblock:
    if len(raw) < BLOCK:
        raise ImageError(f"{len(raw)} bytes are too few for an EROFS image", code=ImageCode.TRUNCATED)
    record = np.frombuffer(raw, fmt.SUPER_BLOCK, 1, fmt.SUPER_OFFSET)[0]
    if record["magic"] != fmt.SUPER_MAGIC:
        raise ImageError("not an EROFS image", code=ImageCode.BAD_MAGIC)
    if record["blkszbits"] != 12:
        raise ImageError(f"blocks of 2^{record['blkszbits']} bytes; only 4096 are supported", code=ImageCode.UNKNOWN_FEATURE)
    unknown = int(record["feature_incompat"]) & ~fmt.FEATURE_INCOMPAT_KNOWN
    if unknown:
        raise ImageError(f"incompatible features {unknown:#x}, which are not supported", code=ImageCode.UNKNOWN_FEATURE)
    if record["dirblkbits"] != 0:
        raise ImageError("directory blocks of another size, which are not supported", code=ImageCode.UNKNOWN_FEATURE)
    if record["build_time_nsec"] >= 1_000_000_000:
        raise ImageError("a build time with nanoseconds out of range", code=ImageCode.OUT_OF_BOUNDS)
    if int(record["feature_compat"]) & fmt.FEATURE_COMPAT_SB_CHKSUM:
        block = bytearray(raw[fmt.SUPER_OFFSET : BLOCK])
        block[4:8] = bytes(4)
        if crc32c.crc32c(block) ^ 0xFFFFFFFF != record["checksum"]:
            raise ImageError("the superblock's checksum is wrong", code=ImageCode.BAD_CHECKSUM)
    if int(record["blocks"]) * BLOCK > len(raw):
        raise ImageError(f"cut short: {len(raw)} bytes of {int(record['blocks']) * BLOCK}", code=ImageCode.TRUNCATED)
    names = [name for name in Superblock.__slots__ if name not in ("uuid", "volume_name")]
    volume_name = record["volume_name"].tobytes().rstrip(b"\0")
    return Superblock(**{name: int(record[name]) for name in names}, uuid=record["uuid"].tobytes(), volume_name=volume_name)


def _read_devices(raw: memoryview, superblock: Superblock) -> tuple[Device, ...]:
    if not superblock.feature_incompat & fmt.FEATURE_INCOMPAT_DEVICE_TABLE or not superblock.extra_devices:
        return ()
    at = superblock.devt_slotoff * fmt.DEVICE_SLOT.itemsize
    if at < fmt.SUPER_OFFSET or at + superblock.extra_devices * fmt.DEVICE_SLOT.itemsize > len(raw):
        raise ImageError("the device table is outside the image", code=ImageCode.OUT_OF_BOUNDS)
    slots = np.frombuffer(raw, fmt.DEVICE_SLOT, superblock.extra_devices, at)
    table = bytes(raw[at : at + slots.nbytes])
    tags = [table[start : start + 64] for start in range(0, len(table), fmt.DEVICE_SLOT.itemsize)]
    return tuple(map(Device, slots["blocks"].tolist(), slots["mapped_blkaddr"].tolist(), tags))
