"""OCI descriptors: one value, one parser with bounds, one spelling. JSON in, values out, no I/O.

OCI image specification: descriptor.md. What is not well-formed is ImageError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from dsec_layers.digest import Digest, is_digest
from dsec_layers.documents import MAX_NUMBER, Natural, convert
from dsec_layers.errors import ImageCode, ImageError

__all__ = [
    "IMAGE_CONFIG",
    "INDEX",
    "MANIFEST",
    "MAX_SIZE",
    "REF_NAME",
    "Descriptor",
    "DescriptorJson",
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

MAX_SIZE: Final = MAX_NUMBER
"""Bytes that a descriptor may claim: a signed 64-bit number, as in the specification."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to a blob: what it is, its digest, its size in bytes."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)


class DescriptorJson(Struct, rename="camel"):
    """A descriptor as documents have it; ``value`` gives the Descriptor."""

    digest: str
    size: Natural
    media_type: str = ""
    annotations: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ValueError(f"the digest {self.digest[:100]!r}; only SHA-256 is supported")

    def value(self) -> Descriptor:
        """What it describes."""
        return Descriptor(self.media_type, self.digest, self.size, self.annotations or {})


def parse_descriptor(value: Any, what: str, *, typed: bool = True) -> Descriptor:
    """The value of a descriptor in a document that messages call ``what``. ``typed``: it must have a media type. Raises ImageError."""
    found = convert(value, DescriptorJson, f"{what} has a malformed descriptor").value()
    if typed and not found.media_type:
        raise ImageError(f"{what} has a malformed descriptor: no media type", code=ImageCode.BAD_ENCODING)
    return found


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
