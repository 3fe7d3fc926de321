"""``nbd serve``: a sealed disk, a writable one, or a layer's or environment's flat EROFS image as a block device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec_layers.api.session import Session
from dsec_layers.disks.attach import open_export
from dsec_layers.fuse.nbd import run_captive, serve

__all__ = ["Serving", "run", "serve_ref"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, its size in bytes, and the URI for clients."""

    what: str
    size: int
    read_only: bool
    uri: str


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
    with open_export(session, text, read_only=read_only) as made:
        serve(
            [made], unix=unix, port=port, progress=session.progress,
            ready=lambda server: ready(Serving(text, made.source.size, made.disk is None, server.uri())),
        )  # fmt: skip


def run(session: Session, text: str, command: Sequence[str], *, read_only: bool = False, environ: Mapping[str, str] | None = None) -> int:
    """Serve what ``text`` names on a private socket while ``command`` runs; its exit code. ``$uri`` and ``$unixsocket`` in it are replaced.

    ``environ``: the command's environment.
    """
    with open_export(session, text, read_only=read_only) as made:
        return run_captive([made], command, env=environ, progress=session.progress)
