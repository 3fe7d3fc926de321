"""A segment: what it is, where its frame lies in which store, and the one way from that frame to verified bytes.

Mounts, FUSE, NBD, disks, export, verification and packing all read segments here. Disks use it for their pieces as well, which lie in a blob as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias

from dsec_layers.digest import Buffer, Digest, content_digest, is_digest
from dsec_layers.errors import CorruptError, ImageCode, ImageError
from dsec_layers.layers.disk import PIECE_SIZE
from dsec_layers.layers.frames import decompress, decompress_into
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.tables import MAX_SEGMENT, MAX_STORED, Table
from dsec_layers.store.base import Store

__all__ = ["Codec", "Segment", "read_segment"]

Codec: TypeAlias = Literal["zstd", "raw"]

_MAX_OFFSET: Final = (1 << 63) - 1 - MAX_STORED
"""Where in a blob a segment can begin: it ends where a file can end."""


@dataclass(frozen=True, slots=True)
class Segment:
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

    @classmethod
    def of_record(cls, store: str, layer: Layer, table: Table, number: int) -> Self:
        """Segment ``number`` (from 0) of a layer whose segment table is ``table``, in the store at URL ``store``."""
        record = table[number]
        return cls(
            record["digest"].tobytes(),
            int(record["size"]),
            store,
            layer.segments[int(record["blob"])].digest,
            int(record["offset"]),
            int(record["stored"]),
        )

    @classmethod
    def of_disk(cls, store: str, blob: Digest, size: int, digests: Sequence[bytes]) -> list[Self]:
        """The pieces that make up the blob of a disk's layer, of ``size`` bytes; ``digests``: its pieces list."""
        starts = range(0, size, PIECE_SIZE)
        lengths = [min(PIECE_SIZE, size - start) for start in starts]
        return [cls(digest, n, store, blob, start, n, "raw") for digest, start, n in zip(digests, starts, lengths, strict=True)]

    @classmethod
    def of_message(cls, value: Mapping[str, object]) -> Self:
        """The segment that another process made ``message`` of. ImageError for what describes none."""
        digest, blob = str(value.get("digest")), str(value.get("blob"))
        size, offset, stored = (value.get(name) for name in ("size", "offset", "stored"))
        store = value.get("store")
        if not (type(size) is type(offset) is type(stored) is int and isinstance(store, str)) or len(value) != len(cls.__slots__):
            raise ImageError("the message does not describe a segment", code=ImageCode.BAD_ENCODING)
        raw = value.get("codec") == "raw"
        if not (raw or value.get("codec") == "zstd") or not (is_digest(f"sha256:{digest}") and is_digest(blob)) or (raw and stored != size):
            raise ImageError("the message describes a segment that cannot be", code=ImageCode.INCONSISTENT)
        segment = cls(bytes.fromhex(digest), int(size), store, blob, int(offset), int(stored), "raw" if raw else "zstd")
        segment.check()
        return segment

    def message(self) -> dict[str, str | int]:
        """The same as values that JSON has."""
        return {
            "digest": self.name,
            "size": self.size,
            "store": self.store,
            "blob": self.blob,
            "offset": self.offset,
            "stored": self.stored,
            "codec": self.codec,
        }

    @property
    def name(self) -> str:
        """The file name in the cache: the digest in hex."""
        return self.digest.hex()

    def __str__(self) -> str:
        return f"segment {self.name[:12]} ({self.stored} bytes at {self.offset} of {self.blob} in {self.store})"

    def check(self) -> None:
        """ImageError unless its sizes are such as a segment can have: nothing is allocated or read for one that has others."""
        if not 0 < self.size <= MAX_SEGMENT or not 0 < self.stored <= MAX_STORED or not 0 <= self.offset <= _MAX_OFFSET:
            raise ImageError(f"no segment has {self.size} bytes, stored as {self.stored} at {self.offset}", code=ImageCode.OUT_OF_BOUNDS)

    def decode(self, frame: Buffer, buffer: memoryview | None = None) -> Buffer:
        """The verified bytes of the segment whose frame this is: length, one whole frame, BLAKE3. ImageError saying what is wrong.

        ``buffer``: where to decompress to, at least ``size`` bytes; the result may then be a part of it.
        """
        self.check()
        if len(frame) != self.stored:
            raise ImageError(f"the store gave {len(frame)} bytes", code=ImageCode.TRUNCATED)
        data = frame
        if self.codec == "zstd" and buffer is None:
            data = decompress(frame, self.size)
        elif self.codec == "zstd" and buffer is not None:
            data = buffer[: self.size]
            decompress_into(frame, data)
        if len(data) != self.size or content_digest(data) != self.digest:
            raise ImageError("the bytes do not match the digest", code=ImageCode.BAD_CHECKSUM)
        return data


def read_segment(store: Store, segment: Segment, room: Callable[[int], memoryview] | None = None) -> Buffer:
    """The segment's bytes, verified. CorruptError naming blob and segment if they are not what they must be; the store is told to suspect the blob.

    ``room``: gives the buffer of ``Segment.decode`` for a size, once that is known to be proper. One attempt; the errors of the store pass through.
    """
    try:
        segment.check()
    except ImageError as error:
        raise CorruptError(f"{segment}: {error.message}", final=True) from error
    frame = store.read(segment.blob, segment.offset, segment.stored)
    try:
        return segment.decode(frame, None if room is None else room(segment.size))
    except ImageError as error:
        store.suspect(segment.blob)
        raise CorruptError(f"{segment}: {error.message}") from error
