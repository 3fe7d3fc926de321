"""``export``: a layer or environment as a tar, a flat EROFS image or an OCI layout."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from dsec_layers.api.session import Session
from dsec_layers.builders.output.ocilayout import LayoutWriter
from dsec_layers.builders.output.tar import TarWriter
from dsec_layers.digest import Buffer, Digest
from dsec_layers.erofs.overlay import is_opaque, is_whiteout, opaque_name, whiteout_name, without_overlay
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import Conflict, NotFound, UsageError
from dsec_layers.fsio import map_os_error, publish, publish_directory
from dsec_layers.oci import Descriptor
from dsec_layers.registry.content import LayerContent, open_layer
from dsec_layers.registry.flat import flat_pieces
from dsec_layers.registry.objects import load_config, load_layer, members_of, resolve
from dsec_layers.registry.view import open_view, walk

__all__ = ["FORMATS", "Exported", "export"]

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
        for path, entry in walk(open_view(session.store, text)):
            layer, inode = entry.layer, entry.inode
            regular = stat.S_ISREG(inode.mode)
            pieces, regions = (layer.pieces(inode), layer.regions(inode)) if regular else ((), None)
            writer.add(path or b".", inode, pieces, regions, identity=entry.identity, xattrs=entry.xattrs)
            task.advance(inode.size)
    writer.close()


def _export_erofs(session: Session, text: str, stream: Any) -> None:
    with session.progress.task(f"exporting {text}") as task:
        for piece in flat_pieces(session.store, text):
            stream.write(piece)
            task.advance(len(piece))


def _export_oci(session: Session, text: str, output: Path) -> int:
    digest, found = resolve(session.store, text)
    with publish_directory(output) as work:
        writer, workdir = LayoutWriter(work), ""
        env: dict[str, str] = {}
        for number, member in enumerate(members_of(digest, found)):
            config = load_config(session.store, load_layer(session.store, member))
            env |= dict(config.env or {})
            workdir = config.workdir or workdir
            spare = writer.spare(number)
            writer.layer(spare, *_oci_layer(session, member, spare))
        name = text.rpartition(":")[2] if not text.startswith("sha256:") else digest[7:19]
        writer.finish({"Env": [f"{k}={v}" for k, v in env.items()], **({"WorkingDir": workdir} if workdir else {})}, name=name)
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
