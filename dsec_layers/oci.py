"""OCI descriptors: one value, one parser with bounds, one spelling. JSON in, values out, no I/O.

OCI image specification: descriptor.md. What is not well-formed is ImageError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dsec_layers.digest import Digest, is_digest
from dsec_layers.errors import ImageCode, ImageError

__all__ = [
    "IMAGE_CONFIG",
    "INDEX",
    "MANIFEST",
    "MAX_SIZE",
    "REF_NAME",
    "Descriptor",
    "canonical_json",
    "descriptor_json",
    "parse_descriptor",
    "parse_list",
]

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"

REF_NAME: Final = "org.opencontainers.image.ref.name"
"""Annotation in an index: what an image is called."""

MAX_SIZE: Final = (1 << 63) - 1
"""Bytes that a descriptor may claim: a signed 64-bit number, as in the specification."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to a blob: what it is, its digest, its size in bytes."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)


def parse_descriptor(value: Any, what: str, *, typed: bool = True) -> Descriptor:
    """The value of a descriptor in a document that messages call ``what``. ``typed``: it must have a media type. Raises ImageError."""
    if not isinstance(value, Mapping):
        raise ImageError(f"{what} has a malformed descriptor: it is no object", code=ImageCode.BAD_ENCODING)
    media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
    if media_type is None and not typed:
        media_type = ""
    if not isinstance(media_type, str):
        raise ImageError(f"{what} has a malformed descriptor: no media type", code=ImageCode.BAD_ENCODING)
    if not isinstance(digest, str):
        raise ImageError(f"{what} has a malformed descriptor: no digest", code=ImageCode.BAD_ENCODING)
    if not is_digest(digest):
        raise ImageError(f"{what} has the digest {digest[:100]!r}; only SHA-256 is supported", code=ImageCode.UNKNOWN_FEATURE)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
        raise ImageError(f"{what} has a malformed descriptor: its size is no number of bytes", code=ImageCode.BAD_ENCODING)
    annotations = value.get("annotations") or {}
    if not isinstance(annotations, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in annotations.items()):
        raise ImageError(f"{what} has a malformed descriptor: its annotations are not strings", code=ImageCode.BAD_ENCODING)
    return Descriptor(media_type, digest, size, annotations)


def parse_list(value: Any, what: str, limit: int) -> list[Any]:
    """``value`` if it is a list of at most ``limit`` items. Raises ImageError."""
    if not isinstance(value, list):
        raise ImageError(f"{what} has a malformed list", code=ImageCode.BAD_ENCODING)
    if len(value) > limit:
        raise ImageError(f"{what} has a list of {len(value)} items, over the limit of {limit}", code=ImageCode.LIMIT)
    return value


def descriptor_json(item: Descriptor) -> dict[str, Any]:
    """A descriptor as JSON has it."""
    value: dict[str, Any] = {"mediaType": item.media_type, "digest": item.digest, "size": item.size}
    if item.annotations:
        value["annotations"] = dict(item.annotations)
    return value


def canonical_json(value: Any) -> bytes:
    """JSON with one spelling: sorted keys, no white space, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
