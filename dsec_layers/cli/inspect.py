"""``dsec-layers inspect``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes, visible


@click.command("inspect", cls=Command, example="dsec-layers inspect debian:12\ndsec-layers inspect dev:1 --tree --depth 3")
@click.argument("ref", type=REF)
@click.option("--tree", is_flag=True, help="List paths with their sizes (directories: the sum below).")
@click.option("--depth", default=2, show_default=True, type=click.IntRange(0, 4096), help="How deep the tree goes.")
@app_options
@pass_app
def command(app: App, ref: str, tree: bool, depth: int) -> None:
    """Show a layer, environment or disk REF (name:tag or digest), its blobs, and with --tree its paths; of a blob its size, role and users."""
    from dsec_layers.api.look import inspect

    found = inspect(app.session, ref, tree=tree, depth=depth)

    def show() -> None:
        out = app.console.out
        out(f"{found.ref}: {found.type}, {found.digest}")
        out(f"image {human_bytes(found.image_bytes)}, stored {human_bytes(found.stored_bytes)}")
        _show_config(app, found.config)
        for layer in found.layers:
            out()
            out(f"{layer.kind} {layer.name}  {layer.digest}")
            details = [f"layout {layer.layout}"] + [f"{key} {value}" for key, value in sorted(layer.counts.items())]
            out("  " + ", ".join(details))
            for key, value in layer.env.items():
                out(f"  env {visible(key)}={visible(value)}")
            for blob in layer.blobs:
                out(f"  {blob.role:<9}{blob.digest}  {human_bytes(blob.size):>10}{'  (of another layer)' if blob.foreign else ''}")
        if found.tree:
            out()
            cells = [(entry.mode, f"{entry.uid}:{entry.gid}", entry.type, human_bytes(entry.bytes), entry.path) for entry in found.tree]
            app.console.table(("mode", "owner", "type", "size", "path"), cells, right=(3,))

    app.console.result(found, show)


def _show_config(app: App, config: Mapping[str, Any]) -> None:
    """What the layers say together of how they are run and made."""
    if not config:
        return
    platform = "/".join(config[key] for key in ("os", "architecture", "variant") if config.get(key))
    rows = {"platform": platform, **{key: config.get(key) for key in ("created", "author")}, **config.get("config", {})}
    for key, value in rows.items():
        if value:
            app.console.out(
                f"  {key} {visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True))}"
            )
    for step in config.get("history", []):
        app.console.out(f"  history {visible(str(step.get('created_by') or step.get('comment') or '-'))}")
