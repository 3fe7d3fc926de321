"""Verbs that make disks of disks: ``disk convert``, ``disk merge``, ``disk resize``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from uuid import UUID

from dsec_layers.api.diskinputs import BlobFile, DiskInput, made_ext4, open_input
from dsec_layers.api.disks import FORMATS, PACKINGS, DiskInfo, Sealed, find_disk, info, pieces, publish_as, store_of
from dsec_layers.api.environment import Verified
from dsec_layers.api.session import Session
from dsec_layers.disks.files import DiskFiles, GenerationReader, check_size
from dsec_layers.disks.source import ReadOnlySource
from dsec_layers.disks.state import read_state
from dsec_layers.disks.stored import StoredDisk, publish_file, publish_layer
from dsec_layers.errors import Conflict, CorruptError, DsecError, ToolError, UsageError
from dsec_layers.fsio import map_os_error, publish, publish_directory, publish_new, pwrite_all
from dsec_layers.fuse.nbd import Export, run_captive
from dsec_layers.layers.disk import DiskLayer
from dsec_layers.ocilayout import LayoutWriter
from dsec_layers.overlaybd import Disk, LsmtLayer, Packing
from dsec_layers.overlaybd import merge as merge_layers
from dsec_layers.overlaybd.config import ImageConfig, LowerConfig, render_config
from dsec_layers.overlaybd.lsmt import NIL_UUID
from dsec_layers.overlaybd.oci import BlobInfo, layer_descriptor
from dsec_layers.registry.verify import verify as verify_object
from dsec_layers.store.base import Store, check_ref
from dsec_layers.store.transfer import read_pieces

__all__ = ["OUTPUTS", "Converted", "convert", "merge", "resize", "seal", "verify"]

OUTPUTS: Final = ("raw", "qcow2", "overlaybd", "oci")
_STEP: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Converted:
    """A file or directory that was written: its format, the disk's size and the bytes it takes."""

    output: str
    format: str
    virtual_size: int
    bytes: int


def resize(path: str | Path, size: int) -> DiskInfo:
    """Give a disk that nobody has open a larger size; what is beyond the old end reads as zeros. UsageError for a smaller one."""
    path = Path(path)
    check_size(size)
    with DiskFiles(path) as files:
        if size < files.state.virtual_size:
            raise UsageError(f"{path} has {files.state.virtual_size} bytes and cannot shrink to {size}", hint="copy it to a smaller one")
        if size > files.state.virtual_size:
            files.begin(virtual_size=size).close()
    return info(path)


def merge(session: Session, text: str, name: str, *, keep: int = 0, format: str = "zfile") -> Sealed:
    """Make one layer of all layers of a sealed disk but the lowest ``keep``, and name the result. It reads the same."""
    name = check_ref(name)
    _check_format(format)
    _, image = find_disk(session.store, text)
    if not 0 <= keep < len(image.layers):
        raise UsageError(f"{text} has {len(image.layers)} layers: at most {len(image.layers) - 1} can be kept")
    with pieces(session) as opener, StoredDisk(session.store, image.layers, opener) as stored:
        kept = image.layers[:keep]
        layer = _pack(session, stored.layers[keep:], kept[-1].uuid if kept else NIL_UUID, format, _fs_type(image.layers))
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
    """Publish the disk that ``source`` names (see diskinputs) as ``name``. Layers that are OverlayBD blobs already stay as they are, unless ``flatten``.

    ``mkfs``: ``ext4`` makes a file system of ``size`` bytes first, and ``source`` names its content: a directory, tar, layer or environment.
    """
    name = check_ref(name)
    _check_format(format)
    if mkfs not in ("", "ext4"):
        raise UsageError(f"no file system {mkfs!r} is made here", hint="ext4 is")
    with made_ext4(session, source, size, epoch=epoch) if mkfs else open_input(session, source) as opened:
        if flatten:
            opened = replace(opened, sources=tuple(None for _ in opened.sources))
        layers = list(_published(session, opened, format, mkfs))
        new = [layer for layer, source_ in zip(layers, _grouped(opened), strict=True) if not isinstance(source_[0], DiskLayer)]
        return publish_as(session, name, layers, opened.size, {"source": Path(source).name, "format": format}, new)


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
        try:
            _WRITERS[to](session, opened, output)
        except OSError as error:
            raise map_os_error(error, str(output)) from error
        return Converted(str(output), to, opened.size, _used(output))


def verify(session: Session, path: str | Path) -> Verified:
    """Check a writable disk: its local generations, and every byte of the sealed disk below it."""
    path = Path(path)
    state = read_state(path)
    problems: list[str] = []
    report = None
    try:
        numbers = (*state.frozen, state.upper)
        try:
            with DiskFiles(path) as files:
                for number in numbers:
                    files.open(number).close()  # cuts off what a crash tore, as every opening does
        except Conflict:
            numbers = state.frozen  # it is attached: the upper is its server's affair
        with GenerationReader(path, numbers):
            pass
    except DsecError as error:
        problems.append(error.message)
    if state.parent is not None:
        report = verify_object(store_of(session, state.parent), state.parent.digest, deep=True, progress=session.progress)
        problems += [str(finding) for finding in report.findings]
    digest = state.parent.digest if state.parent else ""
    return Verified(str(path), digest, report.blobs if report else 0, report.bytes if report else 0, tuple(problems))


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise UsageError(f"unknown layer format {format!r}", hint=f"one of {', '.join(FORMATS)}")


def _grouped(opened: DiskInput) -> Iterator[tuple[DiskLayer | BlobFile | None, list[LsmtLayer]]]:
    """Layers that are something already, one by one, and the others joined with their neighbours of that kind."""
    waiting: list[LsmtLayer] = []
    for layer, source in zip(opened.layers, opened.sources, strict=True):
        if source is None:
            waiting.append(layer)
            continue
        if waiting:
            yield None, waiting
            waiting = []
        yield source, [layer]
    if waiting:
        yield None, waiting


def _published(session: Session, opened: DiskInput, format: str, fs_type: str = "") -> Iterator[DiskLayer]:
    below = NIL_UUID
    groups = list(_grouped(opened))
    for number, (source, layers) in enumerate(groups):
        if number == len(groups) - 1 and source is None:
            layers = [*layers[:-1], replace(layers[-1], header=replace(layers[-1].header, virtual_size=opened.size))]
        if isinstance(source, DiskLayer):
            made = source
        elif isinstance(source, BlobFile) and layers[0].nesting[0] == "tar":
            made = _publish_blob(session.store, source, layers[0].header.uuid)
        else:
            made = _pack(session, layers, below, format, source.fs_type if source else fs_type)
        below = made.uuid
        yield made


def _publish_blob(store: Store, blob: BlobFile, uuid: str) -> DiskLayer:
    with open(blob.path, "rb") as stream:
        layer = publish_file(store, stream, uuid=uuid, fs_type=blob.fs_type)
    if blob.digest is not None and layer.blob.digest != blob.digest:
        raise CorruptError(f"{blob.path} has digest {layer.blob.digest}, not {blob.digest}")
    return layer


def _pack(session: Session, layers: Sequence[LsmtLayer], parent: str, format: str, fs_type: str) -> DiskLayer:
    """Its UUID follows from what is in it, as far as that is known before it is read: the same input gives the same blob."""
    state = hashlib.sha256(parent.encode())
    for layer in layers:
        for column in (layer.segments.lba, layer.segments.end, layer.segments.moffset, layer.segments.zeroed):
            state.update(column.tobytes())
    uuid = str(UUID(bytes=state.digest()[:16])).upper()
    session.cache.mkdir(parents=True, exist_ok=True)
    packing = Packing(uuid, parent, zfile=PACKINGS[format], tar=True)
    writes = merge_layers(layers, packing)
    return publish_layer(session.store, writes, spool=session.cache, uuid=uuid, fs_type=fs_type, progress=session.progress)


def _fs_type(layers: Sequence[DiskLayer]) -> str:
    return next(
        (kind for layer in reversed(layers) if (kind := layer.blob.annotations.get("containerd.io/snapshot/overlaybd/blob-fs-type"))), ""
    )


def _write_raw(session: Session, opened: DiskInput, output: Path) -> None:
    disk = Disk(_sized(opened))
    with publish(output, replace=False) as stream, session.progress.task(f"writing {output.name}", total=disk.size) as task:
        os.ftruncate(stream.fileno(), disk.size)
        for extent in disk.extents(0, disk.size):
            for at in range(extent.offset, extent.offset + extent.length, _STEP) if extent.kind == "data" else ():
                pwrite_all(stream.fileno(), disk.pread(at, min(_STEP, extent.offset + extent.length - at)), at)
            task.advance(extent.length)


def _write_qcow2(session: Session, opened: DiskInput, output: Path) -> None:
    source = ReadOnlySource(Disk(_sized(opened)))
    with publish_new(output) as work:
        command = ["qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", "-W", "-m", "8", "$uri", str(work)]
        code = run_captive([Export(source, read_only=True, minimum_block=512)], command, progress=session.progress)
        if code != 0:
            raise ToolError(f"qemu-img convert failed with exit code {code}; it has said why")


def _write_overlaybd(session: Session, opened: DiskInput, output: Path) -> None:
    with publish_directory(output) as work:
        lowers = []
        for number, blob in enumerate(_blobs(session, opened, work)):
            folder = work / f"layer-{number}"
            folder.mkdir()
            blob.path.rename(folder / "overlaybd.commit")
            lowers.append(LowerConfig(file=str(output.absolute() / folder.name / "overlaybd.commit")))
        config = ImageConfig(lowers=tuple(lowers), result_file=str(output.absolute() / "result"))
        (work / "config.v1.json").write_bytes(render_config(config))


def _write_oci(session: Session, opened: DiskInput, output: Path) -> None:
    with publish_directory(output) as work:
        writer = LayoutWriter(work)
        for blob in _blobs(session, opened, work):
            assert blob.digest is not None
            size = blob.path.stat().st_size
            writer.layer(blob.path, layer_descriptor(BlobInfo(blob.digest, size, fs_type=blob.fs_type)), blob.digest)
        writer.finish({})


def _blobs(session: Session, opened: DiskInput, work: Path) -> Iterator[BlobFile]:
    """The layers as files in ``work``, tar-wrapped, from bottom to top; what is no layer of the store yet is packed into it."""
    for number, layer in enumerate(_published(session, opened, "zfile")):
        path = work / f"blob-{number}"
        with open(path, "wb") as stream:
            stream.writelines(read_pieces(session.store, layer.blob.digest, layer.blob.size))
        yield BlobFile(path, layer.blob.digest, _fs_type([layer]))


def _sized(opened: DiskInput) -> list[LsmtLayer]:
    *lower, top = opened.layers
    return [*lower, replace(top, header=replace(top.header, virtual_size=opened.size))]


def _used(output: Path) -> int:
    files = [output] if output.is_file() else [item for item in output.rglob("*") if item.is_file()]
    return sum(item.stat().st_blocks * 512 for item in files)


_WRITERS: Final = {"raw": _write_raw, "qcow2": _write_qcow2, "overlaybd": _write_overlaybd, "oci": _write_oci}
