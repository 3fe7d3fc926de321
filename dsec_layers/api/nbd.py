"""``nbd serve``: a sealed disk, a writable one, or a layer's or environment's flat EROFS image as a block device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec_layers.api.session import Session
from dsec_layers.disks.attach import export_of
from dsec_layers.disks.place import flat_source, opened, pieces
from dsec_layers.disks.source import MINIMUM_BLOCK, ReadOnlySource
from dsec_layers.disks.state import STATE
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.fuse.nbd import Export, run_captive, serve
from dsec_layers.layers.disk import DiskImage
from dsec_layers.overlaybd import Disk
from dsec_layers.registry.objects import resolve_any

__all__ = ["Serving", "export", "run", "serve_ref"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, its size in bytes, and the URI for clients."""

    what: str
    size: int
    read_only: bool
    uri: str


@contextmanager
def export(session: Session, text: str, *, read_only: bool = False) -> Iterator[Export]:
    """What ``text`` names as an NBD export: the directory of a writable disk, or a sealed disk, layer or environment (those are read-only)."""
    path = Path(text)
    if (path / STATE).exists():
        with opened(session, path.absolute()) as disk:
            yield export_of(disk, read_only=read_only)
        return
    _, found = resolve_any(session.store, text)
    with pieces(session) as opener:
        if isinstance(found, DiskImage):
            with StoredDisk(session.store, found.layers, opener) as stored:
                yield Export(ReadOnlySource(Disk(stored.layers)), description=text, read_only=True, minimum_block=MINIMUM_BLOCK)
            return
        source = flat_source(session, text, opener)
        try:
            yield Export(source, description=text, read_only=True)
        finally:
            source.close()


def serve_ref(
    session: Session,
    text: str,
    *,
    unix: Path | None = None,
    port: int | None = None,
    read_only: bool = False,
    ready: Callable[[Serving], None] = lambda serving: None,
) -> None:
    """Serve what ``text`` names until SIGTERM or SIGINT; for a program's main thread. ``ready`` is told where, once clients can connect."""
    with export(session, text, read_only=read_only) as made:
        serve(
            [made], unix=unix, port=port, progress=session.progress,
            ready=lambda server: ready(Serving(text, made.source.size, made.disk is None, server.uri())),
        )  # fmt: skip


def run(session: Session, text: str, command: Sequence[str], *, read_only: bool = False, environ: Mapping[str, str] | None = None) -> int:
    """Serve what ``text`` names on a private socket while ``command`` runs; its exit code. ``$uri`` and ``$unixsocket`` in it are replaced.

    ``environ``: the command's environment.
    """
    with export(session, text, read_only=read_only) as made:
        return run_captive([made], command, env=environ, progress=session.progress)
