"""The example of docs/disks.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs/disks.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_examples(example: str, capfd: pytest.CaptureFixture[str]) -> None:
    exec(example, {})  # noqa: S102 - our own documentation
    out, _ = capfd.readouterr()
    assert re.fullmatch(r"sha256:[0-9a-f]{64} 1\n", out)


def test_every_command_is_mentioned() -> None:
    from dsec_layers.cli.disk import command

    assert [name for name in command.commands if name not in ("show", "verify") and f"disk {name}" not in TEXT] == []
