"""Digests: BLAKE3-256 names content (chunks, segments), SHA-256 names blobs (OCI does)."""

from __future__ import annotations

import hashlib
import re
from typing import TypeAlias

from blake3 import blake3

from dsec_layers.errors import UsageError

__all__ = ["Buffer", "Digest", "check_digest", "content_digest", "is_digest", "sha256_digest"]

Buffer: TypeAlias = bytes | bytearray | memoryview

Digest: TypeAlias = str
"""``sha256:`` and 64 lower-case hex digits."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


def is_digest(text: str) -> bool:
    """Whether ``text`` is a blob digest in canonical form."""
    return _DIGEST.match(text) is not None


def check_digest(text: str) -> Digest:
    """Return ``text`` if it is a canonical blob digest, else raise UsageError."""
    if not is_digest(text):
        raise UsageError(f"not a digest: {text[:100]!r}", hint="a digest is sha256: and 64 lower-case hex digits")
    return text


def sha256_digest(data: Buffer) -> Digest:
    """The blob digest of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def content_digest(data: Buffer) -> bytes:
    """The 32-byte BLAKE3 digest of a chunk or segment."""
    return blake3(data).digest()
