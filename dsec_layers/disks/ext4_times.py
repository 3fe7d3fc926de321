"""Times in a new ext4 file system that say when it was made or read, not what is in it: replaced, so that the same input gives the same image.

mke2fs copies access and change times from the host. Here both become the file's modification time, and the creation time that of the file system. Structures and
checksums are those of the kernel (Documentation/filesystems/ext4, fs/ext4/ext4.h).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from dsec_layers.errors import ToolError
from dsec_layers.fsio import pread_exact, pwrite_all
from dsec_layers.overlaybd.zfile_format import raw_crc32c

__all__ = ["settle_times"]

_SUPER: Final = 1024
_MAGIC: Final = 0xEF53
_METADATA_CSUM: Final = 0x400
_INODE_UNINIT: Final = 1
_ONES: Final = 0xFFFFFFFF
_INODE: Final = np.dtype(
    {
        "names": ["mode", "atime", "ctime", "mtime", "links", "generation", "csum_lo", "csum_hi", "ctime_extra", "mtime_extra", "atime_extra", "crtime", "crtime_extra"],
        "formats": ["<u2", "<u4", "<u4", "<u4", "<u2", "<u4", "<u2", "<u2", "<u4", "<u4", "<u4", "<u4", "<u4"],
        "offsets": [0x0, 0x8, 0xC, 0x10, 0x1A, 0x64, 0x7C, 0x82, 0x84, 0x88, 0x8C, 0x90, 0x94],
        "itemsize": 256,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Super:
    inodes_per_group: int
    groups: int
    block: int
    first_block: int
    descriptor: int
    seed: int
    has_checksums: bool

    @classmethod
    def read(cls, fd: int, base: int) -> Self:
        data = pread_exact(fd, 1024, base + _SUPER)
        inodes, log_block, per_group, inode_size = (struct.unpack_from("<I", data, at)[0] for at in (0x0, 0x18, 0x28, 0x58))
        (first_block,), (ro_compat,), (magic,) = (
            struct.unpack_from(form, data, at) for form, at in (("<I", 0x14), ("<I", 0x64), ("<H", 0x38))
        )
        if magic != _MAGIC or inode_size & 0xFFFF != _INODE.itemsize or not per_group:
            raise ToolError("mke2fs made a file system of another kind than it was told to")
        descriptor = struct.unpack_from("<H", data, 0xFE)[0] or 32
        seed = raw_crc32c(data[0x68:0x78], _ONES)
        return cls(
            per_group, inodes // per_group, 1024 << log_block, first_block, max(descriptor, 32), seed, bool(ro_compat & _METADATA_CSUM)
        )


def settle_times(fd: int, base: int, epoch: int) -> None:
    """Set the times in the file system that begins at byte ``base`` of a file; creation times become ``epoch``. Raises OSError, ToolError."""
    found = _Super.read(fd, base)
    table = pread_exact(fd, found.groups * found.descriptor, base + (found.first_block + 1) * found.block)
    for group in range(found.groups):
        at = group * found.descriptor
        place, flags, unused = (
            struct.unpack_from(form, table, at + offset)[0] for form, offset in (("<I", 0x8), ("<H", 0x12), ("<H", 0x1C))
        )
        if found.descriptor >= 64:
            place |= struct.unpack_from("<I", table, at + 0x28)[0] << 32
            unused |= struct.unpack_from("<H", table, at + 0x32)[0] << 16
        count = 0 if flags & _INODE_UNINIT else found.inodes_per_group - unused
        if count > 0:
            _settle_table(fd, base + place * found.block, count, group * found.inodes_per_group + 1, found, epoch)


def _settle_table(fd: int, offset: int, count: int, first: int, found: _Super, epoch: int) -> None:
    data = bytearray(pread_exact(fd, count * _INODE.itemsize, offset))
    inodes = np.frombuffer(data, _INODE)
    used = (inodes["mode"] != 0) | (inodes["links"] != 0)
    for name in ("atime", "ctime"):
        inodes[name][used] = inodes["mtime"][used]
        inodes[f"{name}_extra"][used] = inodes["mtime_extra"][used]
    inodes["crtime"][used] = epoch & _ONES
    inodes["crtime_extra"][used] = epoch >> 32 & 3
    if found.has_checksums:
        inodes["csum_lo"][used] = inodes["csum_hi"][used] = 0
        for number in np.flatnonzero(used).tolist():
            raw = data[number * _INODE.itemsize : (number + 1) * _INODE.itemsize]
            state = raw_crc32c(struct.pack("<II", first + number, int(inodes["generation"][number])), found.seed)
            state = raw_crc32c(raw, state)
            inodes["csum_lo"][number], inodes["csum_hi"][number] = state & 0xFFFF, state >> 16
    pwrite_all(fd, data, offset)
