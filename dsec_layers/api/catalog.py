"""``catalog rebuild``: the index of stored chunks, made anew."""

from __future__ import annotations

from dsec_layers.api.session import Session
from dsec_layers.registry.catalog import Indexed

__all__ = ["Indexed", "catalog_rebuild"]


def catalog_rebuild(session: Session) -> Indexed:
    """Make the chunk catalog of the session's store anew: every layer that a ref reaches, and those that nothing refers to. What it holds then."""
    return session.catalog.rebuild(session.store)
