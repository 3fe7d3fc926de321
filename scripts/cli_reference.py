"""Write docs/cli.md from the commands' own help. A test fails when the file is out of date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dsec_layers.cli import COMMANDS, cli
from dsec_layers.cli.common import App

TARGET = Path(__file__).resolve().parents[1] / "docs/cli.md"
HEAD = """# Command line reference

Made from the commands' own help by `scripts/cli_reference.py`; do not edit.

Results go to standard output, everything else to standard error. With `--json` the result, or the error, is one JSON object on standard output.
Settings come from the command line, then the environment (`DSEC_STORE`, `DSEC_CACHE`, `DSEC_DRIVER`), then `config.toml` in `dsec-layers` under XDG_CONFIG_HOME
(keys `store`, `cache`, `driver`; `memory` and `pids` in the table `[run]`), then the defaults. Exit codes:

| code | meaning |
|---|---|
"""


def commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """``command`` and, for a group, everything below it."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, obj=App())
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from commands(f"{name} {child}", found)


def exit_codes() -> str:
    """The table of exit codes, from the error classes."""
    from dsec_layers import errors

    named = (getattr(errors, name) for name in errors.__all__)
    kinds = sorted((kind for kind in named if issubclass(kind, errors.DsecError)), key=lambda kind: kind.exit_code)
    rows = {
        kind.exit_code: (kind.__doc__ or "").partition(". ")[0].rstrip(".") for kind in reversed(kinds) if kind is not errors.ImageError
    }
    rows |= {0: "It worked", 1: "Something failed; the message says what"}
    return "".join(f"| {code} | {rows[code]} |\n" for code in sorted(rows))


def image_codes() -> str:
    """The sentence about the codes of ImageError."""
    from dsec_layers.errors import ImageCode

    codes = ", ".join(f"`{code}`" for code in ImageCode)
    return f"\nWhat `--json` prints of an `ImageError` (12: bytes that are no well-formed image, table or manifest) has a `code` as well: {codes}.\n"


def reference() -> str:
    """The whole document."""
    parts = [
        HEAD + exit_codes() + image_codes(),
        "\n`run` passes on the command's own exit code and uses 125 for its own failures, 126 and 127 as shells do.\n",
    ]
    root = click.Context(cli, info_name="dsec-layers", obj=App())
    for name in COMMANDS:
        top = cli.get_command(root, name)
        assert top is not None
        for full, command in commands(f"dsec-layers {name}", top):
            context = click.Context(command, info_name=full, obj=App(), max_content_width=110, terminal_width=110)
            parts.append(f"\n## {full}\n\n```\n{command.get_help(context)}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(reference())
    sys.stderr.write(f"wrote {TARGET.name}\n")
