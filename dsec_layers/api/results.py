"""Results that several verbs give."""

from __future__ import annotations

from dataclasses import dataclass

from dsec_layers.digest import Digest

__all__ = ["Verified"]


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``verify`` found of one object: how many blobs it has, their bytes, and each problem as a sentence; ``repaired``: blobs fetched anew."""

    name: str
    digest: Digest
    blobs: int
    bytes: int
    problems: tuple[str, ...]
    repaired: tuple[Digest, ...] = ()
