"""The ``compressed`` layout: one flat EROFS-compressed image, made by ``mkfs.erofs`` and fetched whole (ADR 0013).

mkfs.erofs reads a directory. It gets the input as a mount: content and metadata are packed into two scratch files, which are an EROFS image of one
device; a child process mounts that in a mount namespace of its own and runs the tool there. So ownership, devices, extended attributes and hard links
come through whatever the source was, nothing is extracted, and no mount outlives the child. The price: it needs root and Linux >= 6.12.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

import dsec_layers
from dsec_layers import proc
from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.pack.build import Build, PackResult
from dsec_layers.builders.pack.output import SegmentBuffer
from dsec_layers.builders.pack.sink import PackSink
from dsec_layers.digest import content_digest
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import BLOCK, Tree
from dsec_layers.erofs.verify import compare
from dsec_layers.erofs.writer import render
from dsec_layers.errors import CorruptError, HostError, LimitError, ToolError
from dsec_layers.fsio import map_os_error
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.frames import MAX_METADATA
from dsec_layers.layers.manifest import Layer
from dsec_layers.progress import Progress
from dsec_layers.registry.objects import publish_object, put_blob
from dsec_layers.store.transfer import PIECE, put_stream

__all__ = ["OLDEST_MKFS", "pack_compressed"]

OLDEST_MKFS: Final = (1, 5)
"""Debian 12's. Older ones wrote images that read back wrong (images are compared with their source before they are published, whatever the version)."""

_COMPRESSION: Final = ("-zlz4hc,9", "-C65536")
"""Every kernel that has EROFS with compression reads LZ4, and every mkfs.erofs from 1.5 on writes it."""

_CHILD: Final = "dsec_layers.builders.pack.compressed_child"


class _FileOutput:
    """Segments one after another in a file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._free: list[SegmentBuffer] = []

    def acquire(self, capacity: int) -> SegmentBuffer:
        """A buffer of at least ``capacity`` bytes."""
        buffer = self._free.pop() if self._free else SegmentBuffer(capacity)
        return buffer if len(buffer.view) >= capacity else SegmentBuffer(capacity)

    def submit(self, buffer: SegmentBuffer, size: int) -> None:
        """Write the next segment."""
        self._stream.write(buffer.view[:size])
        self._free.append(buffer)


def pack_compressed(build: Build, ingest: Callable[[ContentSink, Progress], Tree]) -> PackResult:
    """Pack what ``ingest`` reads into one compressed image and publish it. Raises HostError without root, ToolError for a missing, old or failing tool."""
    mkfs = _find_mkfs()
    try:
        with tempfile.TemporaryDirectory(prefix="dsec-compressed-") as directory:
            return _pack(build, ingest, mkfs, Path(directory))
    except OSError as error:
        raise map_os_error(error, f"scratch files in {tempfile.gettempdir()}") from error


def _find_mkfs() -> str:
    if os.geteuid() != 0:
        raise HostError(
            "the compressed layout needs root: mkfs.erofs reads the input from a mount", hint="use --layout segments, which needs none"
        )
    path = proc.find_tool("mkfs.erofs")
    found = proc.tool_version(path)
    if found < OLDEST_MKFS:
        wanted = ".".join(map(str, OLDEST_MKFS))
        raise ToolError(
            f"{path} is version {'.'.join(map(str, found)) or 'unknown'}; the compressed layout needs {wanted}",
            hint="install a newer erofs-utils",
        )
    return path


def _pack(build: Build, ingest: Callable[[ContentSink, Progress], Tree], mkfs: str, work: Path) -> PackResult:
    data, metadata, image, point, other = (work / name for name in ("data", "metadata", "image", "source", "copy"))
    with build.stage("read"), open(data, "wb", buffering=0) as stream:
        sink = PackSink(_FileOutput(stream))
        tree = ingest(sink, build.progress)
        sink.finish()
    build.clamp(tree)
    with build.stage("metadata"):
        source = _scratch_image(tree, sink, data, metadata)
    point.mkdir()
    other.mkdir()
    with build.stage("mkfs"):
        # mkfs.erofs gives later modification times, and equal ones, this time.
        after = max(0, *(inode.mtime + 1 for _, inode in tree.walk()))
        name = uuid.UUID(bytes=content_digest(source)[:16])
        _run("mkfs", metadata, data, point, mkfs, "--quiet", *_COMPRESSION, f"-U{name}", image, point, epoch=after)
    with build.stage("verify"):
        proc.run([proc.find_tool("fsck.erofs"), image])
        done = _run("compare", metadata, data, point, image, other, check=False)
        if done.code != 0:
            raise CorruptError(f"the image that {mkfs} made differs from its source: {done.stderr[-500:].decode(errors='replace').strip()}")
    with build.stage("publish"):
        size = image.stat().st_size
        if size > MAX_METADATA:
            raise LimitError(f"a compressed image of {size} bytes; the limit is {MAX_METADATA}", hint="use --layout segments")
        info = put_stream(build.store, _pieces(image))
        inodes = Image(source).superblock.inos
        config = put_blob(build.store, d.CONFIG, build.config_blob(inodes, sink.sums.total))
        layer = Layer(build.config.kind, config, Descriptor(d.EROFS, info.digest, info.size))
        digest = publish_object(build.store, layer)
    return PackResult.of(build, sink.sums, digest, layer, inodes=inodes)


def _scratch_image(tree: Tree, sink: PackSink, data: Path, metadata: Path) -> bytes:
    """Write the metadata of an EROFS image whose only device is the data file."""
    sizes = np.array(sink.sizes, np.int64) // BLOCK
    start = np.concatenate(([0], np.cumsum(sizes) - sizes)).astype(np.uint64)  # by device number; device 0 is holes
    extents = np.array(sink.numbered({}), np.uint64)
    device = extents >> np.uint64(32)
    tree.extents = type(tree.extents)(
        "Q", (np.where(device > 0, np.uint64(1 << 32), device) + (extents & np.uint64(0xFFFFFFFF)) + start[device]).tobytes()
    )
    devices = [int(sizes.sum())] if len(sizes) else []
    source = render(tree, devices)
    compare(tree, source, devices)
    metadata.write_bytes(source)
    if not devices:
        data.unlink()
    return source


def _run(*arguments: str | os.PathLike[str], epoch: int = 0, check: bool = True) -> proc.Completed:
    """Run the child in a mount namespace of its own. ``epoch``: what mkfs.erofs takes for now, so that it does not look at the clock."""
    paths = {"PYTHONPATH": str(Path(dsec_layers.__file__).parents[1]), "SOURCE_DATE_EPOCH": str(epoch)}
    argv = [proc.find_tool("unshare"), "--mount", sys.executable, "-m", _CHILD, *arguments]
    return proc.run(argv, env=proc.clean_environment(paths), check=check)


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as stream:
        while piece := stream.read(PIECE):
            yield piece
