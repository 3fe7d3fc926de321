"""``dsec-layers umount``."""

from __future__ import annotations

from pathlib import Path

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app


@click.command("umount", cls=Command, example="dsec-layers umount /mnt/dev")
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--lazy", is_flag=True, help="Take it out of sight at once; it ends with its last user.")
@app_options
@pass_app
def command(app: App, targets: tuple[Path, ...], lazy: bool) -> None:
    """Unmount what mount mounted. Layers that nothing uses any more are unmounted as well; their data stays in the cache."""
    from dsec_layers.api.mounts import umount

    done = [umount(app.session, target, lazy=lazy) for target in targets]
    app.console.result(done, lambda: app.console.out("\n".join(f"unmounted {item}" for item in done)))
