"""``dsec-layers ps``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app


@click.command("ps", cls=Command, example="dsec-layers ps")
@app_options
@pass_app
def command(app: App) -> None:
    """Show mounts: what is mounted where, by which driver, since when."""
    from dsec_layers.api.mounts import ps

    rows = ps(app.session)

    def show() -> None:
        app.console.table(
            ("target", "ref", "digest", "driver", "layers"), [(r.target, r.label, r.digest[7:19], r.driver, len(r.layers)) for r in rows]
        )

    app.console.result(rows, show)
