"""Disks for tests: sessions whose pieces come from a cache of their own, so that no daemon runs, and exports as plain bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec_layers.api.session import Session
from dsec_layers.blocksource import BlockSource
from dsec_layers.cache.fetch import FetchLimits
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.disks import place
from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.opener import private_pieces
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.errors import UsageError
from dsec_layers.overlaybd import Disk
from dsec_layers.progress import Progress
from dsec_layers.store.base import Store

MIB = 1 << 20


@contextmanager
def quiet_session(
    root: Path, monkeypatch: pytest.MonkeyPatch, opener: Callable[[str], Store] | None = None, limits: FetchLimits | None = None
) -> Iterator[Session]:
    """A session on ``root``/store and ``root``/cache that asks no daemon for pieces."""

    @contextmanager
    def pieces(cache: Path, progress: Progress) -> Iterator[PieceOpener]:
        with private_pieces(cache, opener, limits) as found:
            yield found

    monkeypatch.setattr(place, "open_pieces", pieces)
    with Session(root / "store", root / "cache") as session:
        yield session


def no_parent(parent: object) -> None:
    """Opens no sealed disk."""
    raise UsageError(f"{parent} is not expected here")


@contextmanager
def local_disk(path: Path) -> Iterator[LocalDisk]:
    """A writable disk without a sealed disk below."""
    with LocalDisk(path, no_parent) as disk:  # type: ignore[arg-type]
        yield disk


def content(source: BlockSource) -> bytes:
    """All bytes of a small disk."""
    return source.pread(0, source.size)


def sealed_content(session: Session, name: str) -> bytes:
    """All bytes of a small sealed disk, read through pieces."""
    _, image = place.find_disk(session.store, name)
    with place.pieces(session) as opener, StoredDisk(session.store, image.layers, opener) as stored:
        return content(Disk(stored.layers))


def noise(seed: int, size: int) -> bytes:
    """Bytes that do not compress, always the same."""
    return hashlib.shake_128(seed.to_bytes(8, "big")).digest(size)
