"""Verbs that make disks of disks: ``disk convert``, ``disk merge``."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dsec_layers.api.session import Session
from dsec_layers.builders.unpacked import unpacked
from dsec_layers.disks.convert import OUTPUTS, publish_input, write_disk
from dsec_layers.disks.inputs import made_ext4, open_input
from dsec_layers.disks.place import find_disk, pieces
from dsec_layers.disks.sealing import Sealed, check_format, fs_type_of, pack, publish_as
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.errors import Conflict, UsageError
from dsec_layers.overlaybd import Disk
from dsec_layers.overlaybd.lsmt import NIL_UUID
from dsec_layers.store.base import check_ref

__all__ = ["OUTPUTS", "Converted", "convert", "merge", "seal"]


@dataclass(frozen=True, slots=True)
class Converted:
    """A file or directory that was written: its format, the disk's size and the bytes it takes."""

    output: str
    format: str
    virtual_size: int
    bytes: int


def merge(session: Session, text: str, name: str, *, keep: int = 0, format: str = "zfile") -> Sealed:
    """Make one layer of all layers of a sealed disk but the lowest ``keep``, and name the result. It reads the same."""
    name = check_ref(name)
    check_format(format)
    _, image = find_disk(session.store, text)
    if not 0 <= keep < len(image.layers):
        raise UsageError(f"{text} has {len(image.layers)} layers: at most {len(image.layers) - 1} can be kept")
    with pieces(session) as opener, StoredDisk(session.store, image.layers, opener) as stored:
        kept = image.layers[:keep]
        layer = pack(session, stored.layers[keep:], kept[-1].uuid if kept else NIL_UUID, format, fs_type_of(image.layers))
        return publish_as(session, name, (*kept, layer), Disk(stored.layers).size, {"merged": text, "format": format}, (layer,))


def seal(
    session: Session,
    source: str,
    name: str,
    *,
    format: str = "zfile",
    flatten: bool = False,
    mkfs: str = "",
    size: int | None = None,
    epoch: int = 0,
) -> Sealed:
    """Publish the disk that ``source`` names (docs/disks.md) as ``name``. Layers that are OverlayBD blobs already stay as they are, unless ``flatten``.

    ``mkfs``: ``ext4`` makes a file system of ``size`` bytes first, and ``source`` names its content: a directory, tar, layer or environment.
    """
    name = check_ref(name)
    check_format(format)
    if mkfs not in ("", "ext4"):
        raise UsageError(f"no file system {mkfs!r} is made here", hint="ext4 is")
    content = unpacked(session.store, source, session.cache / "mkfs", session.mounted, session.progress)
    with made_ext4(session, content, size, epoch=epoch) if mkfs else open_input(session, source) as opened:
        if flatten:
            opened = replace(opened, sources=tuple(None for _ in opened.sources))
        layers = list(publish_input(session, opened, format, mkfs))
        new = [layer for layer, is_new in layers if is_new]
        recipe = {"source": Path(source).name, "format": format}
        return publish_as(session, name, [layer for layer, _ in layers], opened.size, recipe, new)


def convert(session: Session, source: str, output: str | Path, *, to: str) -> Converted:
    """Write the disk that ``source`` names to ``output``, which must not exist.

    ``raw``: a sparse file. ``qcow2``: by qemu-img. ``overlaybd``: a directory with the layers and a config.v1.json for OverlayBD's own tools. ``oci``: an image
    layout as accelerated-container-image knows it.
    """
    if to not in OUTPUTS:
        raise UsageError(f"unknown output format {to!r}", hint=f"one of {', '.join(OUTPUTS)}")
    output = Path(output)
    if os.path.lexists(output):
        raise Conflict(f"{output} exists already", hint="remove it or choose another name")
    with open_input(session, source) as opened:
        return Converted(str(output), to, opened.size, write_disk(session, opened, output, to))
