"""The wheel that comes out of the sdist has every module of the source tree (hatchling drops linked folders silently without ``only-include``)."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from dsec_layers.proc import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_sdist_to_wheel_has_every_file(tmp_path: Path) -> None:
    run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("dsec_layers/")}
    wanted = set()
    for folder in ("dsec_layers", "fuse", "builders", "registry"):
        prefix = "" if folder == "dsec_layers" else "dsec_layers/"
        wanted |= {prefix + str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".typed")}
    assert packed == wanted
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(("dsec_layers/", "dsec_layers-"))]
