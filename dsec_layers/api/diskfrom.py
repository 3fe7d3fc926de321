"""The content of a new disk's file system as a directory: one that is there, an unpacked tar, or a mounted layer or environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec_layers.api.session import Session
from dsec_layers.builders.output.directory import materialize
from dsec_layers.builders.sources.detect import detect
from dsec_layers.errors import HostError
from dsec_layers.registry.objects import resolve

__all__ = ["content"]


@contextmanager
def content(session: Session, source: str | None, beside: Path) -> Iterator[Path | None]:
    """A directory with what ``source`` names, while the context lasts; None for None. What has to be unpacked goes into a temporary directory beside ``beside``."""
    if source is None:
        yield None
    elif Path(source).is_dir():
        yield Path(source)
    elif Path(source).exists():
        with _place(beside) as place:
            _need_root("unpack a tar with its owners")
            root = place / "root"
            root.mkdir()
            materialize(detect(source, spool=place).ingest, root, session.progress)
            yield root
    else:
        digest, _ = resolve(session.store, source)
        with _place(beside) as place:
            _need_root("mount a layer")
            session.host.mount(session.store, digest, place, label=source, driver=session.driver)
            try:
                yield place
            finally:
                session.host.umount(place)


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
