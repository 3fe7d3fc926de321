"""``dsec-layers rm``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app


@click.command("rm", cls=Command, example="dsec-layers rm dev:1 && dsec-layers gc")
@click.argument("names", metavar="NAME:TAG...", nargs=-1, required=True, type=REF)
@app_options
@pass_app
def command(app: App, names: tuple[str, ...]) -> None:
    """Remove refs. Blobs stay until gc finds that nothing refers to them."""
    from dsec_layers.api.environment import rm_all

    removed = rm_all(app.session, names)

    def show() -> None:
        for item in removed:
            app.console.out(f"removed {item.name}  (was {item.digest[:19]})")

    app.console.result(removed, show)
