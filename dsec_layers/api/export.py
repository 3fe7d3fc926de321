"""``export``: a layer or environment as a tar, a flat EROFS image or an OCI layout."""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from dsec_layers.api.look import open_view
from dsec_layers.api.session import Session
from dsec_layers.builders.output.ocilayout import LayoutWriter
from dsec_layers.builders.output.tar import TarWriter
from dsec_layers.builders.overlay.view import Entry, walk
from dsec_layers.digest import Buffer, Digest
from dsec_layers.erofs.overlay import is_opaque, is_whiteout, opaque_name, whiteout_name, without_overlay
from dsec_layers.erofs.tree import BLOCK, HOLE, Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import Conflict, NotFound, UsageError
from dsec_layers.fsio import map_os_error, publish, publish_directory
from dsec_layers.layers.image import compose_image
from dsec_layers.layers.manifest import Layer
from dsec_layers.oci import Descriptor
from dsec_layers.registry.content import LayerContent, open_layer
from dsec_layers.registry.objects import load_config, load_layer, resolve
from dsec_layers.sandbox.variables import merge_variables

__all__ = ["FORMATS", "Exported", "export", "flat_image", "flat_pieces"]

FORMATS = ("tar", "erofs", "oci")
_TAR_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"


@dataclass(frozen=True, slots=True)
class Exported:
    """What ``export`` wrote, in bytes."""

    ref: str
    format: str
    output: str
    size: int


def export(session: Session, text: str, output: Path | BinaryIO, *, format: str = "tar") -> Exported:
    """Write the object ``text`` names to ``output``: a path that must not exist, or for tar and erofs a binary stream.

    ``tar`` and ``erofs`` are the merged view; ``oci`` is an image layout directory with one tar layer for each layer, whiteouts in OCI form.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown export format {format!r}", hint=f"one of {', '.join(FORMATS)}")
    if not isinstance(output, Path):
        if format == "oci":
            raise UsageError("an OCI layout is a directory: give a path")
        counter = _Counter(output)
        _PLAIN[format](session, text, counter)
        return Exported(text, format, "-", counter.count)
    if os.path.lexists(output):
        raise Conflict(f"{output} exists already", hint="remove it or choose another name")
    if not output.parent.is_dir():
        raise NotFound(f"{output.parent} is no directory that {output.name} could be written to", hint=f"mkdir -p {output.parent}")
    try:
        if format == "oci":
            return Exported(text, format, str(output), _export_oci(session, text, output))
        with publish(output, replace=False) as stream:
            counter = _Counter(stream)
            _PLAIN[format](session, text, counter)
    except OSError as error:
        raise map_os_error(error, f"writing {output}") from error
    return Exported(text, format, str(output), counter.count)


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


def _export_tar(session: Session, text: str, stream: Any) -> None:
    writer = TarWriter(stream)
    with session.progress.task(f"exporting {text}") as task:
        for path, entry in walk(open_view(session, text)):
            layer, inode = entry.layer, entry.inode
            regular = stat.S_ISREG(inode.mode)
            pieces, regions = (layer.pieces(inode), layer.regions(inode)) if regular else ((), None)
            writer.add(path or b".", inode, pieces, regions, identity=entry.identity, xattrs=entry.xattrs)
            task.advance(inode.size)
    writer.close()


def _export_erofs(session: Session, text: str, stream: Any) -> None:
    with session.progress.task(f"exporting {text}") as task:
        for piece in flat_pieces(session, text):
            stream.write(piece)
            task.advance(len(piece))


def flat_pieces(session: Session, text: str) -> Iterator[Buffer]:
    """The flat EROFS image of a layer or of an environment's merged view: metadata, then every segment it uses."""
    image, segments = flat_image(session, text)
    yield image
    for owner, index in segments:
        yield owner.segment(index)


def flat_image(session: Session, text: str) -> tuple[Buffer, list[tuple[LayerContent, int]]]:
    """The metadata of a flat image, and the segments that follow it in order.

    It has no device table, so that every kernel with chunk-based files (Linux >= 5.15) mounts it; the images that layers are mounted by need 6.4 for that.
    """
    digest, found = resolve(session.store, text)
    if not isinstance(found, Layer):
        return _merged_image(open_view(session, text))
    layer = open_layer(session.store, digest)
    blocks = (layer.table["size"] // BLOCK).tolist()
    return render(layer.tree, blocks, joined=True), [(layer, index) for index in range(len(blocks))]


def _merged_image(root: Entry) -> tuple[Buffer, list[tuple[LayerContent, int]]]:
    """One metadata image of a merged view, and the segments that are its devices in order. The same segment in two layers is one device."""
    devices: dict[bytes, int] = {}
    segments: list[tuple[LayerContent, int]] = []
    tree = Tree(root=Inode(root.inode.mode))
    made: dict[tuple[int, int], Inode] = {}

    def device_of(layer: LayerContent, device: int) -> int:
        key = layer.table[device - 1]["digest"].tobytes()
        if key not in devices:
            segments.append((layer, device - 1))
            devices[key] = len(segments)
        return devices[key]

    def copy(entry: Entry) -> Inode:
        if entry.children is None and entry.identity in made:
            return made[entry.identity]
        inode = _copy_inode(entry)
        extents = entry.layer.tree.extents[entry.inode.extent_at : entry.inode.extent_at + entry.inode.extent_count]
        inode.extent_at = len(tree.extents)
        tree.extents.extend(array("Q", (e if e == HOLE else device_of(entry.layer, e >> 32) << 32 | e & 0xFFFFFFFF for e in extents)))
        made[entry.identity] = inode
        return inode

    tree.root = copy(root)
    stack = [(root, tree.root)]
    while stack:
        entry, inode = stack.pop()
        assert inode.children is not None
        for name in sorted(entry.children or {}):
            child = (entry.children or {})[name]
            inode.children[name] = made_child = copy(child)
            if child.children is not None:
                stack.append((child, made_child))
    return render(tree, [int(layer.table[index]["size"]) // BLOCK for layer, index in segments], joined=True), segments


def _copy_inode(entry: Entry) -> Inode:
    old = entry.inode
    inode = Inode(old.mode, old.uid, old.gid, old.mtime, old.mtime_ns)
    inode.rdev, inode.size, inode.data, inode.xattrs = old.rdev, old.size, old.data, entry.xattrs
    inode.extent_count, inode.chunk_bits = old.extent_count, old.chunk_bits
    return inode


def _export_oci(session: Session, text: str, output: Path) -> int:
    digest, found = resolve(session.store, text)
    members = [digest] if isinstance(found, Layer) else [item.digest for _, item in found.layers]
    with publish_directory(output) as work:
        writer = LayoutWriter(work)
        configs = [load_config(session.store, load_layer(session.store, member)) for member in members]
        for number, member in enumerate(members):
            spare = writer.spare(number)
            writer.layer(spare, *_oci_layer(session, member, spare))
        name = text.rpartition(":")[2] if not text.startswith("sha256:") else digest[7:19]
        writer.finish(compose_image(configs, merge_variables(config.env or {} for config in configs)), name=name)
    return sum(layer.size for layer in writer.layers)


def _oci_layer(session: Session, digest: Digest, output: Path) -> tuple[Descriptor, Digest]:
    """Write a layer as a compressed tar: its descriptor and diff ID."""
    layer = open_layer(session.store, digest)
    with session.progress.task(f"exporting layer {digest[7:19]}") as task, open(output, "wb") as stream:
        outer = _Counter(stream)
        with zstandard.ZstdCompressor(level=3).stream_writer(outer, closefd=False) as compressor:  # type: ignore[arg-type]
            inner = _Counter(compressor)
            writer = TarWriter(inner)  # type: ignore[arg-type]
            for path, inode in layer.tree.walk():
                _oci_entry(writer, layer, path, inode)
                task.advance(inode.size)
            writer.close()
    return Descriptor(_TAR_ZSTD, f"sha256:{outer.hash.hexdigest()}", outer.count), f"sha256:{inner.hash.hexdigest()}"


def _oci_entry(writer: TarWriter, layer: LayerContent, path: bytes, inode: Inode) -> None:
    if is_whiteout(inode):
        writer.whiteout(whiteout_name(path))
        return
    regular = stat.S_ISREG(inode.mode)
    pieces, regions = (layer.pieces(inode), layer.regions(inode)) if regular else ((), None)
    writer.add(path or b".", inode, pieces, regions, identity=id(inode), xattrs=without_overlay(inode))
    if is_opaque(inode):
        writer.whiteout(opaque_name(path))


_PLAIN = {"tar": _export_tar, "erofs": _export_erofs}
