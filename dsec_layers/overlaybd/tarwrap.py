"""The tar around an OverlayBD blob: registries want layers to be tars, so the blob is the only file of one.

Written as the official ``overlaybd-commit -t`` does, byte for byte: a pax record with the size, then the file ``overlaybd.commit``. Read more widely:
any ustar whose first file, with or without one pax header before it, is the blob.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsec_layers.blocksource import BlockSource, SliceSource
from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.overlaybd.stream import Write

__all__ = ["looks_like_tar", "tar_stream", "tar_writes", "unwrap"]

_BLOCK = 512
_PAYLOAD = 3 * _BLOCK
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")
_CHECKSUM = slice(148, 156)
_RECORD = re.compile(rb"(\d{1,10}) ")
_NAME = b"overlaybd.commit"
_MODE = 0o100644  # with the type bits, as the official tool copies st_mode


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: bytes
    size: int

    @classmethod
    def parse(cls, data: Buffer) -> _Entry | None:
        """The tar header in these bytes, or None when they are not one."""
        if len(data) < _BLOCK:
            return None
        fields = _HEADER.unpack_from(data)
        size, checksum, kind, magic, version = fields[4], fields[6].strip(b" \0"), fields[7], fields[9], fields[10]
        if magic[:5] != b"ustar" or version != b"00" or not re.fullmatch(rb"[0-7]+", checksum):
            return None
        raw = bytes(data[: _CHECKSUM.start]) + b" " * 8 + bytes(data[_CHECKSUM.stop : _BLOCK])
        signed = sum(raw) - 256 * sum(byte >= 128 for byte in raw)  # some old tars summed signed characters
        return cls(kind, _number(size)) if int(checksum, 8) in (sum(raw), signed) else None


def looks_like_tar(data: Buffer) -> bool:
    """Whether the first 512 bytes of a file are a tar header with a right checksum."""
    return _Entry.parse(data) is not None


def unwrap(source: BlockSource) -> BlockSource:
    """The payload of a tar-wrapped blob. Raises ImageError."""
    entry = _Entry.parse(source.pread(0, min(_BLOCK, source.size)))
    if entry is None:
        raise ImageError("not a tar", code=ImageCode.BAD_MAGIC)
    at, size = _BLOCK, entry.size
    if entry.kind == b"x":
        if not 0 < size <= _BLOCK or source.size < _PAYLOAD:
            raise ImageError(f"tar: a pax header of {size} bytes is not that of an OverlayBD blob", code=ImageCode.BAD_ENCODING)
        stated = _pax_size(source.pread(_BLOCK, size))
        entry = _Entry.parse(source.pread(2 * _BLOCK, _BLOCK))
        if entry is None:
            raise ImageError("tar: malformed header of the file", code=ImageCode.BAD_ENCODING)
        at, size = _PAYLOAD, stated or entry.size
    if entry.kind not in (b"0", b"\0", b"7"):
        raise ImageError(f"tar: the first entry is of type {entry.kind!r}, not a file", code=ImageCode.BAD_ENCODING)
    if size > source.size - at:
        raise ImageError(f"tar: the file should have {size} bytes, the blob has {source.size - at}", code=ImageCode.OUT_OF_BOUNDS)
    return SliceSource(source, at, size)


def tar_writes(writes: Iterable[Write]) -> Iterator[Write]:
    """The writes of a payload, moved into a tar around it. The headers, which state the size, come last."""
    size = 0
    for at, data in writes:
        size = max(size, at + len(data))
        yield _PAYLOAD + at, data
    yield _PAYLOAD + size, bytes(-size % _BLOCK + 2 * _BLOCK)
    yield 0, _headers(size)


def tar_stream(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """As ``tar_writes``, for a payload whose ``size`` is known before: the bytes in order."""
    yield _headers(size)
    yield from chunks
    yield bytes(-size % _BLOCK + 2 * _BLOCK)


def _headers(size: int) -> bytes:
    record = _pax_record(b"size", b"%d" % size)
    blank = b" " * 8
    pax = _HEADER.pack(b"overlaybd.pax", b"", b"", b"", b"%11o " % len(record), b"", blank, b"x", *_tail(b""))
    file = _HEADER.pack(_NAME, _octal(_MODE), _octal(0), _octal(0), b"%11o " % 0, b"%11o " % 0, blank, b"0", *_tail(b"root"))
    return _sealed(pax) + record.ljust(_BLOCK, b"\0") + _sealed(file)


def _tail(owner: bytes) -> tuple[bytes, ...]:
    return b"", b"ustar\0", b"00", owner, owner, b"", b"", b""


def _octal(number: int) -> bytes:
    return b"%6o \0" % number


def _sealed(header: bytes) -> bytes:
    """The header with its checksum, which was summed with blanks in the field."""
    return header[: _CHECKSUM.start] + _octal(sum(header)) + header[_CHECKSUM.stop :]


def _pax_record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    length += len(b"%d" % (length + len(b"%d" % length)))
    return b"%d %s=%s\n" % (length, key, value)


def _pax_size(data: bytes) -> int:
    """The size that the records state, 0 if none does."""
    size, at = 0, 0
    while at < len(data):
        found = _RECORD.match(data, at)
        end = at + int(found.group(1)) if found else 0
        if found is None or not found.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ImageError("tar: malformed pax record", code=ImageCode.BAD_ENCODING)
        key, _, value = data[found.end() : end - 1].partition(b"=")
        if key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise ImageError("tar: malformed size in the pax header", code=ImageCode.BAD_ENCODING)
            size = int(value)
        at = end
    return size


def _number(field: bytes) -> int:
    """A numeric field: octal with blanks and NULs around it, or base 256 for what is too large. Raises ImageError."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", text):
        raise ImageError("tar: malformed number in a header", code=ImageCode.BAD_ENCODING)
    return int(text or b"0", 8)
