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


FORMAT_CODE = [PACKAGE / "oci.py", *(path for room in ("erofs", "layers", "overlaybd") for path in sorted((PACKAGE / room).rglob("*.py")))]
WORKS_ON_FILES = {
    "dsec_layers/overlaybd/upper.py",  # the writable layer: appends to descriptors that its caller opened
    "dsec_layers/overlaybd/upper_journal.py",  # what it has acknowledged but not flushed, by a descriptor as well
}
OUTSIDE = {
    "fcntl",
    "io",
    "mmap",
    "pathlib",
    "select",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "dsec_layers.fsio",
    "dsec_layers.linux",
}
ARITHMETIC_OF_OS = {"cpu_count", "major", "makedev", "minor"}


def io_in(source: str) -> set[str]:
    """What in a module's text touches files, sockets or processes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found |= {f"os.{node.attr}"} if node.attr not in ARITHMETIC_OF_OS else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.add("open()")
        found |= {name for name in names if any(name == root or name.startswith(root + ".") for root in OUTSIDE)}
        found |= {name for name in names if name.startswith("os.") and name[3:] not in ARITHMETIC_OF_OS}
    return found


def test_format_code_does_no_io() -> None:
    """Bytes in, bytes out. The two modules that are allowed descriptors must need them: an exception that nobody uses goes."""
    assert {name_of(path) for path in FORMAT_CODE if io_in(path.read_text())} == WORKS_ON_FILES


@pytest.mark.parametrize(
    "line",
    ["import socket", "from pathlib import Path", "import os\nos.pread(0, 1, 2)", "from os import pread", "open('x')", "from dsec_layers import fsio",
     "from dsec_layers.linux.fallocate import reserve", "import dsec_layers.fsio"],
)  # fmt: skip
def test_the_rule_against_io_sees_what_it_forbids(line: str) -> None:
    assert io_in(line)
    assert not io_in("import os\nos.major(1)\nfrom os import makedev")


def test_format_code_says_what_kind_of_image_error_it_raises() -> None:
    """By a code that is named where the error is made: the default is for the callers of format code, who seldom know more."""
    bare = []
    for path in [*FORMAT_CODE, PACKAGE / "segment.py"]:
        tree = ast.parse(path.read_text())
        made = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ImageError"
        ]
        bare += [f"{name_of(path)}:{node.lineno}" for node in made if all(keyword.arg != "code" for keyword in node.keywords)]
        bare += [  # an error that is made of the class by another name would escape the line above
            f"{name_of(path)}:{node.lineno} type(error)(...)"
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Call)
        ]
    assert not bare


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
        if kind is errors.ImageCode:
            continue
        assert re.search(rf"{name}\s+{kind.exit_code}\b", tree), name


def test_no_work_notes_left_behind() -> None:
    marks = re.compile(r"# ?(TODO|FIXME|XXX)|NotImplementedError")
    assert [name_of(path) for path in MODULES if marks.search(path.read_text())] == []


def test_sdist_lists_every_folder_of_the_project() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert set(targets["sdist"]["only-include"]) >= {"dsec_layers", "tests", "examples", "docs", "benchmarks"}
