"""``dsec-layers build``."""

from __future__ import annotations

from pathlib import Path

import click

from dsec_layers.cli.common import App, Command, app_options, limit_option, pass_app, show_built
from dsec_layers.cli.settings import source_date_epoch
from dsec_layers.cli.values import parse_limits


@click.command(
    "build",
    cls=Command,
    example="dsec-layers build workspace.toml --name project:3\nSOURCE_DATE_EPOCH=0 dsec-layers build base.toml --json",
)
@click.argument("layerfile", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME:TAG", help="The ref to set; default: the file's own name.")
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Compression threads; default: one a processor. The result does not depend on it."
)
@click.option("--level", type=click.IntRange(1, 19), default=3, show_default=True, help="zstd level: 1 builds fastest, 19 stores least.")
@click.option("--no-cache", is_flag=True, help="Run every step again, even if the step cache has its result.")
@limit_option
@app_options
@pass_app
def command(app: App, layerfile: Path, name: str | None, workers: int | None, level: int, no_cache: bool, limits: tuple[str, ...]) -> None:
    """Build the layer that LAYERFILE (TOML, see docs/layerfile.md) describes, store it and name it."""
    from dsec_layers.api.build import build

    made = build(
        app.session,
        layerfile,
        name=name,
        workers=workers,
        level=level,
        use_cache=not no_cache,
        epoch=source_date_epoch(),
        limits=parse_limits(limits),
    )
    app.console.result(made, lambda: show_built(app, made))
