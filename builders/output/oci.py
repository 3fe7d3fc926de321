"""A stored layer or environment as an OCI image: one compressed tar for each layer, whiteouts in OCI form."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import BinaryIO

import zstandard

from dsec_layers.builders.output.tar import TarWriter
from dsec_layers.digest import Buffer, Digest
from dsec_layers.erofs.overlay import is_opaque, is_whiteout, opaque_name, whiteout_name, without_overlay
from dsec_layers.erofs.tree import Inode
from dsec_layers.layers.image import compose_image
from dsec_layers.oci import Descriptor
from dsec_layers.ocilayout import LayoutWriter
from dsec_layers.progress import SILENT, Progress, Task
from dsec_layers.registry.content import LayerContent, open_layer
from dsec_layers.registry.objects import load_config, load_layer, members_of, resolve
from dsec_layers.sandbox.variables import merge_variables
from dsec_layers.store.base import Store

__all__ = ["write_image"]

_TAR_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"


def write_image(store: Store, text: str, output: Path, progress: Progress = SILENT) -> int:
    """Write the object that ``text`` names as an image layout into the empty directory ``output``; the bytes of its layers."""
    digest, found = resolve(store, text)
    writer, members = LayoutWriter(output), members_of(digest, found)
    configs = [load_config(store, load_layer(store, member)) for member in members]
    for number, member in enumerate(members):
        spare = writer.spare(number)
        with progress.task(f"exporting layer {member[7:19]}") as task, open(spare, "wb") as stream:
            writer.layer(spare, *_write_layer(open_layer(store, member), stream, task))
    name = text.rpartition(":")[2] if not text.startswith("sha256:") else digest[7:19]
    writer.finish(compose_image(configs, merge_variables(config.env or {} for config in configs)), name=name)
    return sum(layer.size for layer in writer.layers)


def _write_layer(layer: LayerContent, stream: BinaryIO, task: Task) -> tuple[Descriptor, Digest]:
    """Write a layer as a compressed tar: its descriptor and diff ID."""
    outer = _Counter(stream)
    with zstandard.ZstdCompressor(level=3).stream_writer(outer, closefd=False) as compressor:  # type: ignore[arg-type]
        inner = _Counter(compressor)
        writer = TarWriter(inner)  # type: ignore[arg-type]
        for path, inode in layer.tree.walk():
            _entry(writer, layer, path, inode)
            task.advance(inode.size)
        writer.close()
    return Descriptor(_TAR_ZSTD, f"sha256:{outer.hash.hexdigest()}", outer.count), f"sha256:{inner.hash.hexdigest()}"


def _entry(writer: TarWriter, layer: LayerContent, path: bytes, inode: Inode) -> None:
    if is_whiteout(inode):
        writer.whiteout(whiteout_name(path))
        return
    regular = stat.S_ISREG(inode.mode)
    pieces, regions = (layer.pieces(inode), layer.regions(inode)) if regular else ((), None)
    writer.add(path or b".", inode, pieces, regions, identity=id(inode), xattrs=without_overlay(inode))
    if is_opaque(inode):
        writer.whiteout(opaque_name(path))


class _Counter:
    """A stream that counts and hashes what passes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = 0
        self.hash = hashlib.sha256()

    def write(self, data: Buffer) -> int:
        self._stream.write(data)
        self.hash.update(data)
        self.count += len(data)
        return len(data)
