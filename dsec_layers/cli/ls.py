"""``dsec-layers ls``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes


@click.command("ls", cls=Command, example="dsec-layers ls\ndsec-layers ls debian --json")
@click.argument("prefix", default="")
@app_options
@pass_app
def command(app: App, prefix: str) -> None:
    """List layers and environments, all or those whose name begins with PREFIX."""
    from dsec_layers.api.look import ls

    rows = ls(app.session, prefix)

    def show() -> None:
        cells = [(row.name, row.kind, row.digest[7:19], human_bytes(row.image_bytes), human_bytes(row.stored_bytes)) for row in rows]
        app.console.table(("name", "kind", "digest", "image", "stored"), cells, right=(3, 4))

    app.console.result(rows, show)
