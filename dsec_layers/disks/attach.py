"""Serve a writable disk over NBD, with a control socket for snapshots beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.owner import ControlServer
from dsec_layers.disks.place import Place, flat_source, opened, pieces
from dsec_layers.disks.source import MINIMUM_BLOCK, ReadOnlySource, WritableDiskSource
from dsec_layers.disks.state import STATE
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.fuse.nbd import Export, Server, serve
from dsec_layers.layers.disk import DiskImage
from dsec_layers.overlaybd import Disk
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.objects import resolve_any

__all__ = ["SOCKET", "Attached", "attach", "export_of", "open_export"]

SOCKET: Final = "nbd.sock"


@dataclass(frozen=True, slots=True)
class Attached:
    """A disk that is served, and what was wrong with it before (empty: nothing)."""

    path: str
    uri: str
    recovered: str


def attach(
    place: Place,
    path: str | Path,
    *,
    unix: Path | None = None,
    port: int | None = None,
    read_only: bool = False,
    ready: Callable[[Attached], None] = lambda attached: None,
) -> None:
    """Serve a writable disk over NBD until SIGTERM, SIGINT or ``detach``; for a program's main thread. ``ready`` is told where, once clients can connect.

    Listens on ``unix`` (default: ``nbd.sock`` in the disk's directory), or on the loopback's ``port``.
    """
    path = Path(path).absolute()
    with opened(place, path) as disk:
        if disk.recovered:
            place.progress.warning(f"{path}: {disk.recovered}: cut off; nothing that was flushed is lost")
        chosen = unix if unix or port is not None else path / SOCKET
        _serve(
            disk, unix=chosen, port=port, read_only=read_only, progress=place.progress,
            ready=lambda uri: ready(Attached(str(path), uri, disk.recovered)),
        )  # fmt: skip


def export_of(disk: LocalDisk, *, read_only: bool = False) -> Export:
    """The disk as an NBD server takes it."""
    source = ReadOnlySource(disk.disk) if read_only else WritableDiskSource(disk.disk)
    return Export(source, description=str(disk.path), read_only=read_only, minimum_block=MINIMUM_BLOCK)


@contextmanager
def open_export(place: Place, text: str, *, read_only: bool = False) -> Iterator[Export]:
    """What ``text`` names as an NBD export: the directory of a writable disk, or a sealed disk, layer or environment (those are read-only)."""
    path = Path(text)
    if (path / STATE).exists():
        with opened(place, path.absolute()) as disk:
            yield export_of(disk, read_only=read_only)
        return
    _, found = resolve_any(place.store, text)
    with pieces(place) as opener:
        if isinstance(found, DiskImage):
            with StoredDisk(place.store, found.layers, opener) as stored:
                yield Export(ReadOnlySource(Disk(stored.layers)), description=text, read_only=True, minimum_block=MINIMUM_BLOCK)
            return
        source = flat_source(place, text, opener)
        try:
            yield Export(source, description=text, read_only=True)
        finally:
            source.close()


def _serve(
    disk: LocalDisk,
    *,
    unix: Path | None = None,
    port: int | None = None,
    read_only: bool = False,
    progress: Progress = SILENT,
    ready: Callable[[str], None] = lambda uri: None,
) -> bool:
    """Serve an open disk until SIGTERM, SIGINT or a client's ``stop``; for the main thread of a program. ``ready`` is told the URI.

    Whether no connection had to be cut. The disk stays the caller's to close.
    """
    controls: list[ControlServer] = []

    def started(server: Server) -> None:
        def status() -> dict[str, Any]:
            state = disk.state.to_value()
            return {"pid": os.getpid(), "uri": server.uri(), "connections": server.connections, "state": state, "recovered": disk.recovered}

        controls.append(ControlServer(disk, status, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        ready(server.uri())

    try:
        return serve([export_of(disk, read_only=read_only)], unix=unix, port=port, progress=progress, ready=started)
    finally:
        for server in controls:
            server.close()
