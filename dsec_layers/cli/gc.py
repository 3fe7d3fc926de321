"""``dsec-layers gc``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes


@click.command("gc", cls=Command, example="dsec-layers gc --dry-run\ndsec-layers gc --grace 48")
@click.option("--grace", type=click.FloatRange(0), metavar="HOURS", default=24.0, show_default=True, help="Spare blobs younger than this.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--force", is_flag=True, help="Allow a grace period below an hour; nobody may be building or copying then.")
@app_options
@pass_app
def command(app: App, grace: float, dry_run: bool, force: bool) -> None:
    """Delete blobs that no ref reaches."""
    from dsec_layers.api.environment import gc

    swept = gc(app.session, grace=grace * 3600, dry_run=dry_run, force=force)

    def show() -> None:
        verb = "would delete" if dry_run else "deleted"
        app.console.out(f"{verb} {len(swept.deleted)} blobs, {human_bytes(swept.bytes)}; {swept.young} too young, {swept.kept} in use")

    app.console.result(swept, show)
