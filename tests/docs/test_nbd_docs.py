"""The examples of docs/nbd.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.tools import need

TEXT = (Path(__file__).resolve().parents[2] / "docs/nbd.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_examples(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if "qemu-img" in example:
        need("qemu-img")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.erofs").write_bytes(bytes(1 << 20))
    names: dict[str, object] = {}
    exec(example, names)  # noqa: S102 - our own documentation
    out, _ = capfd.readouterr()
    assert f"nbd+unix:///image?socket={tmp_path}/nbd.sock" in out or "virtual size: 1 MiB" in out
    assert names.get("code", 0) == 0


def test_every_public_name_is_mentioned() -> None:
    from dsec_layers.fuse import nbd

    aliases = {
        "Piece",
        "Sendable",
        "ExtentSource",
        "PrefetchSource",
        "TlsMode",
    }  # types of what the table of sources and the modes describe
    assert [name for name in nbd.__all__ if name not in aliases and f"`{name}" not in TEXT and f"{name}(" not in TEXT] == []
