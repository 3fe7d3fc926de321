"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dsec_layers"
MODULES = sorted(
    {path.resolve() for path in PACKAGE.rglob("*.py")} | {p for d in ("fuse", "builders", "registry") for p in (ROOT / d).rglob("*.py")}
)
MAX_MODULE = 500
MAX_FUNCTION = 60


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def importers(module: str) -> set[str]:
    return {name_of(path) for path in MODULES if any(name == module or name.startswith(module + ".") for name in imports(path))}


def test_modules_and_functions_stay_small() -> None:
    too_long = []
    for path in MODULES:
        text = path.read_text()
        if text.count("\n") > MAX_MODULE:
            too_long.append(f"{name_of(path)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION:
                too_long.append(f"{name_of(path)}:{node.lineno} {node.name}: {size} lines")
    assert not too_long


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("subprocess", {"dsec_layers/proc.py"}),
        ("rich", {"dsec_layers/cli/console.py"}),
    ],
)
def test_one_module_owns(module: str, allowed: set[str]) -> None:
    assert importers(module) == allowed


def test_only_the_command_line_imports_click() -> None:
    assert all(name.startswith("dsec_layers/cli/") for name in importers("click"))


def test_only_the_command_line_reads_settings_from_the_environment() -> None:
    readers = {name_of(path) for path in MODULES if re.search(r"os\.environ|os\.getenv", path.read_text())}
    assert {name for name in readers if not name.startswith("dsec_layers/cli/")} == ALLOWED_ENVIRONMENT_READERS


ALLOWED_ENVIRONMENT_READERS = {
    "dsec_layers/proc.py",  # PATH, HOME, TERM, TMPDIR for child processes
    "builders/layerfile/debian.py",  # the host's proxy and CA settings for the package download
    "dsec_layers/sandbox/hostnet.py",  # the same for steps that were allowed the network
    "fuse/events/keeper.py",  # NOTIFY_SOCKET and LISTEN_FDS, systemd's own protocol
}


def test_format_code_does_no_io() -> None:
    for path in (PACKAGE / "erofs").rglob("*.py"):
        assert not {"socket", "shutil", "tempfile", "pathlib"} & set(imports(path)), path
        assert not re.search(r"\bopen\(", path.read_text()), path


def test_public_names_have_docstrings() -> None:
    bare = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree) and path.name != "__init__.py":
            bare.append(name_of(path))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not bare


def test_the_links_that_make_the_layout() -> None:
    for name in ("fuse", "builders", "registry"):
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_every_error_class_has_a_documented_exit_code() -> None:
    from dsec_layers import errors

    tree = errors.__doc__ or ""
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert re.search(rf"{name}\s+{kind.exit_code}\b", tree), name


def test_no_work_notes_left_behind() -> None:
    marks = re.compile(r"# ?(TODO|FIXME|XXX)|NotImplementedError")
    assert [name_of(path) for path in MODULES if marks.search(path.read_text())] == []


def test_sdist_lists_every_folder_of_the_project() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert set(targets["sdist"]["only-include"]) >= {"dsec_layers", "tests", "examples", "docs", "benchmarks"}
