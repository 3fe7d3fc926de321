"""LSMT, the log-structured layer format of OverlayBD: header, trailer and index entries as bytes.

Layout and limits follow containerd/overlaybd (src/overlaybd/lsmt/file.cpp and index.h); docs/formats/overlaybd.md has the tables. All integers are
little-endian. The format has no checksum: a flipped bit in the index or the data is found only where it makes the index impossible.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError, UsageError
from dsec_layers.overlaybd.segments import SECTOR, Bools, Ints, Segments

__all__ = [
    "ENTRY",
    "MAX_LBA",
    "MAX_LENGTH",
    "MAX_RO_ENTRIES",
    "NIL_UUID",
    "PAD",
    "SPACE",
    "Flags",
    "Header",
    "check_sealed",
    "decode_entries",
    "encode_entries",
    "log_problems",
    "looks_like_lsmt",
]

SPACE = 4096
"""Bytes that a header or trailer takes."""

ENTRY = 16
"""Bytes of an index entry."""

MAX_LENGTH = (1 << 14) - 1
"""Sectors in the longest segment."""

MAX_LBA = (1 << 50) - 1
"""The sector number that marks a pad; sectors below it can be mapped."""

MAX_RO_ENTRIES = 1_000_000
"""Index entries, pads included, in a sealed layer (MAX_LSMT_RO_INDEX_SIZE)."""

NIL_UUID = "00000000-0000-0000-0000-000000000000"

PAD = struct.pack("<QQ", MAX_LBA, 0)
"""An index entry that says nothing."""

_MAGIC = b"LSMT\0\x01\x02\0" + bytes.fromhex("657e63d29444084ca2d2c8ec4fcfae8a")
_FIELDS = struct.Struct("<24sIIQQQ37s37sHBB256s")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\Z")
_TAG = 256
_ENTRY = struct.Struct("<QQ")
_OFFSET_BITS = np.uint64(50)
_ZEROED_BIT = np.uint64(55)
_TAG_BIT = np.uint64(56)
_OFFSET_MASK = np.uint64(MAX_LBA)
_MOFFSET_MASK = np.uint64((1 << 55) - 1)


class Flags:
    """Bits of the flags field, and the combinations that files carry."""

    HEADER = 1
    DATA = 2
    SEALED = 4
    SPARSE = 16
    HYBRID = 32  # AgentENV's own kind of upper

    LAYER_HEADER = HEADER | DATA | SEALED
    LAYER_TRAILER = DATA | SEALED
    UPPER_DATA = HEADER | DATA
    UPPER_INDEX = HEADER
    SPARSE_DATA = HEADER | DATA | SPARSE


@dataclass(frozen=True, slots=True)
class Header:
    """A header or trailer. ``index_size`` counts entries, the other sizes are bytes; UUIDs are text in whichever case was stored."""

    flags: int
    index_offset: int = 0
    index_size: int = 0
    virtual_size: int = 0
    uuid: str = NIL_UUID
    parent_uuid: str = NIL_UUID
    user_tag: bytes = b""

    def render(self) -> bytes:
        """The SPACE bytes on disk. Raises UsageError for a UUID or tag that does not fit."""
        if len(self.user_tag) > _TAG:
            raise UsageError(f"the user tag has {len(self.user_tag)} bytes, more than {_TAG}")
        uuid, parent = _check_uuid(self.uuid), _check_uuid(self.parent_uuid)
        if not 0 <= self.virtual_size <= MAX_LBA * SECTOR:
            raise UsageError(f"a disk cannot have {self.virtual_size} bytes")
        fields = (self.flags, self.index_offset, self.index_size, self.virtual_size, uuid, parent, 0, 1, 1, self.user_tag)
        return _FIELDS.pack(_MAGIC, _FIELDS.size, *fields).ljust(SPACE, b"\0")

    @classmethod
    def parse(cls, data: Buffer, what: str = "LSMT header") -> Header:
        """Read a header or trailer from SPACE bytes. Raises ImageError. Fields that the official reader ignores are not checked."""
        if len(data) < SPACE:
            raise ImageError(f"{what} is cut short", code=ImageCode.TRUNCATED)
        magic, _, flags, offset, entries, size, uuid, parent, _, _, _, tag = _FIELDS.unpack_from(data)
        if magic != _MAGIC:
            raise ImageError(f"{what}: not LSMT (wrong magic)", code=ImageCode.BAD_MAGIC)
        if size > MAX_LBA * SECTOR:
            raise ImageError(f"{what}: virtual size {size} is beyond the format", code=ImageCode.OUT_OF_BOUNDS)
        return cls(flags, offset, entries, size, _parse_uuid(uuid), _parse_uuid(parent), tag.rstrip(b"\0"))


def looks_like_lsmt(data: Buffer) -> bool:
    """Whether these first bytes of a file announce LSMT."""
    return bytes(data[:24]) == _MAGIC


def _check_uuid(text: str) -> bytes:
    if not _UUID.match(text):
        raise UsageError(f"not a UUID: {text[:60]!r}")
    return text.upper().encode()


def _parse_uuid(raw: bytes) -> str:
    """AgentENV leaves an absent parent all zero, and the official reader takes what it cannot read for nil: opening must not hang on a name."""
    text = raw.rstrip(b"\0").decode("latin-1")
    return text if _UUID.match(text) else NIL_UUID


def decode_entries(data: Buffer) -> tuple[Segments, Ints]:
    """Index entries as segments in stored order, and the place of each in the stored table; pads are left out.

    ``source`` is the tag byte. Nothing is checked: lengths may be zero and ranges absurd. ``len(data)`` is a multiple of ENTRY.
    """
    words = np.frombuffer(data, "<u8").reshape(-1, 2)
    offset = words[:, 0] & _OFFSET_MASK
    place = np.flatnonzero(offset != _OFFSET_MASK)
    low, high, lba = words[place, 0], words[place, 1], offset[place].astype(np.int64)
    segments = Segments(
        lba,
        lba + (low >> _OFFSET_BITS).astype(np.int64),
        (high & _MOFFSET_MASK).astype(np.int64),
        (high >> _TAG_BIT).astype(np.int16),
        ((high >> _ZEROED_BIT) & np.uint64(1)).astype(np.bool_),
    )
    return segments, place


def encode_entries(segments: Segments) -> bytes:
    """The stored form of segments, tags taken from ``source``. They must be no longer than MAX_LENGTH and have sources below 256."""
    words = np.empty((len(segments), 2), "<u8")
    words[:, 0] = segments.lba.astype(np.uint64) | ((segments.end - segments.lba).astype(np.uint64) << _OFFSET_BITS)
    zeroed: npt.NDArray[np.uint64] = segments.zeroed.astype(np.uint64) << _ZEROED_BIT
    words[:, 1] = segments.moffset.astype(np.uint64) | zeroed | (segments.source.astype(np.uint64) << _TAG_BIT)
    return words.tobytes()


def encode_entry(lba: int, end: int, moffset: int, zeroed: bool) -> bytes:
    """The stored form of one segment without a tag; see encode_entries."""
    return _ENTRY.pack(lba | (end - lba) << 50, moffset | zeroed << 55)


def log_problems(segments: Segments, first: int, data_end: int) -> Bools:
    """Which segments cannot be: empty, or mapped to something outside ``[first, data_end)`` (sectors of the data file).

    A zeroed segment names a place too, at most ``data_end``. This is the range rule of the official reader.
    """
    moffset_end = segments.moffset + np.where(segments.zeroed, 0, segments.end - segments.lba)
    bad = (segments.end <= segments.lba) | (segments.end > MAX_LBA)
    bad |= (segments.moffset < first) | (moffset_end > data_end)
    return bad


def check_sealed(segments: Segments, data_end: int) -> None:
    """Raise ImageError unless these can be the index of a sealed layer whose data ends at sector ``data_end``."""
    bad = log_problems(segments, SPACE // SECTOR, data_end)
    if bad.any():
        raise ImageError(
            f"LSMT index: segment {_describe(segments, int(bad.argmax()))} is outside of the layer", code=ImageCode.OUT_OF_BOUNDS
        )
    crossed = segments.end[:-1] > segments.lba[1:]
    if crossed.any():
        raise ImageError(
            f"LSMT index: segment {_describe(segments, int(crossed.argmax()))} overlaps the next, or they are out of order",
            code=ImageCode.INCONSISTENT,
        )


def _describe(segments: Segments, index: int) -> str:
    lba, end, moffset = int(segments.lba[index]), int(segments.end[index]), int(segments.moffset[index])
    return f"{index} (sectors {lba}-{end} at {moffset}{', zeroed' if segments.zeroed[index] else ''})"
