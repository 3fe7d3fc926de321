"""Serve a writable disk over NBD, with a control socket for snapshots beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.owner import ControlServer
from dsec_layers.disks.source import MINIMUM_BLOCK, ReadOnlySource, WritableDiskSource
from dsec_layers.fuse.nbd import Export, Server, serve
from dsec_layers.progress import SILENT, Progress

__all__ = ["SOCKET", "export_of", "serve_disk"]

SOCKET: Final = "nbd.sock"


def export_of(disk: LocalDisk, *, read_only: bool = False) -> Export:
    """The disk as an NBD server takes it."""
    source = ReadOnlySource(disk.disk) if read_only else WritableDiskSource(disk.disk)
    return Export(source, description=str(disk.path), read_only=read_only, minimum_block=MINIMUM_BLOCK)


def serve_disk(
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
