"""The media types of this project (docs/formats/layer.md)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from dsec_layers.oci import INDEX, MANIFEST, Descriptor

__all__ = ["CHUNKS", "CONFIG", "ENVIRONMENT", "EROFS", "INDEX", "LAYER", "MANIFEST", "METADATA", "SEGMENTS", "Descriptor", "Kind"]

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
