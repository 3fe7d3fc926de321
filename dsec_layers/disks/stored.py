"""Sealed disks in a store: publish OverlayBD layers with their pieces lists, open a disk for lazy reading."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from dsec_layers.cache.flat import OPEN_PIECES, PieceOpener, PieceSource
from dsec_layers.descriptors import Descriptors
from dsec_layers.digest import Buffer, Digest, content_digest
from dsec_layers.fsio import map_os_error, pwrite_all
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.disk import (
    DISK_CONFIG,
    LAYER_TAR,
    PIECE_SIZE,
    PIECES,
    UUID,
    DiskConfig,
    DiskImage,
    DiskLayer,
    pack_pieces,
    parse_pieces,
)
from dsec_layers.overlaybd import BlockCache, LsmtLayer, Write, open_layer
from dsec_layers.overlaybd.oci import BlobInfo, layer_descriptor
from dsec_layers.overlaybd.stream import batches
from dsec_layers.overlaybd.tarwrap import looks_like_tar
from dsec_layers.progress import SILENT, Progress, Task
from dsec_layers.registry.objects import put_blob
from dsec_layers.segment import Segment
from dsec_layers.store.base import Store
from dsec_layers.store.transfer import put_bytes, put_stream, read_blob

__all__ = ["StoredDisk", "publish_disk", "publish_layer"]

_READ: Final = 1 << 20
_STEP: Final = 4 * PIECE_SIZE
_OPENERS: Final = 8
_BLOCKS: Final = 64 << 20
"""Bytes of decompressed ZFile blocks that an open disk keeps."""


class StoredDisk:
    """An open sealed disk: its layers from bottom to top, read lazily through ``opener``. Close it, or use it as a context."""

    def __init__(self, store: Store, layers: Sequence[DiskLayer], opener: PieceOpener) -> None:
        cache = BlockCache(_BLOCKS)
        self.layers: list[LsmtLayer] = []
        self._opener = opener
        self._kept = Descriptors[bytes](OPEN_PIECES)
        try:
            with ThreadPoolExecutor(min(_OPENERS, len(layers)), thread_name_prefix="open-disk") as pool:
                self.layers += pool.map(lambda layer: open_layer(self._source(store, layer), cache=cache), layers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the pieces' descriptors."""
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _source(self, store: Store, layer: DiskLayer) -> PieceSource:
        size = layer.blob.size
        digests = parse_pieces(read_blob(store, layer.pieces.digest, limit=layer.pieces.size, size=layer.pieces.size), size)
        return PieceSource(Segment.of_disk(store.url, layer.blob.digest, size, digests), self._opener, self._kept)


def publish_layer(
    store: Store,
    writes: Iterable[Write],
    *,
    spool: Path,
    uuid: str,
    fs_type: str = "",
    vsize_gb: int = 0,
    progress: Progress = SILENT,
) -> DiskLayer:
    """Store what ``overlaybd.commit`` or ``merge`` writes as a layer blob with its pieces list. ``spool``: a directory for the file while it is made.

    Bytes that come in order go straight to the store. Others (a ZFile's header is written last) go to a nameless file first.
    """
    try:
        with tempfile.TemporaryFile(dir=spool, prefix="dsec-disk-") as stream, progress.task("packing disk layer") as task:
            return _publish(store, _in_order(writes, stream, task), uuid=uuid, fs_type=fs_type, vsize_gb=vsize_gb)
    except OSError as error:
        raise map_os_error(error, f"spool file in {spool}") from error


def publish_file(store: Store, stream: BinaryIO, *, uuid: str, fs_type: str = "", vsize_gb: int = 0) -> DiskLayer:
    """Store an open file that is an OverlayBD layer as a blob with its pieces list."""
    return _publish(store, _blocks(stream), uuid=uuid, fs_type=fs_type, vsize_gb=vsize_gb)


def _in_order(writes: Iterable[Write], stream: BinaryIO, task: Task) -> Iterator[Buffer]:
    """The bytes that the writes make, in order. They pass through as long as it is certain that none comes back."""
    at, streaming = 0, True
    for nth, (offset, data) in enumerate(writes):
        if nth == 0:
            streaming = offset == 0 and looks_like_tar(data)  # a tar's headers come first only where nothing comes back
        task.advance(len(data))
        if not streaming:
            pwrite_all(stream.fileno(), data, offset)
        elif offset != at:
            raise AssertionError("a write came back")
        else:
            at += len(data)
            yield data
    if not streaming:
        yield from _blocks(stream)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    stream.seek(0)
    while data := stream.read(_READ):
        yield data


def _publish(store: Store, data: Iterable[Buffer], *, uuid: str, fs_type: str, vsize_gb: int) -> DiskLayer:
    digests: list[bytes] = []
    size = 0

    def pieces() -> Iterator[bytes]:
        nonlocal size
        for piece in batches(data, _STEP):
            view = memoryview(piece)
            digests.extend(content_digest(view[at : at + PIECE_SIZE]) for at in range(0, len(piece), PIECE_SIZE))
            size += len(piece)
            yield piece

    info = put_stream(store, pieces())
    described = layer_descriptor(BlobInfo(info.digest, size, fs_type=fs_type, vsize_gb=vsize_gb))
    blob = Descriptor(LAYER_TAR, info.digest, size, {**described.annotations, UUID: uuid})
    return DiskLayer(blob, put_blob(store, PIECES, pack_pieces(size, digests)))


def publish_disk(store: Store, layers: Sequence[DiskLayer], config: DiskConfig) -> Digest:
    """Store a disk's config and manifest; naming it is up to the caller."""
    image = DiskImage(put_blob(store, DISK_CONFIG, config.to_json()), tuple(layers))
    for item in image.blobs():
        store.touch(item.digest)
    return put_bytes(store, image.to_json()).digest
