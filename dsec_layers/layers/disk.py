"""A sealed disk as a value: OverlayBD layers from bottom to top, each with the list of its pieces' digests (docs/formats/disk.md).

In its OCI form it is an image manifest whose ``layers`` alternate: an OverlayBD blob, annotated as accelerated-container-image does it, then its pieces list. A layer is read
lazily in pieces of 256 KiB; the manifest's digest covers the list's, and the list covers each piece.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.structs import asdict

from dsec_layers.digest import Buffer
from dsec_layers.documents import MAX_NUMBER, decode
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.oci import MANIFEST, Descriptor, canonical_json, descriptor_json

__all__ = [
    "DISK",
    "DISK_CONFIG",
    "LAYER_TAR",
    "PIECES",
    "PIECE_SIZE",
    "UUID",
    "DiskConfig",
    "DiskImage",
    "DiskLayer",
    "pack_pieces",
    "parse_pieces",
]

DISK: Final = "application/vnd.dsec.disk.v1"
DISK_CONFIG: Final = "application/vnd.dsec.disk.config.v1+json"
PIECES: Final = "application/vnd.dsec.disk.pieces.v1"
LAYER_TAR: Final = "application/vnd.oci.image.layer.v1.tar"

UUID: Final = "dev.dsec.disk.uuid"
"""Annotation on a layer's blob."""

PIECE_SIZE: Final = 256 << 10
MAX_LAYERS: Final = 255
_MAX_CONFIG: Final = 16 << 20
_HEADER: Final = struct.Struct("<4sHHIQ")  # magic, version, digest size, piece size, size of the blob
_MAGIC: Final = b"DPCS"
_DIGEST: Final = 32
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\Z")


@dataclass(frozen=True, slots=True)
class DiskLayer:
    """One layer: the OverlayBD blob and its pieces list."""

    blob: Descriptor
    pieces: Descriptor

    @property
    def uuid(self) -> str:
        """The UUID in the blob's LSMT header, as the descriptor states it: what a layer above names as its parent. Nil if it says nothing."""
        uuid = self.blob.annotations.get(UUID, "")
        return uuid if _UUID.match(uuid) else "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """What a disk says about itself: its size in bytes, its name and how it was made."""

    virtual_size: int
    name: str = ""
    recipe: Mapping[str, Any] | None = None
    builder: str = ""

    def to_json(self) -> bytes:
        """The config blob: canonical JSON."""
        value = {
            "format": 1,
            "virtual_size": self.virtual_size,
            "name": self.name,
            "recipe": dict(self.recipe or {}),
            "builder": self.builder,
        }
        return canonical_json(value)

    @classmethod
    def parse(cls, data: Buffer) -> DiskConfig:
        """The value of a config blob. Raises ImageError."""
        known = decode(data, _Format, "disk config", limit=_MAX_CONFIG).format
        if known != 1:
            raise ImageError(f"disk format {str(known)[:20]} is not known here", code=ImageCode.BAD_VERSION)
        return cls(**asdict(decode(data, _Config, "disk config", limit=_MAX_CONFIG)))


class _Format(Struct):
    format: Any


class _Config(Struct):
    virtual_size: Annotated[int, Meta(ge=0, le=MAX_NUMBER, multiple_of=512)]
    name: str = ""
    recipe: dict[str, Any] = {}
    builder: str = ""


@dataclass(frozen=True, slots=True)
class DiskImage:
    """A sealed disk."""

    config: Descriptor
    layers: tuple[DiskLayer, ...]

    def blobs(self) -> tuple[Descriptor, ...]:
        """Every blob the disk needs."""
        return (self.config, *(item for layer in self.layers for item in (layer.blob, layer.pieces)))

    def to_json(self) -> bytes:
        """The OCI image manifest, canonical."""
        value = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": DISK,
            "config": descriptor_json(self.config),
            "layers": [descriptor_json(item) for item in self.blobs()[1:]],
        }
        return canonical_json(value)

    @classmethod
    def of(cls, config: Descriptor, items: Sequence[Descriptor]) -> DiskImage:
        """The disk of a parsed manifest's config and layers. Raises ImageError if they do not alternate as they must."""
        if config.media_type != DISK_CONFIG or not items or len(items) % 2 or len(items) > 2 * MAX_LAYERS:
            raise ImageError(
                "disk manifest must have a disk config and 1 to 255 layers, each with its pieces list", code=ImageCode.INCONSISTENT
            )
        layers = tuple(DiskLayer(blob, pieces) for blob, pieces in zip(items[::2], items[1::2], strict=True))
        for layer in layers:
            if layer.blob.media_type != LAYER_TAR or layer.pieces.media_type != PIECES:
                raise ImageError("disk manifest: a layer or its pieces list has the wrong media type", code=ImageCode.INCONSISTENT)
            if layer.pieces.size != pieces_size(layer.blob.size):
                raise ImageError("disk manifest: a pieces list does not fit its layer", code=ImageCode.INCONSISTENT)
        return cls(config, layers)


def pieces_size(blob_size: int) -> int:
    """Bytes of the pieces list of a blob."""
    return _HEADER.size + _DIGEST * -(-blob_size // PIECE_SIZE)


def pack_pieces(blob_size: int, digests: Sequence[bytes]) -> bytes:
    """A pieces list: a header, and the BLAKE3 digest of each piece, the last of which may be short."""
    return _HEADER.pack(_MAGIC, 1, _DIGEST, PIECE_SIZE, blob_size) + b"".join(digests)


def parse_pieces(data: Buffer, blob_size: int) -> list[bytes]:
    """The digests of a pieces list that belongs to a blob of ``blob_size`` bytes. Raises ImageError."""
    if len(data) != pieces_size(blob_size) or _HEADER.unpack_from(data) != (_MAGIC, 1, _DIGEST, PIECE_SIZE, blob_size):
        raise ImageError("not the pieces list of this blob", code=ImageCode.INCONSISTENT)
    body = bytes(data[_HEADER.size :])
    return [body[at : at + _DIGEST] for at in range(0, len(body), _DIGEST)]
