"""``dsec-layers verify``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app
from dsec_layers.errors import CorruptError


@click.command(
    "verify",
    cls=Command,
    example="dsec-layers verify\ndsec-layers verify dev:1 --deep\ndsec-layers verify --deep --repair /mnt/other-cluster/layers",
)
@click.argument("refs", metavar="[REF]...", nargs=-1, type=REF)
@click.option(
    "--deep", is_flag=True, help="Read every blob: digests of blobs, segments and chunks, the metadata by our reader and by fsck.erofs."
)
@click.option("--repair", metavar="URL", help="Fetch what is missing or corrupt from this other store.")
@app_options
@pass_app
def command(app: App, refs: tuple[str, ...], deep: bool, repair: str | None) -> int:
    """Check that what REFs (default: every ref) need is stored whole. Exit code 16 when something is missing or corrupt."""
    from dsec_layers.api.environment import verify

    reports = verify(app.session, refs, deep=deep, repair=repair)
    problems = [problem for report in reports for problem in report.problems]

    def show() -> None:
        for report in reports:
            app.console.out(
                f"{'ok ' if not report.problems else 'BAD'}  {report.name}  ({report.blobs} blobs{', every byte read' if deep else ''})"
            )
            for digest in report.repaired:
                app.console.out(f"     repaired {digest}")
            for problem in report.problems:
                app.console.out(f"     {problem}")

    app.console.result(reports, show)
    return CorruptError.exit_code if problems else 0
