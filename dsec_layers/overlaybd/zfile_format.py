"""ZFile, the block-compressed container of OverlayBD: header, trailer, jump table and block checksums as bytes.

Follows containerd/overlaybd (src/overlaybd/zfile/zfile.cpp and compressor.h); docs/formats/overlaybd.md has the tables. All integers are little-endian.
Every checksum is CRC-32C without the usual inversions ("raw"), so a checksum of zeros is zero unless the seed says otherwise.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from crc32c import crc32c

from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.overlaybd.segments import Ints

__all__ = [
    "BLOCK_CRC",
    "CRC_GOOD",
    "CRC_SEED",
    "MAX_BLOCKS",
    "SPACE",
    "Algorithm",
    "Flags",
    "ZHeader",
    "block_bound",
    "block_crc",
    "looks_like_zfile",
    "parse_table",
    "raw_crc32c",
]

SPACE = 512
"""Bytes that a header or trailer takes."""

MAX_BLOCKS = 1_000_000_000
BLOCK_CRC = 4
"""Bytes of the checksum behind each block."""

_MAGIC = b"ZFile\0\x01\0tuji.yyf@Alibaba"
_FIELDS = struct.Struct("<24sIIQQQQIIIBBBxIIB7x")
_DIGEST_AT = 28
_ONES = 0xFFFFFFFF
_BLOCK_SEED = 100007

CRC_SEED = _BLOCK_SEED ^ _ONES
"""What to hand to ``crc32c.crc32c`` as the value before a block."""

CRC_GOOD = _ONES
"""What it then returns for a block with its checksum behind it, if that is right: the register has become zero."""


class Algorithm(IntEnum):
    """Compression of the blocks."""

    LZ4 = 1
    ZSTD = 2


class Flags:
    """Bits of the flags field, and the combinations that are written."""

    HEADER = 1
    DATA = 2
    SEALED = 4
    OVERWRITTEN = 8
    DIGEST = 16

    FIRST_HEADER = HEADER | DATA | DIGEST
    FINAL_HEADER = FIRST_HEADER | OVERWRITTEN
    TRAILER = DATA | SEALED | DIGEST


def raw_crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC-32C with the register starting at ``seed`` and without inversions."""
    return crc32c(data, seed ^ _ONES) ^ _ONES


def block_crc(data: Buffer) -> int:
    """The checksum stored behind a compressed block."""
    return crc32c(data, CRC_SEED) ^ _ONES


def block_bound(algorithm: Algorithm, block_size: int) -> int:
    """The most bytes that a compressed block can take, without its checksum (LZ4_compressBound, ZSTD_compressBound)."""
    if algorithm is Algorithm.LZ4:
        return block_size + block_size // 255 + 16
    return block_size + (block_size >> 8) + (max(0, (128 << 10) - block_size) >> 11)


@dataclass(frozen=True, slots=True)
class ZHeader:
    """A header or trailer. ``blocks`` is the field index_size, ``size`` original_file_size; ``crc`` the field verify: blocks carry checksums."""

    flags: int
    algorithm: Algorithm
    block_size: int
    crc: bool
    index_offset: int = 0
    blocks: int = 0
    size: int = 0
    index_crc: int = 0
    dict_size: int = 0

    def render(self) -> bytes:
        """The SPACE bytes on disk, with their digest."""
        numbers = (self.flags, self.index_offset, self.blocks, self.size, self.index_crc, 0, self.block_size)
        options = (self.algorithm, 0, 0, 0, self.dict_size, self.crc)
        data = bytearray(_FIELDS.pack(_MAGIC, _FIELDS.size, 0, *numbers, *options).ljust(SPACE, b"\0"))
        struct.pack_into("<I", data, _DIGEST_AT, raw_crc32c(data))
        return bytes(data)

    @classmethod
    def parse(cls, data: Buffer, what: str = "ZFile header") -> ZHeader:
        """Read a header or trailer from SPACE bytes. Raises ImageError.

        Blobs of 2021 have garbage in the padding and no digest, so padding is never looked at and the digest only where the flags announce one.
        """
        if len(data) < SPACE:
            raise ImageError(f"{what} is cut short", code=ImageCode.TRUNCATED)
        fields = _FIELDS.unpack_from(data)
        magic, _, digest, flags, index_offset, blocks, size, index_crc, _, block_size, algorithm, _, use_dict, _, dict_size, crc = fields
        if magic != _MAGIC:
            raise ImageError(f"{what}: not a ZFile (wrong magic)", code=ImageCode.BAD_MAGIC)
        if flags & Flags.DIGEST:
            blank = bytearray(data[:SPACE])
            blank[_DIGEST_AT : _DIGEST_AT + 4] = bytes(4)
            if raw_crc32c(blank) != digest:
                raise ImageError(f"{what}: digest mismatch", code=ImageCode.BAD_CHECKSUM)
        if algorithm not in (Algorithm.LZ4, Algorithm.ZSTD):
            raise ImageError(f"{what}: unsupported compression algorithm {algorithm}", code=ImageCode.UNKNOWN_FEATURE)
        if use_dict:
            raise ImageError(f"{what}: compression with a dictionary is not supported", code=ImageCode.UNKNOWN_FEATURE)
        if block_size & (block_size - 1) or not 512 <= block_size <= 65536:
            raise ImageError(f"{what}: block size {block_size} is not a power of two between 512 and 65536", code=ImageCode.OUT_OF_BOUNDS)
        return cls(flags, Algorithm(algorithm), block_size, bool(crc), index_offset, blocks, size, index_crc, dict_size)


def looks_like_zfile(data: Buffer) -> bool:
    """Whether these first bytes of a file announce a ZFile."""
    return bytes(data[:24]) == _MAGIC


def parse_table(table: Buffer, header: ZHeader) -> Ints:
    """The offsets of the blocks and, last, of their end, from the jump table's bytes. Raises ImageError for a table that cannot be."""
    if header.flags & Flags.DIGEST and raw_crc32c(table) != header.index_crc:
        raise ImageError("ZFile jump table: checksum mismatch", code=ImageCode.BAD_CHECKSUM)
    lengths = np.frombuffer(table, "<u4")
    overhead = BLOCK_CRC if header.crc else 0
    if len(lengths) and int(lengths.min()) <= overhead:
        raise ImageError(f"ZFile jump table: block {int(lengths.argmin())} is empty", code=ImageCode.INCONSISTENT)
    if len(lengths) and int(lengths.max()) > block_bound(header.algorithm, header.block_size) + overhead:
        raise ImageError(
            f"ZFile jump table: block {int(lengths.argmax())} is larger than a compressed block can be", code=ImageCode.OUT_OF_BOUNDS
        )
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    starts += SPACE + header.dict_size
    if int(starts[-1]) != header.index_offset:
        raise ImageError(
            f"ZFile jump table: the blocks end at {int(starts[-1])}, not where the table starts ({header.index_offset})",
            code=ImageCode.INCONSISTENT,
        )
    return starts
