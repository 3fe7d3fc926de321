"""What to fetch: a run of bytes named by its content, and where in which store it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import zstandard

from dsec_layers.digest import Buffer, Digest, content_digest
from dsec_layers.errors import CorruptError, ImageError
from dsec_layers.layers.tables import MAX_STORED
from dsec_layers.store.base import Store

__all__ = ["MAX_PIECE", "Codec", "Piece", "fetch_piece"]

Codec: TypeAlias = Literal["zstd", "raw"]

MAX_PIECE: Final = 16 << 20
"""Bytes of the largest piece, decompressed or stored."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``size`` bytes whose BLAKE3 digest is ``digest``, stored as ``stored`` bytes at ``offset`` of ``blob`` in the store at URL ``store``.

    ``codec``: ``zstd`` (one frame with its content size) or ``raw`` (the bytes themselves).
    """

    digest: bytes
    size: int
    store: str
    blob: Digest
    offset: int
    stored: int
    codec: Codec = "zstd"

    @property
    def name(self) -> str:
        """The file name in the cache: the digest in hex."""
        return self.digest.hex()

    def __str__(self) -> str:
        return f"segment {self.name[:12]} ({self.stored} bytes at {self.offset} of {self.blob} in {self.store})"


def fetch_piece(store: Store, piece: Piece, buffer: memoryview | None = None) -> Buffer:
    """The piece's bytes, verified: length, frame, BLAKE3. CorruptError naming blob and segment if they are not what they must be.

    ``buffer``: where to decompress to, at least ``size`` bytes; the result may then be a part of it. One attempt; the errors of the store pass through.
    """
    if not 0 <= piece.size <= MAX_PIECE or not 0 <= piece.stored <= MAX_STORED:
        raise CorruptError(f"{piece}: {piece.size} bytes; at most {MAX_PIECE}, stored as {MAX_STORED}, are fetched at once")
    raw = store.read(piece.blob, piece.offset, piece.stored)
    if len(raw) != piece.stored:
        raise _corrupt(store, piece, f"the store gave {len(raw)} bytes")
    data: Buffer = raw
    if piece.codec == "zstd":
        target = memoryview(bytearray(piece.size)) if buffer is None else buffer[: piece.size]
        try:
            _decompress(raw, target)
        except ImageError as error:
            raise _corrupt(store, piece, error.message) from error
        data = target
    if len(data) != piece.size or content_digest(data) != piece.digest:
        raise _corrupt(store, piece, "the bytes do not match the digest")
    return data


def _decompress(frame: bytes, target: memoryview) -> None:
    """Decompress one frame that must fill ``target``: as layers/frames.py, but into memory that is there already."""
    try:
        if zstandard.frame_content_size(frame) != len(target):
            raise ImageError(f"zstd frame does not hold the {len(target)} bytes it should")
        # The whole frame and room for all its content at hand, the library decompresses in one go.
        if zstandard.ZstdDecompressor().stream_reader(frame, read_size=len(frame)).readinto(target) != len(target):
            raise ImageError("zstd frame ends early")
    except zstandard.ZstdError as error:
        raise ImageError(f"bad zstd frame: {error}") from error


def _corrupt(store: Store, piece: Piece, why: str) -> CorruptError:
    store.suspect(piece.blob)
    return CorruptError(f"{piece}: {why}")
