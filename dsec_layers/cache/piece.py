"""What the cache fetches: a segment, under the name the cache has for it."""

from __future__ import annotations

from dsec_layers.segment import Segment as Piece
from dsec_layers.segment import read_segment as fetch_piece

__all__ = ["Piece", "fetch_piece"]
