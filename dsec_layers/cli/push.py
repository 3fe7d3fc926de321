"""``dsec-layers push``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app, show_copied


@click.command("push", cls=Command, example="dsec-layers push dev:1 --to /mnt/other-cluster/layers")
@click.argument("ref", type=REF)
@click.option("--to", "other", required=True, metavar="URL", help="The other store.")
@click.option("--as", "name", metavar="NAME:TAG", help="The name to give it; default: its own.")
@app_options
@pass_app
def command(app: App, ref: str, other: str, name: str | None) -> None:
    """Copy REF and all it needs to another store; blobs that are there already are not moved again."""
    from dsec_layers.api.environment import push

    copied = push(app.session, ref, other, name=name)
    app.console.result(copied, lambda: show_copied(app, copied))
