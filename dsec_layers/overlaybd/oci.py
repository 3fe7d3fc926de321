"""OverlayBD layers in OCI images: the names that accelerated-container-image uses, and layer descriptors made of and read by them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsec_layers.digest import Digest, check_digest
from dsec_layers.errors import ImageCode, ImageError, UsageError
from dsec_layers.oci import Descriptor

__all__ = [
    "MEDIA_TYPE_OCI",
    "PREFIX",
    "VERSION",
    "BlobInfo",
    "blob_info",
    "chain_uuid",
    "layer_descriptor",
]

PREFIX = "containerd.io/snapshot/overlaybd/"
"""What the names of all layer annotations start with."""

VERSION = "0.1.0"
_TURBO_VERSIONS = ("0.1.0-turbo.ociv1", "0.1.0-fastoci")

MEDIA_TYPE_OCI = "application/vnd.oci.image.layer.v1.tar"
"""Of the layers: an uncompressed tar, so that the diff ID is the blob's digest."""

_CHAIN_ID = re.compile(r"sha256:([0-9a-f]{64})\Z")
_FASTOCI = "containerd.io/snapshot/overlaybd/fastoci/"


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a layer descriptor's annotations say of an OverlayBD blob. ``vsize_gb`` is 0 if not stated; the target is that of a turboOCI layer."""

    digest: Digest
    size: int
    version: str = VERSION
    fs_type: str = ""
    vsize_gb: int = 0
    acceleration_layer: bool = False
    target_digest: str = ""
    target_media_type: str = ""

    @property
    def is_turbo(self) -> bool:
        """Whether the layer only holds the file system's metadata and names places in the original tar: a warp layer."""
        return self.version in _TURBO_VERSIONS or bool(self.target_digest)


def layer_descriptor(blob: BlobInfo, *, media_type: str = MEDIA_TYPE_OCI) -> Descriptor:
    """The OCI descriptor of a layer blob, annotated. Raises UsageError for a malformed digest or size."""
    if blob.size < 0:
        raise UsageError(f"a blob cannot have {blob.size} bytes")
    annotations = {
        PREFIX + "blob-digest": check_digest(blob.digest),
        PREFIX + "blob-size": str(blob.size),
        PREFIX + "version": blob.version,
    }
    optional = {
        "blob-fs-type": blob.fs_type,
        "vsize": str(blob.vsize_gb) if blob.vsize_gb else "",
        "acceleration-layer": "yes" if blob.acceleration_layer else "",
        "turbo-oci/target-digest": blob.target_digest,
        "turbo-oci/target-media-type": blob.target_media_type,
    }
    annotations.update({PREFIX + name: value for name, value in optional.items() if value})
    return Descriptor(media_type, blob.digest, blob.size, annotations)


def blob_info(descriptor: Descriptor) -> BlobInfo | None:
    """What an OCI layer descriptor says of an OverlayBD blob; None when it describes another kind of layer. Raises ImageError for malformed annotations."""
    annotations = descriptor.annotations
    digest, stated = annotations.get(PREFIX + "blob-digest"), annotations.get(PREFIX + "blob-size")
    if digest is None or stated is None:
        return None
    if digest != descriptor.digest:
        raise ImageError(f"layer descriptor: the blob digest {digest[:100]!r} is not the layer's", code=ImageCode.INCONSISTENT)
    size = _count(stated, "blob-size")
    if size != descriptor.size:
        raise ImageError(f"layer descriptor: the blob size {size} is not the layer's", code=ImageCode.INCONSISTENT)

    def turbo(name: str) -> str:
        return str(annotations.get(f"{PREFIX}turbo-oci/{name}") or annotations.get(_FASTOCI + name) or "")

    return BlobInfo(
        digest,
        size,
        annotations.get(PREFIX + "version", VERSION),
        annotations.get(PREFIX + "blob-fs-type", ""),
        _count(annotations.get(PREFIX + "vsize", "0"), "vsize"),
        annotations.get(PREFIX + "acceleration-layer", "") == "yes",
        turbo("target-digest"),
        turbo("target-media-type"),
    )


def chain_uuid(chain_id: str) -> str:
    """The LSMT UUID of the layer whose OCI chain ID this is: the first 32 hexadecimal digits. Raises UsageError."""
    found = _CHAIN_ID.match(chain_id)
    if not found:
        raise UsageError(f"not a chain ID: {chain_id[:100]!r}")
    digits = found.group(1)[:32]
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _count(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise ImageError(f"layer descriptor: {name} is {text[:40]!r}, not a number", code=ImageCode.BAD_ENCODING)
    return int(text)
