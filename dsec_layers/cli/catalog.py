"""``dsec-layers catalog rebuild``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app


@click.group("catalog", short_help="Rebuild the chunk catalog.")
def command() -> None:
    """The catalog is an index of stored chunks, used by builds to store nothing twice. It can be rebuilt at any time."""


@command.command("rebuild", cls=Command, example="dsec-layers catalog rebuild")
@app_options
@pass_app
def rebuild(app: App) -> None:
    """Make the catalog anew from the store."""
    from dsec_layers.api.catalog import catalog_rebuild

    made = catalog_rebuild(app.session)
    app.console.result(made, lambda: app.console.out(str(made)))
