"""``dsec-layers diff``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes, visible

_SIGNS = {"added": "A", "removed": "D", "content": "M", "attributes": "a", "type": "T"}


@click.command("diff", cls=Command, example="dsec-layers diff debian:12 debian:12-patched")
@click.argument("left", type=REF)
@click.argument("right", type=REF)
@click.option("--stat", is_flag=True, help="Only the counts.")
@app_options
@pass_app
def command(app: App, left: str, right: str, stat: bool) -> None:
    """Compare two layers or environments as they show when mounted.

    Letters: A added, D removed, M content differs, T type differs, a only attributes differ.
    """
    from dsec_layers.api.look import diff

    found = diff(app.session, left, right)

    def show() -> None:
        for change in () if stat else found.changes:
            sizes = (
                f"{human_bytes(change.before)} -> {human_bytes(change.after)}"
                if change.before != change.after
                else human_bytes(change.after)
            )
            app.console.out(f"{_SIGNS[change.change]}  {visible(change.path)}  ({sizes})")
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(found.files.items())) or "no difference"
        app.console.out(f"{counts}; +{human_bytes(found.bytes_added)} -{human_bytes(found.bytes_removed)}")

    app.console.result(found, show)
