"""An input as a directory: one that is there, an unpacked tar, or a mounted layer or environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dsec_layers.builders.output.directory import materialize
from dsec_layers.builders.sources.detect import detect
from dsec_layers.digest import Digest
from dsec_layers.errors import HostError
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.objects import resolve
from dsec_layers.store.base import Store

__all__ = ["unpacked"]


@contextmanager
def unpacked(
    store: Store,
    source: str,
    beside: Path,
    mounted: Callable[[Digest, Path, str], AbstractContextManager[None]],
    progress: Progress = SILENT,
) -> Iterator[Path]:
    """A directory with what ``source`` names, while the context lasts. What has to be unpacked goes into a temporary directory beside ``beside``.

    ``mounted`` mounts a layer or environment on a directory, as the name that is its third argument. The last two kinds of input need root.
    """
    if Path(source).is_dir():
        yield Path(source)
    elif Path(source).exists():
        with _place(beside) as place:
            _need_root("unpack a tar with its owners")
            root = place / "root"
            root.mkdir()
            materialize(detect(source, spool=place).ingest, root, progress)
            yield root
    else:
        digest, _ = resolve(store, source)
        with _place(beside) as place:
            _need_root("mount a layer")
            with mounted(digest, place, source):
                yield place


@contextmanager
def _place(beside: Path) -> Iterator[Path]:
    beside.absolute().parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", dir=beside.absolute().parent))
    try:
        yield place
    finally:
        if not os.path.ismount(place):  # a mount that could not be undone: nothing below it is ours
            shutil.rmtree(place, ignore_errors=True)


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise HostError(f"only root can {what}", hint="give a directory")
