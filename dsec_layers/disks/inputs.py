"""What ``disk convert`` reads: disks here and in the store, raw and qcow2 files, OverlayBD's config.v1.json, OCI images made by accelerated-container-image, EROFS images of layers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dsec_layers.blocksource import BlockSource, FileSource
from dsec_layers.digest import Digest, check_digest
from dsec_layers.disks.ext4 import make_image, size_for
from dsec_layers.disks.files import GenerationReader
from dsec_layers.disks.owner import owner_of
from dsec_layers.disks.place import Place, below, flat_source, pieces
from dsec_layers.disks.state import STATE
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.errors import ImageCode, ImageError, InputError, NotFound
from dsec_layers.fsio import data_ranges, map_os_error
from dsec_layers.layers.disk import DiskImage, DiskLayer
from dsec_layers.layers.manifest import MAX_DESCRIPTORS, MAX_JSON
from dsec_layers.oci import Descriptor, parse_descriptor, parse_list
from dsec_layers.overlaybd import LsmtLayer, open_layer, open_upper_pair
from dsec_layers.overlaybd.config import lower_paths, parse_config
from dsec_layers.overlaybd.lsmt import Flags, Header
from dsec_layers.overlaybd.oci import blob_info
from dsec_layers.overlaybd.packing import virtual_size
from dsec_layers.overlaybd.segments import SECTOR, Segments
from dsec_layers.proc import find_tool, run
from dsec_layers.registry.objects import resolve_any

__all__ = ["BlobFile", "DiskInput", "made_ext4", "oci_blobs", "open_input"]

_QCOW2: Final = b"QFI\xfb"


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A layer that is a file already; ``digest`` is what it must have, if somebody said."""

    path: Path
    digest: Digest | None = None
    fs_type: str = ""


@dataclass(frozen=True, slots=True)
class DiskInput:
    """A disk to be read: its layers from bottom to top, each with what it is already: a layer of this place's store, a file, or neither."""

    layers: tuple[LsmtLayer, ...]
    sources: tuple[DiskLayer | BlobFile | None, ...]
    size: int


@contextmanager
def open_input(place: Place, text: str) -> Iterator[DiskInput]:
    """The disk that ``text`` names, open while the context lasts. What is attached is snapshotted first. Raises NotFound, ImageError, what reading raises."""
    path = Path(text)
    with ExitStack() as stack:
        if (path / STATE).exists():
            yield _writable(place, path, stack)
        elif (path / "oci-layout").exists():
            yield _files(stack, oci_blobs(path))
        elif path.is_file() and path.name.endswith(".json"):
            yield _configured(stack, path)
        elif path.is_file():
            yield _file(stack, path)
        elif os.path.lexists(path) or text.startswith((".", "/")):
            raise NotFound(f"{path} is no disk, image file, config.v1.json or OCI layout")
        else:
            yield _named(place, text, stack)


@contextmanager
def made_ext4(place: Place, content: AbstractContextManager[Path], size: int | None = None, *, epoch: int = 0) -> Iterator[DiskInput]:
    """A new ext4 file system with what is in the directory ``content``, as a disk. ``size`` in bytes; default: what the content needs."""
    place.cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        image = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mkfs-", dir=place.cache))) / "image"
        image.touch(mode=0o600)
        with content as directory:
            wanted = size or size_for(directory)
            segments = make_image(image, wanted, directory, epoch=epoch)
        source = _open(stack, image)
        yield DiskInput((_layer_of(source, segments),), (None,), wanted)


def _writable(place: Place, path: Path, stack: ExitStack) -> DiskInput:
    with owner_of(path) as owner:
        state = owner.snapshot()
    stored, _ = below(place, state.parent)
    layers: list[LsmtLayer] = []
    if stored:
        opener = stack.enter_context(pieces(place))
        layers += stack.enter_context(StoredDisk(place.store, stored, opener)).layers
    layers += stack.enter_context(GenerationReader(path, state.frozen)).layers
    if not layers:
        layers.append(LsmtLayer(Header(Flags.UPPER_DATA), _whole(0), ()))
    return DiskInput(tuple(layers), (*stored, *(None for _ in layers[len(stored) :])), state.virtual_size)


def _named(place: Place, text: str, stack: ExitStack) -> DiskInput:
    _, found = resolve_any(place.store, text)
    opener = stack.enter_context(pieces(place))
    if isinstance(found, DiskImage):
        layers = stack.enter_context(StoredDisk(place.store, found.layers, opener)).layers
        return DiskInput(tuple(layers), found.layers, virtual_size(layers))
    source = flat_source(place, text, opener)
    stack.callback(source.close)
    return DiskInput((_layer_of(source, _whole(source.size)),), (None,), source.size)


def _configured(stack: ExitStack, path: Path) -> DiskInput:
    """A stack that a config.v1.json describes; names in it are relative to its directory. Layers that are only in a registry cannot be read here."""
    config = parse_config(_small_file(path))
    blobs = []
    for number, lower in enumerate(config.lowers):
        found = next((path.parent / name for name in lower_paths(lower) if (path.parent / name).is_file()), None)
        if found is None:
            raise NotFound(f"{path}: lower {number} ({lower.digest or lower.file or lower.dir}) is not on this host", hint="pull it first")
        blobs.append(BlobFile(found, check_digest(lower.digest) if lower.digest else None))
    opened = _files(stack, blobs) if blobs else DiskInput((), (), 0)
    if config.upper is None or not config.upper.data:
        return opened
    data, index = (_open(stack, path.parent / name) for name in (config.upper.data, config.upper.index))
    layers = (*opened.layers, open_upper_pair(data, index))
    return DiskInput(layers, (*opened.sources, None), virtual_size(layers))


def _file(stack: ExitStack, path: Path) -> DiskInput:
    source = _open(stack, path)
    first = source.pread(0, min(4, source.size))
    if first == _QCOW2:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".convert-", dir=path.absolute().parent))
        raw = Path(folder) / "raw"
        # The format is named: a raw disk's guest could write a qcow2 header that names files of the host; a qcow2 file may do so itself, so that is looked at.
        facts = json.loads(run([find_tool("qemu-img"), "info", "--output=json", "-f", "qcow2", path]).stdout)
        if any(name in facts for name in ("backing-filename", "full-backing-filename")) or "data-file" in json.dumps(facts):
            raise InputError(f"{path} refers to other files", hint="flatten it first: qemu-img convert -O qcow2")
        run([find_tool("qemu-img"), "convert", "-f", "qcow2", "-O", "raw", path, raw])
        source = _open(stack, raw)
    try:
        layer = open_layer(source)
    except ImageError:
        if source.size % SECTOR or not source.size:
            raise InputError(f"{path} is not a raw disk: {source.size} bytes are no whole number of sectors") from None
        layer = _layer_of(source, _extents(source.fd, source.size))
        return DiskInput((layer,), (None,), source.size)
    return DiskInput((layer,), (BlobFile(path),), virtual_size([layer]))


def _files(stack: ExitStack, blobs: list[BlobFile]) -> DiskInput:
    layers = tuple(open_layer(_open(stack, blob.path)) for blob in blobs)
    return DiskInput(layers, tuple(blobs), virtual_size(layers))


def oci_blobs(layout: Path) -> list[BlobFile]:
    """The layers of the one OverlayBD image in an OCI layout. Raises ImageError if it has none, several, or layers of another kind."""
    manifest = _object(_small_file(layout / "index.json"), "index.json")
    for _ in range(3):  # an index may name an index
        if manifest.get("manifests") is None:
            break
        listed = parse_list(manifest["manifests"], str(layout), MAX_DESCRIPTORS)
        if len(listed) != 1:
            raise ImageError(
                f"{layout} must hold one image", code=ImageCode.INCONSISTENT, hint="copy the one you want: skopeo copy ... oci:DIR"
            )
        path = _blob_path(layout, parse_descriptor(listed[0], str(layout), typed=False))
        manifest = _object(_small_file(path), str(path))
    blobs = []
    for item in parse_list(manifest.get("layers") or [], str(layout), MAX_DESCRIPTORS):
        layer = parse_descriptor(item, str(layout), typed=False)
        info = blob_info(layer)
        if info is None or info.is_turbo:
            raise ImageError(
                f"{layout}: the image has layers that are not native OverlayBD layers",
                code=ImageCode.UNKNOWN_FEATURE,
                hint="dsec-layers import takes ordinary images",
            )
        blobs.append(BlobFile(_blob_path(layout, layer), info.digest, info.fs_type))
    if not blobs:
        raise ImageError(f"{layout}: the image has no layers", code=ImageCode.INCONSISTENT)
    return blobs


def _blob_path(layout: Path, descriptor: Descriptor) -> Path:
    return layout / "blobs/sha256" / descriptor.digest.removeprefix("sha256:")


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{what} is not JSON", code=ImageCode.BAD_ENCODING) from error
    if not isinstance(value, dict):
        raise ImageError(f"{what} is not a JSON object", code=ImageCode.BAD_ENCODING)
    return value


def _small_file(path: Path) -> bytes:
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_JSON + 1)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    if len(data) > MAX_JSON:
        raise ImageError(f"{path} is too large", code=ImageCode.LIMIT)
    return data


class _OpenFile(FileSource):
    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, name=name)
        self.fd = fd


def _open(stack: ExitStack, path: Path) -> _OpenFile:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    stack.callback(os.close, fd)
    return _OpenFile(fd, str(path))


def _layer_of(source: BlockSource, segments: Segments) -> LsmtLayer:
    return LsmtLayer(Header(Flags.UPPER_DATA, virtual_size=source.size), segments, (source,), ("raw",))


def _whole(size: int) -> Segments:
    sectors = size // SECTOR
    return _mapped(np.array([[0, sectors]] if sectors else [], np.int64).reshape(-1, 2))


def _mapped(spans: np.ndarray[Any, np.dtype[np.int64]]) -> Segments:
    zero = np.zeros(len(spans), np.int16)
    return Segments(spans[:, 0], spans[:, 1], spans[:, 0], zero, zero.astype(np.bool_))


def _extents(fd: int, size: int) -> Segments:
    """A raw file's data, as the file system tells it from holes."""
    spans = [(first // SECTOR, -(-end // SECTOR)) for first, end in data_ranges(fd, size)]
    return _mapped(np.array(spans, np.int64).reshape(-1, 2))
