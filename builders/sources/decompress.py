"""Compressed streams as blocks: gzip (isal), xz, zstd and bzip2, told apart by their first bytes. Output is bounded whatever the input expands to."""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable
from typing import Final, Protocol, cast

import zstandard
from isal import igzip_lib

from dsec_layers.builders.sources.blocks import BLOCK, Blocks, rewound
from dsec_layers.builders.sources.header import RECORD, is_header
from dsec_layers.errors import InputError

__all__ = ["beginning", "compression_of", "decompressed", "peeked"]

_WINDOW: Final = 1 << 27
"""Largest zstd window accepted, the default of ``zstd -d`` (--long=27)."""

_XZ_MEMORY: Final = 1 << 29
_PEEK: Final = 1 << 16
_FEED: Final = BLOCK  # compressed bytes handed to a decoder at once: the fewer calls, the less a busy main thread holds this one up

_MAGIC = {b"\x1f\x8b\x08": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_ISAL: Final = cast("type[Exception]", igzip_lib.error)  # its stubs call it an instance
_ERRORS: Final = (OSError, EOFError, ValueError, MemoryError, lzma.LZMAError, zstandard.ZstdError, _ISAL)


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def _gzip() -> _Decoder:
    decoder: _Decoder = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return decoder


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gzip": _gzip,
    "xz": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY),
    "bzip2": bz2.BZ2Decompressor,
}


def compression_of(first: bytes) -> str:
    """The compression format that ``first``, the first bytes of a stream, belong to; "" for none.

    A tar whose first name happens to begin like a compressed stream is a tar.
    """
    if len(first) >= RECORD and is_header(first, 0):
        return ""
    if first[1:4] == b"\x2a\x4d\x18" and first[0] & 0xF0 == 0x50:
        return "zstd"  # begins with a skippable frame
    return next((name for magic, name in _MAGIC.items() if first.startswith(magic)), "")


def peeked(blocks: Blocks) -> tuple[bytes, Blocks]:
    """At least the first 512 bytes of a stream, if it has so many, and the stream with them put back."""
    first = blocks.block()
    while len(first) < RECORD and (more := blocks.block()):
        first += more
    return first, rewound(first, blocks)


def beginning(first: bytes, kind: str) -> bytes:
    """What the first bytes of a stream of ``kind`` expand to, as far as 64 KiB; empty if they are damaged. ``first`` itself if it is not compressed."""
    try:
        if kind == "zstd":
            return zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(first).read(_PEEK)
        return _DECODERS[kind]().decompress(first, _PEEK) if kind else first[:_PEEK]
    except _ERRORS:
        return b""


def decompressed(blocks: Blocks, kind: str, what: str) -> Blocks:
    """The stream within a compressed stream of ``kind`` (a name ``compression_of`` gives). Members and frames that follow one another are one stream."""
    if kind == "zstd":
        return _Zstd(blocks, what)
    return _Members(blocks, kind, what)


class _Members:
    """Decodes gzip, xz and bzip2: decoders of one shape, a new one for each member. Zero padding behind a member is passed over, as is (gzip only) junk."""

    def __init__(self, inner: Blocks, kind: str, what: str) -> None:
        self._inner, self._kind, self._what = inner, kind, what
        self._decoder = _DECODERS[kind]()
        self._input = b""
        self._at = 0
        self._begun = False  # whether the current member has any bytes
        self._members = 0
        self._over = False

    def block(self) -> bytes:
        """About 1 MiB of decoded bytes; less only at the end."""
        parts: list[bytes] = []
        size = 0
        while size < BLOCK and not self._over:
            data = self._some(BLOCK - size)
            size += len(data)
            if data:
                parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _some(self, limit: int) -> bytes:
        decoder = self._decoder
        if decoder.eof:
            self._next_member(decoder.unused_data)
            return b""
        feed = b""
        if decoder.needs_input:
            feed = self._compressed()
            if not feed:
                return self._end()
            if not self._begun and not self._begins_member(feed):
                return b""
            self._begun = True
        try:
            return decoder.decompress(feed, limit)
        except _ERRORS as error:
            raise InputError(f"{self._what}: damaged {self._kind} stream: {error}") from error

    def _compressed(self) -> bytes:
        if self._at >= len(self._input):
            self._input, self._at = self._inner.block(), 0
        feed = self._input[self._at : self._at + _FEED]
        self._at += len(feed)
        return feed

    def _next_member(self, rest: bytes) -> None:
        self._members += 1
        self._decoder = _DECODERS[self._kind]()
        self._begun = False
        if rest:
            self._input, self._at = rest + self._input[self._at :], 0

    def _begins_member(self, feed: bytes) -> bool:
        """At the start of a member: pass over zero padding; False if that was all of ``feed``, or if what follows is no member."""
        if not self._members:
            return True
        data = feed.lstrip(b"\0")
        if len(data) == len(feed):
            if self._kind == "gzip" and not data.startswith(b"\x1f\x8b"[: len(data)]):
                self._over = True
                self._discard()
                return False
            return True
        if data:
            self._input, self._at = data + self._input[self._at :], 0
        return False

    def _discard(self) -> None:
        while self._inner.block():
            pass

    def _end(self) -> bytes:
        if self._begun or not self._members:
            raise InputError(f"{self._what}: the {self._kind} stream is truncated")
        self._over = True
        return b""

    def skip(self, count: int) -> int:
        """A compressed stream is not skipped."""
        return 0

    def close(self) -> None:
        """Close the compressed stream."""
        self._inner.close()


class _Zstd:
    """Decodes zstd. The library's reader does not tell a truncated frame from the end, so the frames' block headers are followed alongside."""

    def __init__(self, inner: Blocks, what: str) -> None:
        self._what = what
        self._inner = inner
        self._source = _FrameWatch(inner)
        decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._reader = decoder.stream_reader(self._source, read_size=_FEED, read_across_frames=True)  # type: ignore[arg-type]

    def block(self) -> bytes:
        """About 1 MiB of decoded bytes; less only at the end."""
        try:
            data = self._reader.read(BLOCK)
        except _ERRORS as error:
            raise InputError(f"{self._what}: damaged zstd stream: {error}") from error
        if not data and not self._source.complete:
            raise InputError(f"{self._what}: the zstd stream is truncated")
        return data

    def skip(self, count: int) -> int:
        """A compressed stream is not skipped."""
        return 0

    def close(self) -> None:
        """Close the compressed stream."""
        self._inner.close()


class _FrameWatch:
    """A readable that follows zstd's frame structure (RFC 8878, 3.1) through the bytes it passes on, to know whether they end at the end of a frame."""

    def __init__(self, inner: Blocks) -> None:
        self._inner = inner
        self._input = memoryview(b"")
        self._at = 0
        self._state = "magic"
        self._head = b""  # bytes of the header being collected
        self._need = 4
        self._pass = 0  # bytes of content up to the next header
        self._checksum = 0

    @property
    def complete(self) -> bool:
        """Whether the bytes so far end at the end of a frame."""
        return self._state == "magic" and not self._head and not self._pass

    def read(self, size: int) -> bytes:
        """Up to ``size`` compressed bytes, empty at the end."""
        if self._at >= len(self._input):
            self._input, self._at = memoryview(self._inner.block()), 0
        data = self._input[self._at : self._at + size]
        self._at += len(data)
        self._follow(data)
        return bytes(data)

    def _follow(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            if self._pass:
                step = min(self._pass, len(data) - at)
                self._pass -= step
                at += step
                continue
            step = min(self._need - len(self._head), len(data) - at)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == self._need:
                head, self._head = self._head, b""
                self._header(head)

    def _header(self, head: bytes) -> None:
        """One whole header has been seen: what comes after it? (Nonsense is the decoder's to find.)"""
        if self._state == "magic":
            skippable = head[1:] == b"\x2a\x4d\x18"
            self._state, self._need = ("skippable", 4) if skippable else ("frame", 1)
        elif self._state == "skippable":
            self._pass = int.from_bytes(head, "little")
            self._state, self._need = "magic", 4
        elif self._state == "frame":
            descriptor = head[0]
            single = descriptor >> 5 & 1
            size = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
            self._checksum = 4 * (descriptor >> 2 & 1)
            self._pass = (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3] + size
            self._state, self._need = "block", 3
        else:
            value = int.from_bytes(head, "little")
            last, form, size = value & 1, value >> 1 & 3, value >> 3
            self._pass = 1 if form == 1 else size
            if last:
                self._pass += self._checksum
                self._state, self._need = "magic", 4
