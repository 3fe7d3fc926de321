"""The reference tool's opinion of a layer: fsck.erofs on its flat view."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsec_layers.digest import Digest
from dsec_layers.errors import LimitError, ToolError
from dsec_layers.layers.frames import MAX_METADATA
from dsec_layers.proc import Completed, describe_failure, find_tool, run
from dsec_layers.progress import Progress
from dsec_layers.registry.objects import load_layer, load_metadata
from dsec_layers.store.base import Store
from dsec_layers.store.transfer import read_pieces

__all__ = ["judge"]

_MOST_DEVICES: Final = 512
"""More --device= options than this have crashed fsck.erofs 1.9.4."""

_STACK: Final = 256 << 20
"""Bytes of stack for fsck.erofs: it recurses by directory, and 8 MiB do not last for 2,000 directories within directories."""


def judge(store: Store, digest: Digest, progress: Progress) -> str | None:
    """What fsck.erofs says against a layer, or None. When there is no tool that can tell, a warning says so.

    The tool looks at structure only, so the segments are holes of their size: their bytes are checked by digest. Older versions (1.5) refuse a flat image that
    has a device table; they get the devices as files instead.
    """
    try:
        fsck = find_tool("fsck.erofs")
    except ToolError as error:
        progress.warning(f"{error.message}: the reference tool's opinion is missing")
        return None
    layer = load_layer(store, digest)
    sizes: list[int] = []
    image: Iterable[bytes]
    if layer.compressed:
        if layer.metadata.size > MAX_METADATA:
            raise LimitError(f"{layer.metadata.digest} has {layer.metadata.size} bytes, the limit of an image is {MAX_METADATA}")
        image = read_pieces(store, layer.metadata.digest, layer.metadata.size)
    else:
        whole, table = load_metadata(store, layer)
        image, sizes = (whole,), [int(size) for size in table["size"]]
    with tempfile.TemporaryDirectory(prefix="dsec-fsck-") as work:
        done = _check(fsck, Path(work), image, sizes)
    if done is None:
        progress.warning(f"this fsck.erofs cannot read an image of {len(sizes)} devices: the reference tool's opinion is missing")
        return None
    return None if done.code == 0 else f"malformed {digest}: {describe_failure(done)}"


def _check(fsck: str, work: Path, image: Iterable[bytes], sizes: list[int]) -> Completed | None:
    flat = work / "flat"
    with open(flat, "wb") as stream:
        stream.writelines(image)
        stream.truncate(stream.tell() + sum(sizes))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
    command = [find_tool("prlimit"), f"--stack={stack}:", fsck]
    done = run([*command, flat], check=False)
    if done.code == 0 or b"extra devices" not in done.stderr:
        return done
    if len(sizes) > _MOST_DEVICES:
        return None
    devices = []
    for index, size in enumerate(sizes):
        device = work / str(index)
        with open(device, "wb") as stream:
            stream.truncate(size)
        devices.append(f"--device={device}")
    return run([*command, *devices, flat], check=False)
