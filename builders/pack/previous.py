"""The chunks of the layer that is about to be replaced, looked up before the catalog: a catalog keeps one place of a chunk, which need not be that layer's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsec_layers.builders.pack.foreign import Lookup
from dsec_layers.digest import Digest
from dsec_layers.layers.tables import Table
from dsec_layers.registry.catalog import ChunkAt, SegmentAt
from dsec_layers.registry.objects import load_chunks, load_layer, load_metadata
from dsec_layers.store.base import Store

__all__ = ["PreviousFirst"]


class PreviousFirst:
    """Looks chunks up in the chunk table of layer ``previous``, and those that are not there in ``catalog``."""

    def __init__(self, store: Store, previous: Digest, catalog: Lookup | None) -> None:
        self._catalog = catalog
        layer = load_layer(store, previous)
        self._chunks: Table | None = None
        if layer.chunks is not None:
            _, table = load_metadata(store, layer)
            self._chunks = load_chunks(store, layer, table)
            self._keys = _keys(np.ascontiguousarray(self._chunks["digest"]))
            columns = (table[name].tolist() for name in ("blob", "offset", "stored", "size", "digest"))
            self._segments = [
                SegmentAt(layer.segments[blob].digest, offset, stored, size, digest)
                for blob, offset, stored, size, digest in zip(*columns, strict=True)
            ]

    def lookup(self, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        """Where chunks are, for those that are known."""
        found = self._look(digests)
        if self._catalog is not None:
            found |= self._catalog.lookup([digest for digest in digests if digest not in found])
        return found

    def _look(self, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        if self._chunks is None or not len(self._chunks) or not digests:
            return {}
        found: dict[bytes, ChunkAt] = {}
        at = np.minimum(np.searchsorted(self._keys, _keys(np.frombuffer(b"".join(digests), "V32"))), len(self._keys) - 1)
        for digest, row in zip(digests, self._chunks[at].tolist(), strict=True):
            # Of chunks whose digests begin with the same eight bytes only the first is found; the others are taken for unknown.
            if row[0] == digest:
                _, segment, block, blocks, size = row
                found[digest] = ChunkAt(self._segments[segment], block, blocks, size)
        return found


def _keys(digests: Table) -> np.typing.NDArray[np.uint64]:
    """The first eight bytes of each digest, as numbers that compare as the bytes do."""
    return digests.view(">u8").reshape(-1, 4)[:, 0].astype(np.uint64)
