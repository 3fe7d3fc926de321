"""Layer files: TOML in, a checked value out. docs/layerfile.md is the manual.

Every mistake is a UsageError that names the file and the key; an unknown key comes with the nearest known one. Nothing is looked at on disk here.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from dsec_layers.builders.excludes import Excludes
from dsec_layers.builders.layerfile.imagekeys import image_settings
from dsec_layers.builders.layerfile.scrub import RULES
from dsec_layers.errors import NotFound, UsageError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.sandbox.spec import Network, RunSpec
from dsec_layers.store.base import check_ref

__all__ = ["Copy", "DebianInput", "FileInput", "Recipe", "Scrub", "Step", "load_recipe", "parse_recipe"]

MAX_STEPS: Final = 200
"""Each step is one more layer of an overlay while the layer is built, and overlayfs takes 500."""

MAX_BYTES: Final = 4 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FileInput:
    """A source on the host. ``type``: ``dir``, ``tar``, ``oci`` (a layout, or a tar of one) or ``docker`` (an archive of ``docker save``).

    ``to``: where in the layer a directory or tar goes. ``owner``: (uid, gid) instead of those found.
    """

    type: str
    path: str
    to: str = "/"
    owner: tuple[int, int] | None = None
    excludes: tuple[str, ...] = ()
    reference: str | None = None
    platform: str = "linux/amd64"


@dataclass(frozen=True, slots=True)
class DebianInput:
    """A Debian root made by mmdebstrap. ``mirrors``: empty for the host's own."""

    suite: str
    packages: tuple[str, ...] = ()
    variant: str = "minbase"
    components: tuple[str, ...] = ("main",)
    mirrors: tuple[str, ...] = ()
    keyring: str = ""
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """A file or directory of the host put into the layer. ``mode``: of files, None as found."""

    source: str
    to: str
    mode: int | None = None
    owner: tuple[int, int] = (0, 0)
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the build. ``shell``: ``argv`` was given as one line of shell."""

    argv: tuple[str, ...]
    shell: bool = True
    network: Network = Network.NONE
    workdir: str = "/"
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def title(self) -> str:
        """The step for people, on one line."""
        text = self.argv[-1] if self.shell else " ".join(self.argv)
        first, *more = text.strip().splitlines() or [""]
        return (first if len(first) <= 100 else first[:99] + "…") + (" …" if more else "")


@dataclass(frozen=True, slots=True)
class Scrub:
    """What is done about residue: rules switched off, more paths to remove, paths to keep."""

    disable: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """A layer file. ``directory`` is where relative paths start. ``document`` is its text as a value, which becomes part of the layer's config."""

    kind: Kind
    name: str
    directory: Path
    parent: str | None = None
    prefix: str = ""
    source: FileInput | DebianInput | None = None
    copies: tuple[Copy, ...] = ()
    steps: tuple[Step, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    image: Mapping[str, Any] = field(default_factory=dict)
    excludes: tuple[str, ...] = ()
    scrub: Scrub = field(default_factory=Scrub)
    epoch: int | None = None
    document: Mapping[str, Any] = field(default_factory=dict)


def load_recipe(path: Path) -> Recipe:
    """Read and check a layer file. Raises NotFound, UsageError."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound(f"no layer file {path}") from error
    except OSError as error:
        raise UsageError(f"cannot read the layer file {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES} bytes")
    return parse_recipe(data, path)


def parse_recipe(data: bytes, path: Path) -> Recipe:
    """The value of a layer file's bytes; ``path`` is for messages and relative paths."""
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    return _Reader(path).recipe(document)


class _Table:
    """One table of the file. Keys are taken out of it; what is left at the end is unknown."""

    def __init__(self, where: str, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise UsageError(f"{where}: {name or 'the file'} must be a table")
        self._where, self._name, self._left = where, name, dict(value)
        self._known: list[str] = []

    def key(self, name: str) -> str:
        """How messages call a key."""
        return f"{self._where}: {self._name + '.' if self._name else ''}{name}"

    def take(self, name: str, convert: Callable[[str, Any], _T], default: _T) -> _T:
        """The converted value of a key, or the default."""
        self._known.append(name)
        return convert(self.key(name), self._left.pop(name)) if name in self._left else default

    def need(self, name: str, convert: Callable[[str, Any], _T]) -> _T:
        """The converted value of a key that must be there."""
        self._known.append(name)
        if name not in self._left:
            raise UsageError(f"{self.key(name)} is missing")
        return convert(self.key(name), self._left.pop(name))

    def end(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            near = difflib.get_close_matches(name, self._known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(self._known))}"
            raise UsageError(f"{self.key(name)} is not a known key", hint=hint)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._where = str(path)
        self._directory = path.absolute().parent

    def recipe(self, document: dict[str, Any]) -> Recipe:
        table = _Table(self._where, "", document)
        kind = table.need("kind", _kind)
        workdir = table.take("workdir", _place, "")
        network = table.take("network", _network, Network.NONE)
        recipe = Recipe(
            kind=kind,
            name=table.need("name", _checked(check_ref)),
            directory=self._directory,
            parent=table.take("parent", _text, None),
            prefix=table.take("prefix", _place, ""),
            source=table.take("source", self._source, None),
            copies=tuple(table.take("copy", _list(self._copy), [])),
            steps=tuple(table.take("run", _list(lambda key, value: self._step(key, value, network, workdir)), [])),
            env=table.take("env", _variables, {}),
            workdir=workdir,
            image=table.take("image", image_settings, {}),
            excludes=tuple(table.take("excludes", _patterns, ())),
            scrub=table.take("scrub", self._scrub, Scrub()),
            epoch=table.take("epoch", _epoch, None),
            document=document,
        )
        table.end()
        self._check(recipe)
        return recipe

    def _check(self, recipe: Recipe) -> None:
        """What no key shows alone."""
        if len(recipe.steps) > MAX_STEPS:
            raise UsageError(f"{self._where}: {len(recipe.steps)} run steps are more than {MAX_STEPS}", hint="join some with &&")
        if recipe.kind is Kind.BASE and recipe.parent:
            raise UsageError(f"{self._where}: a base has no parent", hint="a layer on another is a workspace")
        if recipe.kind is Kind.BASE and recipe.source is None:
            raise UsageError(f"{self._where}: a base needs a source")
        if recipe.kind is Kind.WORKSPACE and not recipe.parent:
            raise UsageError(f"{self._where}: a workspace needs a parent to be built on")
        if recipe.kind is Kind.TOOLKIT and not recipe.prefix:
            raise UsageError(f"{self._where}: a toolkit needs a prefix, the directory that is its own")
        if recipe.kind is not Kind.TOOLKIT and recipe.prefix:
            raise UsageError(f"{self._where}: prefix is for toolkits only")
        if recipe.prefix == "/":
            raise UsageError(f"{self._where}: a toolkit's prefix cannot be /")
        if recipe.steps and recipe.kind is Kind.TOOLKIT and not recipe.parent:
            raise UsageError(
                f"{self._where}: the run steps of a toolkit need a parent to run on", hint="nothing of it becomes part of the toolkit"
            )
        if recipe.source is None and not recipe.copies and not recipe.steps:
            raise UsageError(f"{self._where}: nothing to build: no source, no copy, no run")
        if (
            recipe.excludes
            and not recipe.steps
            and not (isinstance(recipe.source, FileInput | None) and (recipe.source is None or recipe.source.type == "dir"))
        ):
            raise UsageError(f"{self._where}: excludes of an archive need a run step", hint='run = ["true"] is enough')

    def _source(self, key: str, value: Any) -> FileInput | DebianInput:
        table = _Table(self._where, "source", value)
        kind = table.need("type", _choice_of(("dir", "tar", "oci", "docker", "debian")))
        result: FileInput | DebianInput
        if kind == "debian":
            result = DebianInput(
                suite=table.need("suite", _word),
                packages=tuple(table.take("packages", _list(_word), [])),
                variant=table.take("variant", _choice_of(_VARIANTS), "minbase"),
                components=tuple(table.take("components", _list(_word), ["main"])),
                mirrors=tuple(table.take("mirrors", _list(_text), [])),
                keyring=table.take("keyring", _text, ""),
                architecture=table.take("architecture", _word, ""),
            )
        else:
            image = kind in ("oci", "docker")
            result = FileInput(
                type=kind,
                path=table.need("path", _text),
                to="/" if image else table.take("to", _place, "/"),
                owner=table.take("owner", _owner, None),
                excludes=tuple(table.take("excludes", _patterns, ())) if kind == "dir" else (),
                reference=table.take("reference", _text, None) if image else None,
                platform=table.take("platform", _text, "linux/amd64") if image else "linux/amd64",
            )
        table.end()
        return result

    def _copy(self, key: str, value: Any) -> Copy:
        table = _Table(self._where, key.partition(": ")[2], value)
        copy = Copy(
            source=table.need("from", _text),
            to=table.need("to", _place),
            mode=table.take("mode", _mode, None),
            owner=table.take("owner", _owner, (0, 0)),
            excludes=tuple(table.take("excludes", _patterns, ())),
        )
        table.end()
        return copy

    def _step(self, key: str, value: Any, network: Network, workdir: str) -> Step:
        if not isinstance(value, dict):
            value = {"command": value}
        table = _Table(self._where, key.partition(": ")[2], value)
        argv, shell = table.need("command", _command)
        step = Step(
            argv=argv,
            shell=shell,
            network=table.take("network", _network, network),
            workdir=table.take("workdir", _place, workdir or "/"),
            user=table.take("user", _text, ""),
            env=table.take("env", _variables, {}),
        )
        table.end()
        try:
            RunSpec(step.argv, step.env, step.workdir, step.user)
        except UsageError as error:
            raise UsageError(f"{key}: {error.message}", hint=error.hint) from error
        return step

    def _scrub(self, key: str, value: Any) -> Scrub:
        table = _Table(self._where, "scrub", value)
        scrub = Scrub(
            disable=tuple(table.take("disable", _list(_choice_of(tuple(rule.name for rule in RULES))), [])),
            paths=tuple(table.take("paths", _patterns, ())),
            keep=tuple(table.take("keep", _patterns, ())),
        )
        table.end()
        return scrub


_VARIANTS: Final = ("extract", "custom", "essential", "apt", "required", "minbase", "buildd", "important", "debootstrap", "standard")


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{key} must be a string that is not empty")
    return value


def _word(key: str, value: Any) -> str:
    """A name for another program's command line: nothing that it could take for an option or a list."""
    text = _text(key, value)
    if not text[0].isalnum() or any(letter.isspace() or letter in ",'\"\\`$;&|<>" for letter in text):
        raise UsageError(f"{key}: {text!r} is not a plain name")
    return text


def _place(key: str, value: Any) -> str:
    """An absolute path in the layer, without a slash at its end."""
    text = _text(key, value)
    if not text.startswith("/") or ".." in PurePosixPath(text).parts:
        raise UsageError(f"{key} must be an absolute path without '..': {text!r}")
    return "/" + str(PurePosixPath(text)).lstrip("/")


def _list(convert: Callable[[str, Any], _T]) -> Callable[[str, Any], list[_T]]:
    def converted(key: str, value: Any) -> list[_T]:
        if not isinstance(value, list):
            raise UsageError(f"{key} must be a list")
        return [convert(f"{key}[{index}]", item) for index, item in enumerate(value)]

    return converted


def _network(key: str, value: Any) -> Network:
    return Network(_choice_of(tuple(Network))(key, value))


def _choice_of(choices: Iterable[str]) -> Callable[[str, Any], str]:
    known = tuple(map(str, choices))

    def chosen(key: str, value: Any) -> str:
        if value in known:
            return str(value)
        near = difflib.get_close_matches(str(value), known, 1)
        raise UsageError(f"{key}: {value!r} is not one of {', '.join(known)}", hint=f"did you mean {near[0]!r}?" if near else None)

    return chosen


def _kind(key: str, value: Any) -> Kind:
    return Kind(_choice_of((Kind.BASE, Kind.WORKSPACE, Kind.TOOLKIT))(key, value))


def _checked(check: Callable[[str], str]) -> Callable[[str, Any], str]:
    def checked(key: str, value: Any) -> str:
        try:
            return check(_text(key, value))
        except UsageError as error:
            raise UsageError(f"{key}: {error.message}", hint=error.hint) from error

    return checked


def _patterns(key: str, value: Any) -> tuple[str, ...]:
    patterns = tuple(_list(_text)(key, value))
    try:
        Excludes(patterns)
    except UsageError as error:
        raise UsageError(f"{key}: {error.message}", hint=error.hint) from error
    return patterns


def _variables(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{key} must be a table of strings")
    for name, text in value.items():
        if not isinstance(text, str):
            raise UsageError(f"{key}.{name} must be a string")
    try:
        RunSpec(("true",), value)
    except UsageError as error:
        raise UsageError(f"{key}: {error.message}") from error
    return dict(value)


def _command(key: str, value: Any) -> tuple[tuple[str, ...], bool]:
    if isinstance(value, str):
        return ("/bin/sh", "-euc", _text(key, value)), True
    words = tuple(_list(_text)(key, value)) if isinstance(value, list) else ()
    if not words:
        raise UsageError(f"{key} must be a line of shell, or a list of a program and its arguments")
    return words, False


def _mode(key: str, value: Any) -> int:
    text = _text(key, value)
    if not 1 <= len(text) <= 5 or any(digit not in "01234567" for digit in text) or int(text, 8) > 0o7777:
        raise UsageError(f"{key}: {text!r} is not a mode", hint='octal digits in quotes, such as "0755"')
    return int(text, 8)


def _owner(key: str, value: Any) -> tuple[int, int]:
    parts = _text(key, value).split(":")
    if len(parts) != 2 or not all(part.isdecimal() and len(part) <= 10 and int(part) < (1 << 32) - 1 for part in parts):
        raise UsageError(f"{key}: {value!r} is not an owner", hint='numbers: "uid:gid"')
    return int(parts[0]), int(parts[1])


def _epoch(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise UsageError(f"{key} must be a number of seconds since 1970")
    return value
