"""``dsec-layers mount``."""

from __future__ import annotations

from pathlib import Path

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app


@click.command("mount", cls=Command, example="dsec-layers mount dev:1 /mnt/dev\ndsec-layers umount /mnt/dev")
@click.argument("ref", type=REF)
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--driver",
    type=click.Choice(["fanotify", "fuse"]),
    help="The on-demand driver. [env: DSEC_DRIVER; default: fanotify where it works, else fuse]",
)
@app_options
@pass_app
def command(app: App, ref: str, target: Path, driver: str | None) -> None:
    """Mount REF (a layer or environment) read-only on the directory TARGET. Only metadata is transferred; data comes when it is read."""
    from dsec_layers.api.mounts import mount

    made = mount(app.session, ref, target, driver=driver)
    app.console.result(made, lambda: app.console.out(f"{ref} on {made.target}"))
