"""One build of a layer as a value: its settings, and what was packed, with everything numbered as the format wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from dsec_layers.builders.pack.foreign import ForeignChecks, ForeignChunks, ForeignSegment, Lookup, PreviousFirst
from dsec_layers.builders.pack.output import Written
from dsec_layers.builders.pack.same import Content
from dsec_layers.builders.pack.sink import PackSink, PackSums
from dsec_layers.digest import Digest
from dsec_layers.erofs.tree import BLOCK, Tree
from dsec_layers.errors import DsecError, NotFound
from dsec_layers.layers.manifest import FOREIGN, Layer, LayerConfig
from dsec_layers.layers.tables import SEGMENT, Table
from dsec_layers.progress import Progress
from dsec_layers.registry.catalog import Catalog
from dsec_layers.store.base import BlobInfo, Store

__all__ = ["BadBlob", "Build", "PackResult", "Packed"]

_CANDIDATES: Final = 32
"""Layers that are compared with the new one before it is taken for new."""


@dataclass(frozen=True, slots=True)
class PackResult:
    """A published layer, and what went into it (bytes unless said otherwise).

    ``content``: sizes of all regular files. Of it ``inline`` is in the metadata, ``holes`` are zeros, ``within`` repeats what the layer has already,
    ``against`` is in other layers' segments, ``unique`` in its own. ``stored``: what its own blobs take in the store, ``metadata`` among them.
    ``reused``: the layer was there already and nothing was published. ``seconds``: wall time of each stage.
    """

    digest: Digest
    layer: Layer
    reused: bool
    inodes: int
    segments: int
    foreign_segments: int
    content: int
    inline: int
    holes: int
    within: int
    against: int
    unique: int
    stored: int
    metadata: int
    seconds: Mapping[str, float]

    @classmethod
    def of(
        cls,
        build: Build,
        sums: PackSums,
        digest: Digest,
        layer: Layer,
        *,
        inodes: int,
        segments: int = 0,
        foreign: int = 0,
        reused: bool = False,
    ) -> PackResult:
        """The result of a build."""
        own = () if reused else [item for item in layer.blobs() if FOREIGN not in item.annotations]
        return cls(
            digest, layer, reused, inodes, segments, foreign, sums.total, sums.inline, sums.holes, sums.within, sums.against, sums.unique,
            sum(item.size for item in own), layer.metadata.size, dict(build.seconds),
        )  # fmt: skip


class BadBlob(Exception):
    """A foreign blob is gone, or is not what the catalog says."""

    def __init__(self, blob: Digest, reason: str) -> None:
        super().__init__(reason)
        self.blob = blob


@dataclass(slots=True)
class Build:
    """The settings of ``pack_layer``, and the time its stages take."""

    store: Store
    catalog: Catalog | None
    config: LayerConfig
    recipe: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
    previous: Digest | None
    epoch: int | None
    workers: int
    level: int
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def foreign(self, checks: ForeignChecks) -> ForeignChunks | None:
        """Where chunks of other layers are looked up; None if nothing is known of any."""
        catalog: Lookup | None = None
        with self._tolerant("the catalog is not used"):
            catalog = self.catalog if self.catalog is not None and not self.catalog.empty else None
        if self.previous is not None:
            with self._tolerant(f"the layer to be replaced, {self.previous}, cannot be read and is not built upon"):
                catalog = PreviousFirst(self.store, self.previous, catalog)
        return ForeignChunks(catalog, checks, self.progress.warning) if catalog is not None else None

    def forget(self, blob: Digest) -> None:
        """Rely no longer on a blob."""
        self.previous = None
        if self.catalog is not None:
            with self._tolerant(f"the catalog still knows {blob}"):
                self.catalog.forget_blob(blob)

    def config_blob(self, inodes: int, content: int) -> bytes:
        """The config: nothing in it depends on the layout, so that equal inputs give equal configs."""
        recipe = self.recipe() if callable(self.recipe) else self.recipe
        return replace(self.config, recipe=recipe, counts={"inodes": inodes, "bytes": content}).to_json()

    def candidates(self, blobs: list[Digest]) -> list[Digest]:
        """Layers that may be what was packed: the one to be replaced, and those that refer to all its foreign blobs."""
        found = [self.previous] if self.previous is not None else []
        if self.catalog is not None and blobs:
            with self._tolerant("the catalog cannot say which layers are alike"):
                found += sorted(set.intersection(*(set(self.catalog.layers_of(blob)) for blob in blobs)))
        return found[:_CANDIDATES]

    def clamp(self, tree: Tree) -> None:
        """Make modification times later than ``epoch`` this one."""
        if self.epoch is not None:
            for _, inode in tree.walk():
                inode.mtime, inode.mtime_ns = min((inode.mtime, inode.mtime_ns), (self.epoch, 0))

    def index(self, digest: Digest, layer: Layer, segments: Table, chunks: Table) -> None:
        """Tell the catalog of a new layer."""
        if self.catalog is not None:
            with self._tolerant(f"the catalog was not told of {digest}"):
                self.catalog.add_tables(digest, layer, segments, chunks)

    def index_again(self, digest: Digest) -> None:
        """Tell the catalog of a layer that was there, in case it was not told."""
        if self.catalog is not None:
            with self._tolerant(f"the catalog was not told of {digest}"):
                self.catalog.add_layer(self.store, digest)

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """Troubles of what only saves work are no reason to fail: a catalog can be rebuilt at any time."""
        try:
            yield
        except DsecError as error:
            self.progress.warning(f"{what}: {error}")


class Packed:
    """The input, packed. Devices: own segments in their order, then foreign ones by (blob digest, offset)."""

    def __init__(self, build: Build, tree: Tree, sink: PackSink, foreign: list[ForeignSegment]) -> None:
        self.build = build
        self.tree = tree
        self.sink = sink
        self.foreign = sorted(foreign, key=lambda segment: (segment.at.blob, segment.at.offset))
        self.foreign_blobs = sorted({segment.at.blob for segment in foreign})
        own = len(sink.sizes)
        tree.extents = sink.numbered({segment.number: own + nth for nth, segment in enumerate(self.foreign, 1)})
        self.devices = [size // BLOCK for size in (*sink.sizes, *(segment.at.size for segment in self.foreign))]
        """Blocks of each device."""
        build.clamp(tree)

    def hold_foreign(self) -> list[BlobInfo]:
        """Touch the foreign blobs, so that a collector leaves them. Raises BadBlob for one that is gone."""
        found = []
        for blob in self.foreign_blobs:
            try:
                found.append(self.build.store.touch(blob))
            except NotFound as error:
                raise BadBlob(blob, error.message) from error
        return found

    def check_foreign(self, checks: ForeignChecks) -> None:
        """Prove that the foreign chunks are what the catalog says. Raises BadBlob."""
        self.hold_foreign()
        bad = checks.finish(self.foreign)
        if bad is not None:
            raise BadBlob(*bad)

    def records(self, written: Written) -> Table:
        """The segment table."""
        table = np.zeros(len(self.foreign), SEGMENT)
        if self.foreign:
            index = {blob: nth for nth, blob in enumerate(self.foreign_blobs, len(written.blobs))}
            table["digest"] = np.frombuffer(b"".join(segment.at.digest for segment in self.foreign), "V32")
            table["blob"] = [index[segment.at.blob] for segment in self.foreign]
            for name in ("size", "offset", "stored"):
                table[name] = [getattr(segment.at, name) for segment in self.foreign]
        return np.concatenate([written.records, table])

    def content(self, written: Written) -> Content:
        """The extents and what they name, to compare with another layer."""

        def chunks() -> dict[tuple[int, int], bytes]:
            own = self.sink.chunk_records()[["digest", "segment", "block"]].tolist()
            places = {(segment + 1, block): digest for digest, segment, block in own}
            for device, segment in enumerate(self.foreign, len(self.sink.sizes) + 1):
                places.update({(device, block): digest for digest, block, _ in segment.chunks()})
            return places

        return Content(np.array(self.tree.extents, np.uint64), self.records(written)["digest"].tolist(), chunks)

    def result(self, digest: Digest, layer: Layer, inodes: int, *, reused: bool) -> PackResult:
        """The result of the build."""
        segments, foreign = len(self.sink.sizes), len(self.foreign)
        return PackResult.of(self.build, self.sink.sums, digest, layer, inodes=inodes, segments=segments, foreign=foreign, reused=reused)
