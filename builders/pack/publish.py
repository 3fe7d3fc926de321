"""Publish what was packed: tables, metadata, config, and at last the manifest."""

from __future__ import annotations

from typing import Final

from dsec_layers.builders.pack.build import Packed
from dsec_layers.builders.pack.output import Written
from dsec_layers.digest import Digest
from dsec_layers.errors import NotFound
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.frames import compress, skippable
from dsec_layers.layers.manifest import FOREIGN, Layer
from dsec_layers.layers.tables import Table, pack_chunks, pack_segments, parse_segments
from dsec_layers.registry.objects import publish_object, put_blob

__all__ = ["publish"]

_CHUNKS_LEVEL: Final = 3
"""Digests do not compress; the rest of the records does at any level."""


def publish(packed: Packed, frame: bytes, config: bytes, written: Written, records: Table, chunks: Table) -> tuple[Digest, Layer]:
    """Store the small blobs and the manifest. ``frame`` is the compressed metadata image. Raises BadBlob if a foreign blob is gone by now."""
    store = packed.build.store
    foreign = packed.hold_foreign()
    segments = (
        *(Descriptor(d.SEGMENTS, blob.digest, blob.size) for blob in written.blobs),
        *(Descriptor(d.SEGMENTS, blob.digest, blob.size, {FOREIGN: "true"}) for blob in foreign),
    )
    table = pack_segments(records)
    parse_segments(table, tuple(item.size for item in segments))
    layer = Layer(
        packed.build.config.kind,
        chunks=put_blob(store, d.CHUNKS, compress(pack_chunks(chunks), _CHUNKS_LEVEL)) if len(chunks) else None,
        metadata=put_blob(store, d.METADATA, frame + skippable(table)),
        config=put_blob(store, d.CONFIG, config),
        segments=segments,
    )
    try:
        return publish_object(store, layer), layer
    except NotFound:
        packed.hold_foreign()  # says which blob it was
        raise
