"""``dsec-layers env create``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app


@click.group("env", short_help="Compose layers into environments.")
def command() -> None:
    """Compose layers into environments."""


@command.command(
    "create",
    cls=Command,
    example="dsec-layers env create dev:1 --base debian:12 --workspace project:3 --toolkit agent-tools:7",
)
@click.argument("name", metavar="NAME:TAG")
@click.option("--base", required=True, metavar="REF", type=REF, help="The base layer.")
@click.option("--workspace", metavar="REF", type=REF, help="The workspace layer, above the base.")
@click.option(
    "--toolkit", "toolkits", multiple=True, metavar="REF", type=REF, help="A toolkit layer, above the workspace; may be given again."
)
@app_options
@pass_app
def create(app: App, name: str, base: str, workspace: str | None, toolkits: tuple[str, ...]) -> None:
    """Compose a base, a workspace and toolkits into an environment NAME:TAG."""
    from dsec_layers.api.environment import env_create

    made = env_create(app.session, name, base=base, workspace=workspace, toolkits=toolkits)

    def show() -> None:
        app.console.out(f"{made.name}  {made.digest}")

    app.console.result(made, show)
