"""What disks are opened with: a store, a cache, somebody to report to. And what they find there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from dsec_layers.cache.flat import FlatImage, PieceOpener
from dsec_layers.digest import Digest
from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.opener import open_pieces
from dsec_layers.disks.state import Parent, read_state
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.errors import Conflict, UsageError
from dsec_layers.layers.disk import DiskImage, DiskLayer
from dsec_layers.progress import Progress
from dsec_layers.registry.copy import copy_object
from dsec_layers.registry.flat import flat_image
from dsec_layers.registry.objects import load_disk, load_disk_config, resolve_any
from dsec_layers.store.base import Store
from dsec_layers.store.open import open_store

__all__ = ["Place", "below", "find_disk", "flat_source", "opened", "pieces", "store_of"]


class Place(Protocol):
    """Where disks are worked on: ``dsec_layers.api.session.Session``, or a stand-in."""

    cache: Path
    progress: Progress

    @property
    def store(self) -> Store:
        """Where sealed disks are and come."""


def find_disk(store: Store, text: str) -> tuple[Digest, DiskImage]:
    """The sealed disk that ``text`` names. UsageError if it names something else."""
    digest, found = resolve_any(store, text)
    if not isinstance(found, DiskImage):
        raise UsageError(f"{text} is no disk", hint="dsec-layers ls shows what is; disk create --from makes a disk of it")
    return digest, found


def pieces(place: Place) -> AbstractContextManager[PieceOpener]:
    """Where this place's disks get their pieces."""
    return open_pieces(place.cache, place.progress)


@contextmanager
def opened(place: Place, path: Path) -> Iterator[LocalDisk]:
    """A writable disk, open."""
    parent = read_state(path).parent
    if parent is None:
        with LocalDisk(path, _no_parent) as disk:
            yield disk
        return
    with pieces(place) as opener, LocalDisk(path, lambda parent: _open_parent(place, parent, opener)) as disk:
        yield disk


def store_of(place: Place, parent: Parent) -> Store:
    """The store that holds a sealed disk."""
    return place.store if parent.store == place.store.url else open_store(parent.store, create=False)


def below(place: Place, parent: Parent | None) -> tuple[tuple[DiskLayer, ...], int]:
    """The layers of the sealed disk below, which are in this place's store then, and its size in bytes; 0 for none."""
    if parent is None:
        return (), 0
    if parent.store != place.store.url:
        copy_object(store_of(place, parent), place.store, parent.digest, progress=place.progress)
    image = load_disk(place.store, parent.digest)
    return image.layers, load_disk_config(place.store, image).virtual_size


def flat_source(place: Place, text: str, opener: PieceOpener) -> FlatImage:
    """The flat EROFS image of a layer or environment, read lazily. Close it."""
    image, segments = flat_image(place.store, text)
    place.cache.mkdir(parents=True, exist_ok=True)
    return FlatImage.spooled(image, [owner.place(index) for owner, index in segments], opener, place.cache)


def _no_parent(parent: Parent) -> StoredDisk:
    raise Conflict("the disk was committed just now", hint="try again")


def _open_parent(place: Place, parent: Parent, opener: PieceOpener) -> StoredDisk:
    store = store_of(place, parent)
    return StoredDisk(store, load_disk(store, parent.digest).layers, opener)
