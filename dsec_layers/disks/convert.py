"""From a disk of any kind to layers of a store, or to a file or directory of another format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec_layers.disks.inputs import BlobFile, DiskInput
from dsec_layers.disks.place import Place
from dsec_layers.disks.sealing import fs_type_of, pack
from dsec_layers.disks.source import ReadOnlySource
from dsec_layers.disks.stored import publish_file
from dsec_layers.errors import CorruptError, ToolError
from dsec_layers.fsio import map_os_error, publish, publish_directory, publish_new, pwrite_all
from dsec_layers.fuse.nbd import Export, run_captive
from dsec_layers.layers.disk import DiskLayer
from dsec_layers.ocilayout import LayoutWriter
from dsec_layers.overlaybd import Disk, LsmtLayer
from dsec_layers.overlaybd.config import ImageConfig, LowerConfig, render_config
from dsec_layers.overlaybd.lsmt import NIL_UUID
from dsec_layers.overlaybd.oci import BlobInfo, layer_descriptor
from dsec_layers.store.base import Store
from dsec_layers.store.transfer import read_pieces

__all__ = ["OUTPUTS", "publish_input", "write_disk"]

_STEP: Final = 4 << 20


def write_disk(place: Place, opened: DiskInput, output: Path, to: str) -> int:
    """Write a disk to ``output``, which must not exist, in one of the formats OUTPUTS; the bytes it takes there."""
    try:
        _WRITERS[to](place, opened, output)
    except OSError as error:
        raise map_os_error(error, str(output)) from error
    return _used(output)


def publish_input(place: Place, opened: DiskInput, format: str, fs_type: str = "") -> Iterator[tuple[DiskLayer, bool]]:
    """Its layers in this place's store, from bottom to top, each with whether it was put there for this."""
    below = NIL_UUID
    groups = list(_grouped(opened))
    for number, (source, layers) in enumerate(groups):
        if number == len(groups) - 1 and source is None:
            layers = [*layers[:-1], replace(layers[-1], header=replace(layers[-1].header, virtual_size=opened.size))]
        if isinstance(source, DiskLayer):
            made = source
        elif isinstance(source, BlobFile) and layers[0].nesting[0] == "tar":
            made = _publish_blob(place.store, source, layers[0].header.uuid)
        else:
            made = pack(place, layers, below, format, source.fs_type if source else fs_type)
        below = made.uuid
        yield made, made is not source


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


def _publish_blob(store: Store, blob: BlobFile, uuid: str) -> DiskLayer:
    with open(blob.path, "rb") as stream:
        layer = publish_file(store, stream, uuid=uuid, fs_type=blob.fs_type)
    if blob.digest is not None and layer.blob.digest != blob.digest:
        raise CorruptError(f"{blob.path} has digest {layer.blob.digest}, not {blob.digest}")
    return layer


def _write_raw(place: Place, opened: DiskInput, output: Path) -> None:
    disk = Disk(_sized(opened))
    with publish(output, replace=False) as stream, place.progress.task(f"writing {output.name}", total=disk.size) as task:
        os.ftruncate(stream.fileno(), disk.size)
        for extent in disk.extents(0, disk.size):
            for at in range(extent.offset, extent.offset + extent.length, _STEP) if extent.kind == "data" else ():
                pwrite_all(stream.fileno(), disk.pread(at, min(_STEP, extent.offset + extent.length - at)), at)
            task.advance(extent.length)


def _write_qcow2(place: Place, opened: DiskInput, output: Path) -> None:
    source = ReadOnlySource(Disk(_sized(opened)))
    with publish_new(output) as work:
        command = ["qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", "-W", "-m", "8", "$uri", str(work)]
        code = run_captive([Export(source, read_only=True, minimum_block=512)], command, progress=place.progress)
        if code != 0:
            raise ToolError(f"qemu-img convert failed with exit code {code}; it has said why")


def _write_overlaybd(place: Place, opened: DiskInput, output: Path) -> None:
    with publish_directory(output) as work:
        lowers = []
        for number, blob in enumerate(_blobs(place, opened, work)):
            folder = work / f"layer-{number}"
            folder.mkdir()
            blob.path.rename(folder / "overlaybd.commit")
            lowers.append(LowerConfig(file=str(output.absolute() / folder.name / "overlaybd.commit")))
        config = ImageConfig(lowers=tuple(lowers), result_file=str(output.absolute() / "result"))
        (work / "config.v1.json").write_bytes(render_config(config))


def _write_oci(place: Place, opened: DiskInput, output: Path) -> None:
    with publish_directory(output) as work:
        writer = LayoutWriter(work)
        for blob in _blobs(place, opened, work):
            assert blob.digest is not None
            size = blob.path.stat().st_size
            writer.layer(blob.path, layer_descriptor(BlobInfo(blob.digest, size, fs_type=blob.fs_type)), blob.digest)
        writer.finish({})


def _blobs(place: Place, opened: DiskInput, work: Path) -> Iterator[BlobFile]:
    """The layers as files in ``work``, tar-wrapped, from bottom to top; what is no layer of the store yet is packed into it."""
    for number, (layer, _) in enumerate(publish_input(place, opened, "zfile")):
        path = work / f"blob-{number}"
        with open(path, "wb") as stream:
            stream.writelines(read_pieces(place.store, layer.blob.digest, layer.blob.size))
        yield BlobFile(path, layer.blob.digest, fs_type_of([layer]))


def _sized(opened: DiskInput) -> list[LsmtLayer]:
    *lower, top = opened.layers
    return [*lower, replace(top, header=replace(top.header, virtual_size=opened.size))]


def _used(output: Path) -> int:
    files = [output] if output.is_file() else [item for item in output.rglob("*") if item.is_file()]
    return sum(item.stat().st_blocks * 512 for item in files)


_WRITERS: Final = {"raw": _write_raw, "qcow2": _write_qcow2, "overlaybd": _write_overlaybd, "oci": _write_oci}

OUTPUTS: Final = tuple(_WRITERS)
