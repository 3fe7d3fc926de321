"""What of a layer must be here whole before it can be mounted: manifest, metadata image and segment table; or its one image.

Files are published durable, with a fixed modification time: a file that was truncated or written into since has another one and is fetched again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from dsec_layers.cache.directory import CacheView
from dsec_layers.cache.fetch import Fetcher, Question
from dsec_layers.digest import Buffer, Digest, sha256_digest
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.fsio import map_os_error, publish
from dsec_layers.layers.disk import DiskImage
from dsec_layers.layers.frames import MAX_METADATA
from dsec_layers.layers.manifest import MAX_JSON, Environment, Layer, Object, parse_object
from dsec_layers.layers.tables import SEGMENT, Table, pack_segments, parse_segments
from dsec_layers.registry.objects import load_metadata
from dsec_layers.segment import Segment
from dsec_layers.store.base import Store
from dsec_layers.store.transfer import PIECE, read_blob, read_pieces

__all__ = ["LayerFiles", "files_of", "layer_files", "local_layer_files", "manifest"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_STAMP: Final = 946_684_800 * 10**9
_NO_SEGMENTS: Final = np.zeros(0, SEGMENT)


@dataclass(frozen=True)
class LayerFiles:
    """A layer whose metadata is here. ``image``: the metadata image, or the whole image of a compressed layer, which has no segments.

    ``digest``: of the manifest. ``store``: URL. ``table``: segment i is device i + 1.
    """

    digest: Digest
    store: str
    layer: Layer
    image: Path
    table: Table

    @cached_property
    def digests(self) -> list[bytes]:
        """The segments' digests, in order."""
        raw = self.table["digest"].tobytes()
        return [raw[at : at + 32] for at in range(0, len(raw), 32)]

    @cached_property
    def names(self) -> list[str]:
        """The segments' file names in the cache, in order."""
        return [digest.hex() for digest in self.digests]

    @cached_property
    def sizes(self) -> list[int]:
        """The segments' sizes, in order."""
        sizes: list[int] = self.table["size"].tolist()
        return sizes

    @cached_property
    def index(self) -> dict[bytes, int]:
        """Where in the table a segment is, by digest."""
        return {digest: at for at, digest in enumerate(self.digests)}

    def piece(self, number: int) -> Segment:
        """Segment ``number`` (from 0) as something to fetch."""
        return Segment.of_record(self.store, self.layer, self.table, number)

    def pieces(self) -> list[Segment]:
        """All segments as something to fetch, in order."""
        return [self.piece(number) for number in range(len(self.table))]


def layer_files(directory: CacheView, url: str, digest: Digest, fetcher: Fetcher) -> LayerFiles:
    """A layer's files, fetched and verified first as far as they are not here, in the slots and within the deadline of segments.

    The store at ``url`` is opened only if something must be fetched, in a thread that may hang. Raises NotFound, CorruptError, ImageError (right bytes, but not a layer), StoreError,
    NoSpace.
    """
    layer = manifest(directory, url, digest, fetcher)
    if not isinstance(layer, Layer):
        raise ImageError(f"{digest} is an environment, not a layer", code=ImageCode.BAD_MAGIC)
    files = _local(directory, url, digest, layer)
    if files is not None:
        return files
    try:
        if layer.compressed:
            image, table = _fetch_image(directory, url, layer, fetcher), _NO_SEGMENTS
        else:
            image, table = _fetch_metadata(directory, url, layer, fetcher)
    except OSError as error:
        raise map_os_error(error, f"cache {directory.root}") from error
    return LayerFiles(digest, url, layer, image, table)


def local_layer_files(directory: CacheView, url: str, digest: Digest) -> LayerFiles | None:
    """The layer's files if they are all here, else None. Asks no store."""
    layer = _local_manifest(directory, digest)
    return _local(directory, url, digest, layer) if isinstance(layer, Layer) else None


def manifest(directory: CacheView, url: str, digest: Digest, fetcher: Fetcher) -> Layer | Environment:
    """The layer or environment that a manifest digest names, kept in the cache. Errors as ``layer_files``."""
    value = _local_manifest(directory, digest)
    if value is None:
        data = fetcher.ask(Question(url, f"manifest {digest}", lambda store: read_blob(store, digest, limit=MAX_JSON)))
        value = _mountable(parse_object(data), digest)
        try:
            _write(directory.metadata / f"{_hex(digest)}.json", data)
        except OSError as error:
            raise map_os_error(error, f"cache {directory.root}") from error
    return value


def files_of(directory: CacheView, files: LayerFiles) -> set[Path]:
    """Every file in the cache's metadata/ and images/ that belongs to a layer."""
    found = {files.image, directory.metadata / f"{_hex(files.digest)}.json"}
    return found if files.layer.compressed else found | set(_metadata_paths(directory, files.layer))


def _mountable(value: Object, digest: Digest) -> Layer | Environment:
    if isinstance(value, DiskImage):
        raise ImageError(f"{digest} is a disk, not a layer or environment", code=ImageCode.BAD_MAGIC)
    return value


def _local_manifest(directory: CacheView, digest: Digest) -> Layer | Environment | None:
    path = directory.metadata / f"{_hex(digest)}.json"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if sha256_digest(data) == digest:
        return _mountable(parse_object(data), digest)
    _log.warning("%s is damaged and is fetched again", path)
    return None


def _local(directory: CacheView, url: str, digest: Digest, layer: Layer) -> LayerFiles | None:
    if layer.compressed:
        image = directory.images / f"{_hex(layer.metadata.digest)}.erofs"
        here = _is_untouched(image) and image.stat().st_size == layer.metadata.size
        return LayerFiles(digest, url, layer, image, _NO_SEGMENTS) if here else None
    image, path = _metadata_paths(directory, layer)
    if not (_is_untouched(image) and _is_untouched(path)):
        return None
    try:
        table = parse_segments(path.read_bytes(), tuple(item.size for item in layer.segments))
    except ImageError as error:
        _log.warning("%s is damaged and is fetched again: %s", path, error.message)
        return None
    return LayerFiles(digest, url, layer, image, table)


def _metadata_paths(directory: CacheView, layer: Layer) -> tuple[Path, Path]:
    name = _hex(layer.metadata.digest)
    # The table's indexes are into this manifest's list of blobs, so that it may differ where the metadata blob is the same.
    blobs = sha256_digest("".join(item.digest for item in layer.segments).encode())
    return directory.metadata / f"{name}.erofs", directory.metadata / f"{name}.{_hex(blobs)[:16]}.table"


def _fetch_metadata(directory: CacheView, url: str, layer: Layer, fetcher: Fetcher) -> tuple[Path, Table]:
    image, path = _metadata_paths(directory, layer)
    data, table = fetcher.ask(_question(url, layer, lambda store: load_metadata(store, layer)))
    _write(image, data)
    _write(path, pack_segments(table))
    return image, table


def _fetch_image(directory: CacheView, url: str, layer: Layer, fetcher: Fetcher) -> Path:
    item = layer.metadata
    if item.size > MAX_METADATA:
        raise ImageError(f"{item.digest}: an image of {item.size} bytes, the limit is {MAX_METADATA}", code=ImageCode.LIMIT)
    path = directory.images / f"{_hex(item.digest)}.erofs"

    def fetch(store: Store) -> None:
        with publish(path, mode=0o600) as stream:
            for piece in read_pieces(store, item.digest, item.size):
                stream.write(piece)
            stream.flush()
            os.utime(stream.fileno(), ns=(_STAMP, _STAMP))

    fetcher.ask(_question(url, layer, fetch))
    return path


def _question(url: str, layer: Layer, read: Callable[[Store], _T]) -> Question[_T]:
    item = layer.metadata
    return Question(url, f"metadata {item.digest}", read, min(item.size, PIECE))


def _hex(digest: Digest) -> str:
    return digest.removeprefix("sha256:")


def _is_untouched(path: Path) -> bool:
    try:
        return path.stat().st_mtime_ns == _STAMP
    except FileNotFoundError:
        return False


def _write(path: Path, data: Buffer) -> None:
    with publish(path, mode=0o600) as stream:
        stream.write(data)
        stream.flush()
        os.utime(stream.fileno(), ns=(_STAMP, _STAMP))
