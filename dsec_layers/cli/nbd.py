"""``dsec-layers nbd serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsec_layers.cli.common import REF, App, CommandLine, app_options, pass_app
from dsec_layers.errors import UsageError

if TYPE_CHECKING:
    from dsec_layers.api.nbd import Serving


@click.group("nbd", short_help="Serve disks and images over NBD.")
def command() -> None:
    """Serve disks and images as block devices over NBD."""


@command.command(
    "serve",
    cls=CommandLine,
    example="dsec-layers nbd serve --socket /run/debian.sock debian:12\ndsec-layers nbd serve --run disk:1 -- nbdcopy '$uri' disk.raw",
)
@click.option("--socket", type=click.Path(path_type=Path), metavar="PATH", help="Listen on this Unix socket.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Listen on this port of the loopback; 0: any.")
@click.option("--read-only", is_flag=True, help="Refuse writes to a writable disk.")
@click.option("--run", "captive", is_flag=True, help="Serve on a private socket, run CMD, stop; the exit code is CMD's.")
@click.argument("what", metavar="REF|DISK", type=REF)
@click.argument("argv", metavar="[--] [CMD...]", nargs=-1, type=click.UNPROCESSED)
@app_options
@pass_app
def serve(app: App, socket: Path | None, port: int | None, read_only: bool, captive: bool, what: str, argv: tuple[str, ...]) -> int:
    """Serve a disk, or the flat EROFS image of a layer or environment, as a block device.

    DISK is the directory of a writable disk (disk create); a REF is read-only, and only what is read is fetched. In CMD, $uri and $unixsocket stand for the server.
    """
    from dsec_layers.api.nbd import run, serve_ref

    if captive != bool(argv) or captive + (socket is not None) + (port is not None) != 1:
        raise UsageError("give one of --socket PATH, --port N, or --run with a command", hint="dsec-layers nbd serve --run REF -- CMD...")
    if captive:
        return run(app.session, what, argv, read_only=read_only, environ=os.environ)

    def ready(serving: Serving) -> None:
        app.console.result(serving, lambda: app.console.out(serving.uri))

    serve_ref(app.session, what, unix=socket, port=port, read_only=read_only, ready=ready)
    return 0
