"""``dsec-layers import``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, limit_option, pass_app, show_built
from dsec_layers.cli.settings import source_date_epoch
from dsec_layers.cli.values import parse_limits


@click.command(
    "import",
    cls=Command,
    example="dsec-layers import rootfs.tar.zst --kind base --name debian:12\ndocker save img | dsec-layers import - --kind base --name img:1\n"
    "dsec-layers import big.tar.gz --kind base --name big:1 --limit spool=200G --limit entries=40M",
)
@click.argument("source")
@click.option("--kind", required=True, type=click.Choice(["base", "workspace", "toolkit"]), help="What the layer is for.")
@click.option("--name", required=True, metavar="NAME:TAG", help="The ref to set.")
@click.option("--prefix", default="", metavar="DIR", help="A toolkit's own directory, recorded in the layer.")
@click.option(
    "--layout",
    type=click.Choice(["segments", "compressed"]),
    default="segments",
    show_default=True,
    help="How it is stored (docs/formats/layer.md).",
)
@click.option(
    "--exclude", "excludes", multiple=True, metavar="PATTERN", help="Leave out paths that match; may be given again (directories only)."
)
@click.option("--platform", default="linux/amd64", show_default=True, help="Which image of an OCI index.")
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Compression threads; default: one a processor. The result does not depend on it."
)
@click.option("--level", type=click.IntRange(1, 19), default=3, show_default=True, help="zstd level: 1 builds fastest, 19 stores least.")
@limit_option
@app_options
@pass_app
def command(
    app: App,
    source: str,
    kind: str,
    name: str,
    prefix: str,
    layout: str,
    excludes: tuple[str, ...],
    platform: str,
    workers: int | None,
    level: int,
    limits: tuple[str, ...],
) -> None:
    """Import SOURCE as a layer: a directory, a tar (plain, gz, xz, zst; - is standard input), an OCI image layout, or a docker save archive."""
    from dsec_layers.api.build import import_source

    made = import_source(
        app.session,
        source,
        kind=kind,
        name=name,
        prefix=prefix,
        layout=layout,
        excludes=excludes,
        platform=platform,
        workers=workers,
        level=level,
        epoch=source_date_epoch(),
        limits=parse_limits(limits),
    )
    app.console.result(made, lambda: show_built(app, made))
