"""From layers of any kind to a sealed disk: packed, stored and named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from dsec_layers.digest import Digest
from dsec_layers.disks.files import GenerationReader
from dsec_layers.disks.place import Place
from dsec_layers.disks.state import DiskState
from dsec_layers.disks.stored import publish_disk, publish_layer
from dsec_layers.errors import UsageError
from dsec_layers.layers.disk import DiskConfig, DiskLayer
from dsec_layers.overlaybd import Algorithm, LsmtLayer, Packing, ZFileOptions, content_uuid, merge
from dsec_layers.overlaybd.lsmt import NIL_UUID, Flags, Header
from dsec_layers.overlaybd.segments import no_segments
from dsec_layers.registry.objects import set_tag

__all__ = ["FORMATS", "Sealed", "check_format", "fs_type_of", "pack", "pack_frozen", "publish_as"]

FORMATS: Final = ("zfile", "zfile-zstd", "lsmt")
"""How a layer is packed: LZ4 blocks of 4 KiB, Zstandard blocks of 16 KiB, or plain."""

_BUILDER: Final = f"dsec-layers {version('dsec-layers')}"
_PACKINGS: Final = {
    "zfile": ZFileOptions(),
    "zfile-zstd": ZFileOptions(Algorithm.ZSTD, 16384),
    "lsmt": None,
}


@dataclass(frozen=True, slots=True)
class Sealed:
    """A disk in the store: its name, manifest, layers, size in bytes, and bytes that this commit added."""

    name: str
    digest: Digest
    layers: int
    virtual_size: int
    stored_bytes: int


def check_format(format: str) -> None:
    """UsageError for an unknown format of layers."""
    if format not in FORMATS:
        raise UsageError(f"unknown layer format {format!r}", hint=f"one of {', '.join(FORMATS)}")


def publish_as(
    place: Place, name: str, layers: Sequence[DiskLayer], size: int, recipe: Mapping[str, Any], new: Sequence[DiskLayer]
) -> Sealed:
    """Publish a disk made of layers that are in the store, and name it. ``new``: those that were put there for it."""
    digest = publish_disk(place.store, layers, DiskConfig(size, name, recipe, _BUILDER))
    set_tag(place.store, name, digest)
    added = sum(layer.blob.size + layer.pieces.size for layer in new)
    return Sealed(name, digest, len(layers), size, added)


def pack_frozen(place: Place, path: Path, state: DiskState, below: Sequence[DiskLayer], format: str, fs_type: str) -> DiskLayer:
    """One layer of a disk's frozen generations. The same input gives the same blob."""
    parent = below[-1].uuid if below else NIL_UUID
    with GenerationReader(path, state.frozen) as reader:
        layers = reader.layers or [LsmtLayer(Header(Flags.UPPER_DATA), no_segments(), ())]
        layers[-1] = replace(layers[-1], header=replace(layers[-1].header, virtual_size=state.virtual_size))
        uuid = content_uuid(layers, parent)
        writes = merge(layers, Packing(uuid, parent, zfile=_PACKINGS[format], tar=True))
        return publish_layer(place.store, writes, spool=path, uuid=uuid, fs_type=fs_type, progress=place.progress)


def pack(place: Place, layers: Sequence[LsmtLayer], parent: str, format: str, fs_type: str) -> DiskLayer:
    """One layer in the store, of all ``layers``, on the one called ``parent``.

    Its UUID follows from what is in it, as far as that is known before it is read: the same input gives the same blob.
    """
    state = hashlib.sha256(parent.encode())
    for layer in layers:
        for column in (layer.segments.lba, layer.segments.end, layer.segments.moffset, layer.segments.zeroed):
            state.update(column.tobytes())
    uuid = str(UUID(bytes=state.digest()[:16])).upper()
    place.cache.mkdir(parents=True, exist_ok=True)
    packing = Packing(uuid, parent, zfile=_PACKINGS[format], tar=True)
    writes = merge(layers, packing)
    return publish_layer(place.store, writes, spool=place.cache, uuid=uuid, fs_type=fs_type, progress=place.progress)


def fs_type_of(layers: Sequence[DiskLayer]) -> str:
    """The file system that the topmost layer with a note of one says it is part of; empty for none."""
    return next(
        (kind for layer in reversed(layers) if (kind := layer.blob.annotations.get("containerd.io/snapshot/overlaybd/blob-fs-type"))), ""
    )
