"""OCI descriptors and the media types of this project (docs/formats/layer.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dsec_layers.digest import Digest

__all__ = ["CHUNKS", "CONFIG", "ENVIRONMENT", "EROFS", "INDEX", "LAYER", "MANIFEST", "METADATA", "SEGMENTS", "Descriptor", "Kind"]

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
LAYER: Final = "application/vnd.dsec.layer.v1"
ENVIRONMENT: Final = "application/vnd.dsec.environment.v1"
CONFIG: Final = "application/vnd.dsec.layer.config.v1+json"
METADATA: Final = "application/vnd.dsec.layer.metadata.v1+zstd"
SEGMENTS: Final = "application/vnd.dsec.layer.segments.v1+zstd"
CHUNKS: Final = "application/vnd.dsec.layer.chunks.v1+zstd"
EROFS: Final = "application/vnd.dsec.layer.erofs.v1"
"""The ``compressed`` layout: one flat, EROFS-compressed image, fetched whole."""


class Kind(StrEnum):
    """What a layer is for; also its place in an environment, bottom to top."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    DIFF = "diff"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to a blob: what it is, its digest, its size in bytes."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
