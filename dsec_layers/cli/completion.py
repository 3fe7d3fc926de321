"""``dsec-layers completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dsec_layers.cli.common import App, Command, app_options, pass_app


@click.command(
    "completion",
    cls=Command,
    example='eval "$(dsec-layers completion bash)"\ndsec-layers completion fish > ~/.config/fish/completions/dsec-layers.fish',
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@app_options
@pass_app
def command(app: App, shell: str) -> None:
    """Print a completion script for SHELL."""
    from dsec_layers.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    app.console.out(kind(cli, {}, "dsec-layers", "_DSEC_LAYERS_COMPLETE").source())
