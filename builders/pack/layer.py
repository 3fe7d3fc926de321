"""Pack an input into a layer and publish it: one pass over the content, then the metadata, then the manifest.

Whatever happens, nothing is visible under a name: blobs that no manifest refers to are garbage for the collector, the manifest comes last, and the ref
is the caller's to set. The same input, settings and catalog give the same digests on any host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Final, TypeAlias

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.pack.build import BadBlob, Build, Packed, PackResult
from dsec_layers.builders.pack.compressed import pack_compressed
from dsec_layers.builders.pack.foreign import ForeignChecks
from dsec_layers.builders.pack.output import BlobOutput, Written
from dsec_layers.builders.pack.same import find_same
from dsec_layers.builders.pack.sink import PackSink
from dsec_layers.digest import Digest
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import Tree
from dsec_layers.erofs.verify import compare
from dsec_layers.erofs.writer import render
from dsec_layers.errors import LimitError, NotFound
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.frames import METADATA_BOUND, compress, skippable
from dsec_layers.layers.manifest import FOREIGN, Layer, LayerConfig
from dsec_layers.layers.tables import Table, pack_chunks, pack_segments, parse_segments
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.catalog import Catalog
from dsec_layers.registry.objects import publish_object, put_blob
from dsec_layers.store.base import Store

__all__ = ["Ingest", "PackResult", "default_workers", "pack_layer"]

Ingest: TypeAlias = Callable[[ContentSink, Progress], Tree]
"""Reads an input: hands the content to the sink and returns the tree. A source's ``ingest``."""

METADATA_LEVEL: Final = 9
"""zstd level of the metadata image: it is fetched whole at every cold start, and compressed while it is being verified (ADR 0012)."""

_CHUNKS_LEVEL: Final = 3
"""Digests do not compress; the rest of the records does at any level."""

_ATTEMPTS: Final = 4
_MOST_WORKERS: Final = 8
_BUILDER: Final = f"dsec-layers {version('dsec-layers')}"


def default_workers() -> int:
    """As many threads as there are processors, up to what one reading thread can keep busy."""
    return max(1, min(len(os.sched_getaffinity(0)), _MOST_WORKERS))


def pack_layer(
    store: Store,
    ingest: Ingest,
    *,
    kind: Kind,
    name: str = "",
    catalog: Catalog | None = None,
    previous: Digest | None = None,
    parent: Digest | None = None,
    env: Mapping[str, str] | None = None,
    workdir: str = "",
    image: Mapping[str, Any] | None = None,
    prefix: str = "",
    recipe: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    epoch: int | None = None,
    workers: int | None = None,
    level: int = 3,
    layout: str = "segments",
    progress: Progress = SILENT,
) -> PackResult:
    """Pack what ``ingest`` reads into a layer of ``store`` and publish its manifest; setting a ref is up to the caller.

    ``catalog`` finds chunks of other layers and is told of the new one; ``previous`` is the layer that this one is to replace, whose chunks are looked up
    first. ``epoch`` (seconds): later modification times become this one. ``recipe`` may be a function, called when all input has been read.
    ``level``: zstd's. ``layout``: ``segments``, or ``compressed`` for one flat image made by mkfs.erofs (see ``builders.compressed``).

    ``ingest`` is called again if a segment of another layer turned out to be gone or damaged. Errors: those of ``ingest`` and of the store, LimitError.
    """
    build = Build(
        store, catalog, LayerConfig(kind, name, layout, prefix, env, workdir, parent=parent, builder=_BUILDER, image=image or None), recipe, previous, epoch,
        workers or default_workers(), level, progress,
    )  # fmt: skip
    if layout == "compressed":
        return pack_compressed(build, ingest)
    for left in reversed(range(_ATTEMPTS)):
        try:
            return _pack(build, ingest, dedup=left > 0)
        except BadBlob as error:
            progress.warning(f"{error.blob} of another layer cannot be used ({error}): packing again without it")
            build.forget(error.blob)
    raise AssertionError("the last attempt uses no foreign blob")


def _pack(build: Build, ingest: Ingest, *, dedup: bool) -> PackResult:
    """One attempt. Raises BadBlob when a foreign blob that it relies on is gone or damaged."""
    with (
        ForeignChecks(build.store, build.workers) as checks,
        BlobOutput(build.store, level=build.level, workers=build.workers) as output,
    ):
        foreign = build.foreign(checks) if dedup else None
        sink = PackSink(output, foreign=foreign)
        with build.stage("read"):
            tree = ingest(sink, build.progress)
            sink.finish()
            output.finish()
        packed = Packed(build, tree, sink, foreign.used() if foreign else [])
        with build.stage("check"):
            packed.check_foreign(checks)
        with build.stage("metadata"):
            image = render(tree, packed.devices)
            inodes = Image(image).superblock.inos
            config = build.config_blob(inodes, sink.sums.total)
        if packed.foreign:
            with build.stage("same"):
                content = packed.content(output.result())
                same = find_same(build.store, build.candidates(packed.foreign_blobs), config, tree, content)
            if same is not None:
                build.index_again(same[0])
                return packed.result(*same, inodes, reused=True)
        with build.stage("metadata"):
            frame = _verified(tree, image, packed.devices)
        if len(image) > METADATA_BOUND.most(len(frame)):
            raise LimitError(
                f"the metadata has {len(image)} bytes in a frame of {len(frame)}; a reader takes {METADATA_BOUND.most(len(frame))} at most",
                hint="files with terabytes of holes are for disks (dsec-layers disk), not for layers",
            )
        with build.stage("segments"):
            written = output.result()
    records, chunks = packed.records(written), sink.chunk_records()
    with build.stage("publish"):
        digest, layer = _publish(packed, frame, config, written, records, chunks)
    with build.stage("catalog"):
        build.index(digest, layer, records, chunks)
    return packed.result(digest, layer, inodes, reused=False)


def _verified(tree: Tree, image: bytes, devices: list[int]) -> bytes:
    """The compressed image, after what it says was read back and compared with the tree."""
    with ThreadPoolExecutor(1, thread_name_prefix="pack-metadata") as pool:
        frame = pool.submit(compress, image, METADATA_LEVEL)
        compare(tree, image, devices)
        return frame.result()


def _publish(packed: Packed, frame: bytes, config: bytes, written: Written, records: Table, chunks: Table) -> tuple[Digest, Layer]:
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
