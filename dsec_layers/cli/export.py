"""``dsec-layers export``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes
from dsec_layers.errors import UsageError


@click.command(
    "export",
    cls=Command,
    example="dsec-layers export dev:1 -o dev.tar\ndsec-layers export debian:12 --format erofs -o debian.erofs\ndsec-layers export dev:1 | tar -t",
)
@click.argument("ref", type=REF)
@click.option("-o", "--output", default="-", metavar="PATH", help="Where to write; - is standard output (not for oci).")
@click.option("--format", "format_", type=click.Choice(["tar", "erofs", "oci"]), default="tar", show_default=True, help="What to write.")
@app_options
@pass_app
def command(app: App, ref: str, output: str, format_: str) -> None:
    """Write REF as a tar, as one flat EROFS image (the kernel mounts it as it is), or as an OCI image layout."""
    from dsec_layers.api.export import export

    if output == "-" and (app.console.as_json or sys.stdout.isatty()):
        raise UsageError("the data would go to the terminal or be mixed with JSON", hint="give -o PATH")
    target = sys.stdout.buffer if output == "-" else Path(output)
    made = export(app.session, ref, target, format=format_)
    if output == "-":
        sys.stdout.buffer.flush()
        return

    def show() -> None:
        app.console.out(f"{made.output}  {human_bytes(made.size)}")

    app.console.result(made, show)
