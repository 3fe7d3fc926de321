"""``dsec-layers dump``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app
from dsec_layers.cli.console import visible


@click.command(
    "dump",
    cls=Command,
    example="dsec-layers dump debian:12\ndsec-layers dump layer.tar --kind zfile\ndiff <(dsec-layers dump a.erofs) <(dsec-layers dump b.erofs)",
)
@click.argument("what", metavar="FILE|REF|DIGEST", type=REF)
@click.option(
    "--kind",
    type=click.Choice(["auto", "erofs", "lsmt", "zfile"]),
    default="auto",
    show_default=True,
    help="What to look for in the bytes.",
)
@click.option(
    "--max-lines", default=1_000_000, show_default=True, type=click.IntRange(1), metavar="N", help="Stop with an error after N lines."
)
@app_options
@pass_app
def command(app: App, what: str, kind: str, max_lines: int) -> None:
    """Dump a file, a blob of the store, or the metadata of layer REF, field by field: EROFS images, OverlayBD layers (LSMT) and ZFiles.

    Each line is OFFSET+SIZE and one fact, in a fixed order, so that the diff of two dumps shows what differs. Bytes that are not well-formed end it with
    exit code 12, after the lines of what comes before.
    """
    from dsec_layers.api.dump import dump

    with dump(app.session, what, kind=kind, max_lines=max_lines) as found:
        if app.console.as_json:
            value = {"name": found.name, "kind": found.kind, "size": found.size, "lines": list(found.lines)}
            app.console.result(value, lambda: None)
            return
        for line in found.lines:
            app.console.out(visible(line))
