"""Where pieces come from: the cache's daemon if there can be one, else a cache of this process alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.fetch import Fetcher, FetchLimits
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.errors import Conflict, HostError
from dsec_layers.fuse.client.host import HostPool, open_host
from dsec_layers.fuse.mounts.layers import Stores
from dsec_layers.linux.process import set_descriptor_limit
from dsec_layers.progress import SILENT, Progress
from dsec_layers.store.base import Store

__all__ = ["open_pieces", "private_pieces"]

_SLOTS: Final = 64
_DESCRIPTORS: Final = 16_384


@contextmanager
def open_pieces(cache: Path, progress: Progress = SILENT) -> Iterator[PieceOpener]:
    """A source of pieces that uses the cache ``cache``: its daemon's where this host can run one (as root), so that mounts and disks share what is fetched."""
    set_descriptor_limit(_DESCRIPTORS)
    if os.geteuid() == 0:
        try:
            pieces = HostPool(cache, open_host(cache))
        except HostError as error:
            progress.debug(f"no daemon for pieces: {error.message}")
        else:
            try:
                yield pieces
            finally:
                pieces.close()
            return
    with private_pieces(cache) as private:
        yield private


@contextmanager
def private_pieces(cache: Path, opener: Callable[[str], Store] | None = None, limits: FetchLimits | None = None) -> Iterator[SegmentCache]:
    """A cache below ``cache`` that this process alone uses: the first of ``pieces/0``, ``pieces/1``, … that nobody holds."""
    directory = _free_slot(cache / "pieces")
    fetcher = Fetcher(opener or Stores().get, limits)
    try:
        yield SegmentCache(directory, fetcher)
    finally:
        fetcher.close()
        directory.end()
        directory.close()


def _free_slot(root: Path) -> CacheDirectory:
    for number in range(_SLOTS):
        with suppress(Conflict):
            return CacheDirectory(root / str(number))
    raise Conflict(f"all {_SLOTS} caches in {root} are in use", hint="use another cache")
