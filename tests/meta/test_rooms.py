"""Every package has a face (its ``__init__``); what is not on it is used by nobody outside."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dsec_layers"
MODULES = {
    ".".join(("dsec_layers", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for top in (PACKAGE, *(PACKAGE / name for name in ("fuse", "builders", "registry")))
    for path in top.rglob("*.py")
}
ROOMS = sorted(name for name, path in MODULES.items() if path.name == "__init__.py" and name not in ("dsec_layers", "dsec_layers.cli"))


@functools.cache
def parsed(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(MODULES[name].read_text())


def face(room: str) -> set[tuple[str, str]]:
    """(module, name) of a room's face: the block in its docstring, and what it exports itself (module "")."""
    tree = parsed(room)
    _, _, block = (ast.get_docstring(tree) or "").partition("Face::\n")
    found: set[tuple[str, str]] = set()
    module = ""
    for line in block.splitlines():
        if not line.startswith("    "):
            continue
        words = line.replace(",", " ").split()
        if line[4:5] != " ":
            module, *words = words
            found.add((module, ""))
            words = [] if words == ["(the", "module)"] else words
        found |= {(module, word) for word in words}
    exported = [node.value for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"]
    return found | {("", name) for value in exported for name in ast.literal_eval(value)}


def imports(room: str) -> Iterator[tuple[str, str, str]]:
    """(importing module, module in ``room``, name) of each import from outside the room's own modules; module "" is the room itself."""
    for name, path in MODULES.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        if package == room:
            continue
        for node in ast.walk(parsed(name)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module == room:
                yield from ((name, "", alias.name) for alias in node.names if f"{room}.{alias.name}" not in ROOMS)
            elif node.module.rpartition(".")[0] == room and node.module not in ROOMS:
                yield from ((name, node.module.rpartition(".")[2], alias.name) for alias in node.names)


def defined(name: str) -> set[str]:
    """The names that a module binds."""
    found: set[str] = set()
    for node in parsed(name).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_others_use_what_is_on_the_face(room: str) -> None:
    allowed = face(room)
    # A module imported whole stands on the face by its own name.
    modules = {module for module, _ in allowed}
    wrong = [
        f"{importer}: {module}.{name}"
        for importer, module, name in imports(room)
        if (module, name) not in allowed and not (module == "" and name in modules)
    ]
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_on_the_face_is_there(room: str) -> None:
    for module, name in face(room):
        if module and name:
            assert name in defined(f"{room}.{module}"), f"{module}.{name}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_what_it_is_for(room: str) -> None:
    assert ast.get_docstring(parsed(room)), f"{MODULES[room]} has no docstring"


def test_the_command_line_takes_no_engine_from_the_session() -> None:
    taken = [
        f"{name}: session.{node.attr}"
        for name in MODULES
        if name.startswith("dsec_layers.cli")
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Attribute) and getattr(node.value, "attr", "") == "session" and node.attr in ("store", "catalog", "host")
    ]
    assert not taken
