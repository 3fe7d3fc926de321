"""Removes build residue from a writable layer before it is packed: what a step leaves behind that nobody asked for.

It works on the tree that was read from the layer, never on the file system: there is no link to follow and nothing outside to touch, and a step whose result is
cached keeps it as it was. An entry that is dropped, be it a new file, a changed copy of a lower one or a whiteout, lets what the layers below have show again.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from dsec_layers.builders.excludes import Excludes
from dsec_layers.erofs.overlay import is_opaque
from dsec_layers.erofs.tree import Inode, Tree, show_path
from dsec_layers.errors import UsageError

__all__ = ["RULES", "Below", "Removed", "Rule", "rules_for", "scrub_tree"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of residue. ``patterns``: as ``Excludes`` takes them, relative to the root. ``files``: directories stay. ``homes``: patterns are relative to home
    directories (/root and those in /home)."""

    name: str
    why: str
    patterns: tuple[str, ...]
    files: bool = False
    homes: bool = False

    def expanded(self) -> tuple[str, ...]:
        """The patterns relative to the root."""
        if not self.homes:
            return self.patterns
        return tuple(f"{home}/{pattern}" for home in ("root", "home/*") for pattern in self.patterns)


RULES: Final = (
    Rule(
        "histories",
        "a history of typed commands",
        tuple(
            f".{name}"
            for name in (
                *("bash_history", "ash_history", "zsh_history", "sh_history", "python_history", "node_repl_history", "sqlite_history"),
                *("mysql_history", "psql_history", "irb_history", "lesshst", "viminfo", "wget-hsts", "rediscli_history"),
            )
        ),
        homes=True,
    ),
    Rule(
        "credentials",
        "a credential",
        (".netrc", ".git-credentials", ".pypirc", ".docker/config.json", ".ssh/known_hosts", ".ssh/known_hosts.old"),
        homes=True,
    ),
    Rule(
        "package-lists",
        "a package list",
        ("var/lib/apt/lists/*", "var/lib/apt/periodic/*", "var/cache/apt/*.bin", "var/lib/dnf/repos/*", "var/cache/apk/*"),
    ),
    Rule(
        "package-caches",
        "a package cache",
        (
            *("var/cache/apt/archives/*.deb", "var/cache/apt/archives/lock", "var/cache/apt/archives/partial/*"),
            *("var/cache/dnf/*", "var/cache/yum/*", "var/cache/pacman/pkg/*", "var/cache/libdnf5/*"),
        ),
    ),
    Rule(
        "package-locks",
        "a package manager's lock or old state",
        (
            *(
                "var/lib/dpkg/*-old",
                "var/lib/dpkg/lock",
                "var/lib/dpkg/lock-frontend",
                "var/lib/dpkg/triggers/Lock",
                "var/cache/debconf/*-old",
            ),
            *("var/lib/apt/lists/lock", "var/lib/apt/daily_lock"),
        ),
    ),
    Rule(
        "user-caches",
        "a cache of the build user",
        (
            *(
                f".cache/{name}"
                for name in ("pip", "uv", "pypoetry", "pipenv", "yarn", "pnpm", "node-gyp", "go-build", "fontconfig", "mesa_shader_cache")
            ),
            *(".npm/_cacache", ".npm/_logs", ".npm/_update-notifier-last-checked", ".yarn/cache", ".bundle/cache"),
        ),
        homes=True,
    ),
    Rule("temporary", "a temporary file", ("tmp/*", "var/tmp/*", "run/*")),
    Rule("logs", "a log", ("var/log/**",), files=True),
    Rule(
        "host-state",
        "state that every host makes anew",
        (
            *("etc/machine-id", "var/lib/dbus/machine-id", "etc/.pwd.lock", "var/lib/systemd/random-seed", "var/cache/ldconfig/aux-cache"),
            *(f"etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")),
        ),
    ),
)
"""The rules that are always on, unless a layer file disables one by its name."""


@dataclass(frozen=True, slots=True)
class Removed:
    """One thing that was dropped, with all below it: its path, why, and the bytes of its regular files."""

    path: str
    why: str
    size: int


Below: TypeAlias = Callable[[bytes], "Inode | None"]
"""The attributes of what the layers below have at a path of the root, without following any link; None if there is nothing."""


def rules_for(disable: Iterable[str] = (), paths: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules without the disabled ones, and one for further ``paths``. Raises UsageError for the name of no rule."""
    off = set(disable)
    unknown = off - {rule.name for rule in RULES}
    if unknown:
        raise UsageError(
            f"no scrub rule is called {', '.join(sorted(unknown))}", hint=f"there are {', '.join(rule.name for rule in RULES)}"
        )
    own = tuple(path.lstrip("/") for path in paths)
    return (*(rule for rule in RULES if rule.name not in off), *((Rule("paths", "named in the layer file", own),) if own else ()))


def scrub_tree(tree: Tree, rules: Iterable[Rule], *, keep: Iterable[str] = (), below: Below | None = None) -> list[Removed]:
    """Drop from ``tree``, in place, what a rule matches and no ``keep`` pattern does; returns what was dropped, in the order of the paths.

    A directory that is empty afterwards, and as the layers below have it but for its time, is dropped too: it is there only because something in it came and went.
    """
    compiled = [(rule, Excludes(rule.expanded())) for rule in rules]
    kept = Excludes(pattern.lstrip("/") for pattern in keep)
    removed: dict[bytes, Removed] = {}
    stack: list[tuple[bytes, Inode, Rule | None]] = [(b"", tree.root, None)]
    while stack:
        path, directory, doom = stack.pop()
        assert directory.children is not None
        for name, inode in list(directory.children.items()):
            place = path + b"/" + name if path else name
            rule = doom or _match(compiled, place, inode)
            if rule is None or kept.match(place, is_dir=inode.is_dir):
                if inode.is_dir and rule is None:
                    stack.append((place, inode, None))
            elif inode.is_dir and _holds(place, inode, kept):
                stack.append((place, inode, rule))
            else:
                del directory.children[name]
                removed[place] = Removed(show_path(place), rule.why, _size(inode))
    _drop_idle(tree, removed, below)
    return [removed[place] for place in sorted(removed)]


def _match(rules: list[tuple[Rule, Excludes]], path: bytes, inode: Inode) -> Rule | None:
    return next((rule for rule, match in rules if not (rule.files and inode.is_dir) and match.match(path, is_dir=inode.is_dir)), None)


def _holds(path: bytes, directory: Inode, kept: Excludes) -> bool:
    """Whether something below a directory is to be kept."""
    return any(kept.match(path + b"/" + place, is_dir=inode.is_dir) for place, inode in Tree(directory).walk() if place)


def _size(inode: Inode) -> int:
    return sum({item: item.size for _, item in Tree(inode).walk() if stat.S_ISREG(item.mode)}.values())


def _drop_idle(tree: Tree, removed: Iterable[bytes], below: Below | None) -> None:
    parents: set[bytes] = set()
    for path in removed:
        while path := path.rpartition(b"/")[0]:
            parents.add(path)
    for path in sorted(parents, key=len, reverse=True):
        head, _, name = path.rpartition(b"/")
        holder = _find(tree.root, head)
        inode = holder.children.get(name) if holder is not None and holder.children else None
        if holder is None or inode is None or inode.children != {} or is_opaque(inode):
            continue
        lower = below(path) if below is not None else None
        if lower is not None and (lower.mode, lower.uid, lower.gid, lower.xattrs) == (inode.mode, inode.uid, inode.gid, inode.xattrs):
            assert holder.children is not None
            del holder.children[name]


def _find(root: Inode, path: bytes) -> Inode | None:
    inode: Inode | None = root
    for part in path.split(b"/") if path else ():
        inode = inode.children.get(part) if inode is not None and inode.children else None
    return inode
