"""zstd framing: metadata blob, segments blob with its seek table, chunk blob. All are files that ``zstd -d`` reads.

A metadata blob is one zstd frame (the EROFS metadata image) and a skippable frame with the segment table. A segments blob is one frame a segment and
then the seek table of the zstd seekable format (contrib/seekable_format/zstd_seekable_compression_format.md), a skippable frame as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import zstandard

from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError

__all__ = [
    "CHUNKS_BOUND",
    "MAX_METADATA",
    "METADATA_BOUND",
    "Bound",
    "SeekTable",
    "compress",
    "decompress",
    "decompress_into",
    "frame_length",
    "join_metadata",
    "skippable",
    "split_metadata",
    "unpack",
]

SKIPPABLE: Final = 0x184D2A50
SEEK_SKIPPABLE: Final = 0x184D2A5E
SEEK_MAGIC: Final = 0x8F92EAB1
MAX_METADATA: Final = 4 << 30
"""Bytes of the largest metadata image."""

_RLE: Final = 1
_MAX_RATIO: Final = 1 << 15
"""A block of 128 KiB takes four bytes at least."""
_HEAD: Final = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Bound:
    """How many bytes a frame of some kind may hold: ``total`` at most, and ``free`` and ``ratio`` times its compressed bytes.

    A reader takes that much memory on the word of whoever wrote the frame, so ``ratio`` is a little more than honest content of the kind reaches.
    """

    total: int
    free: int
    ratio: int

    def most(self, stored: int) -> int:
        """Bytes that a frame of ``stored`` bytes may hold."""
        return min(self.total, self.free + self.ratio * stored)


METADATA_BOUND: Final = Bound(MAX_METADATA, 256 << 20, 64)
"""Inodes and names are compressed to a twentieth at best (200,000 empty files, numbered through); chunk indexes of holes to nothing: 8 MiB of them is
what a file of 64 GiB or more has, so 32 such files are free."""

CHUNKS_BOUND: Final = Bound(MAX_METADATA, 1 << 20, 4)
"""Two thirds of a chunk table are digests, which do not compress."""


def compress(data: Buffer, level: int = 3) -> bytes:
    """One zstd frame with content size and checksum-free (digests do that job)."""
    return zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True).compress(data)


def decompress(frame: Buffer, size: int) -> bytes:
    """The content of one zstd frame that must decompress to exactly ``size`` bytes. ImageError for anything else."""
    if size > len(memoryview(frame)) * _MAX_RATIO:
        raise ImageError(f"zstd frame of {len(memoryview(frame))} bytes cannot hold the {size} it should", code=ImageCode.INCONSISTENT)
    try:
        if zstandard.frame_content_size(frame) != size:
            raise ImageError(f"zstd frame does not hold the {size} bytes it should", code=ImageCode.INCONSISTENT)
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ImageError(f"bad zstd frame: {error}", code=ImageCode.BAD_ENCODING) from error
    if len(data) != size:
        raise ImageError(f"zstd frame holds {len(data)} bytes, not {size}", code=ImageCode.INCONSISTENT)
    return data


def decompress_into(frame: Buffer, target: memoryview) -> None:
    """As ``decompress``, into memory that is there already: one frame whose content fills ``target``. Raises ImageError."""
    try:
        if zstandard.frame_content_size(frame) != len(target):
            raise ImageError(f"zstd frame does not hold the {len(target)} bytes it should", code=ImageCode.INCONSISTENT)
        # The whole frame and room for all its content at hand, the library decompresses in one go.
        if zstandard.ZstdDecompressor().stream_reader(frame, read_size=len(frame)).readinto(target) != len(target):
            raise ImageError("zstd frame ends early", code=ImageCode.TRUNCATED)
    except zstandard.ZstdError as error:
        raise ImageError(f"bad zstd frame: {error}", code=ImageCode.BAD_ENCODING) from error
    if frame_length(frame) != len(frame):
        raise ImageError("bad zstd frame: more follows it", code=ImageCode.BAD_ENCODING)


def skippable(data: Buffer, magic: int = SKIPPABLE) -> bytes:
    """A zstd skippable frame."""
    return _HEAD.pack(magic, len(data)) + bytes(data)


def join_metadata(image: Buffer, table: Buffer, level: int = 9) -> bytes:
    """The metadata blob of an EROFS metadata image and a segment table."""
    return compress(image, level) + skippable(table)


def unpack(frame: Buffer, limit: int, bound: Bound | None = None) -> bytes:
    """The content of one zstd frame, whatever its size up to ``limit`` bytes and ``bound``. Raises ImageError."""
    view = memoryview(frame)
    return decompress(frame, _content_size(view, limit if bound is None else min(limit, bound.most(len(view)))))


def split_metadata(blob: Buffer, limit: int = MAX_METADATA) -> tuple[bytes, bytes]:
    """(EROFS metadata image, segment table) of a metadata blob; the image may have ``limit`` bytes within METADATA_BOUND. Raises ImageError."""
    view = memoryview(blob).cast("B")
    end = frame_length(view)
    size = _content_size(view[:end], min(limit, METADATA_BOUND.most(end)))
    image, rest = decompress(view[:end], size), view[end:]
    if len(rest) < _HEAD.size:
        raise ImageError("metadata blob has no segment table", code=ImageCode.INCONSISTENT)
    magic, length = _HEAD.unpack_from(rest)
    if magic != SKIPPABLE or _HEAD.size + length != len(rest):
        raise ImageError("metadata blob has no proper segment table frame", code=ImageCode.BAD_ENCODING)
    return image, bytes(rest[_HEAD.size :])


def frame_length(data: Buffer) -> int:
    """The compressed bytes of the zstd frame that ``data`` begins with (RFC 8878, 3.1.1: header, blocks, checksum). Raises ImageError."""
    view = memoryview(data)
    try:
        at = zstandard.frame_header_size(view)
        checksum = zstandard.get_frame_parameters(view).has_checksum
    except zstandard.ZstdError as error:
        raise ImageError(f"bad zstd frame: {error}", code=ImageCode.BAD_ENCODING) from error
    last = False
    while not last:
        header = int.from_bytes(view[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _RLE else size)
        if at > len(view):
            raise ImageError("zstd frame is truncated", code=ImageCode.TRUNCATED)
    return at + (4 if checksum else 0)


def _content_size(view: memoryview, limit: int) -> int:
    """What a frame says it holds; ImageError if it does not say, or says more than ``limit`` or than zstd can put in so few bytes."""
    try:
        size = zstandard.frame_content_size(view)
    except zstandard.ZstdError as error:
        raise ImageError(f"bad zstd frame: {error}", code=ImageCode.BAD_ENCODING) from error
    if not 0 <= size <= min(limit, len(view) * _MAX_RATIO):
        raise ImageError(f"zstd frame of {len(view)} bytes says that it holds {size} bytes, the limit is {limit}", code=ImageCode.LIMIT)
    return size


class SeekTable:
    """Collects the seek table of a segments blob while its frames are written."""

    def __init__(self) -> None:
        self._entries = bytearray()
        self._count = 0

    def add_checksum(self, stored: int, size: int, checksum: int) -> None:
        """One frame: compressed size, uncompressed size, and the XXH64 of the content (its low 32 bits are kept)."""
        self._entries += struct.pack("<III", stored, size, checksum & 0xFFFFFFFF)
        self._count += 1

    def frame(self) -> bytes:
        """The skippable frame that ends the blob: entries, then the footer (count, descriptor with the checksum flag, magic)."""
        footer = struct.pack("<IBI", self._count, 0x80, SEEK_MAGIC)
        return skippable(bytes(self._entries) + footer, SEEK_SKIPPABLE)
