"""Residue: what is dropped, what is kept, what shows again."""

from __future__ import annotations

import stat

import pytest

from dsec_layers.builders.layerfile.scrub import RULES, Removed, rules_for, scrub_tree
from dsec_layers.erofs.overlay import OPAQUE_XATTR
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import UsageError


def tree(*paths: str, whiteouts: tuple[str, ...] = ()) -> Tree:
    """Files of 10 bytes at ``paths``; a path with a slash at its end is a directory."""
    result = Tree()
    for path in (*paths, *whiteouts):
        here = result.root
        *parents, name = path.strip("/").split("/")
        for part in parents:
            assert here.children is not None
            here = here.children.setdefault(part.encode(), Inode(stat.S_IFDIR | 0o755))
        assert here.children is not None
        if path.endswith("/"):
            here.children.setdefault(name.encode(), Inode(stat.S_IFDIR | 0o755))
        elif path in whiteouts:
            here.children[name.encode()] = Inode(stat.S_IFCHR)
        else:
            here.children[name.encode()] = inode = Inode(stat.S_IFREG | 0o644)
            inode.size = 10
    return result


def paths(value: Tree) -> list[str]:
    return [path.decode() for path, _ in value.walk() if path]


def scrub(value: Tree, **more: object) -> list[Removed]:
    return scrub_tree(value, rules_for(), **more)  # type: ignore[arg-type]


RESIDUE = [
    "root/.bash_history",
    "home/ann/.python_history",
    "home/ann/.git-credentials",
    "var/lib/apt/lists/mirror.test_dists",
    "var/lib/apt/lists/partial/x",
    "var/cache/apt/pkgcache.bin",
    "var/cache/apt/archives/x_1_amd64.deb",
    "root/.cache/pip/http/a",
    "root/.npm/_cacache/b",
    "tmp/a/b",
    "var/tmp/c",
    "run/x.pid",
    "var/log/dpkg.log",
    "var/log/apt/term.log",
    "var/lib/dpkg/status-old",
    "etc/passwd-",
    "etc/machine-id",
    "var/cache/ldconfig/aux-cache",
]
KEPT = [
    "home/ann/project/tmp/a",
    "home/ann/project/.bash_history",
    "etc/passwd",
    "opt/tmp/x",
    "root/.cache/models/weights",
    "srv/var/log/x",
    "tmpfile",
    "var/lib/dpkg/status",
    "var/cache/apt/archives/kept.txt",
]


@pytest.mark.parametrize("path", RESIDUE)
def test_residue_is_dropped_and_reported(path: str) -> None:
    value = tree(path)
    (removed,) = scrub(value)
    assert ("/" + path).startswith(removed.path)
    assert removed.size == 10
    assert removed.why
    assert not [inode for _, inode in value.walk() if not inode.is_dir]


def test_what_is_no_residue_stays() -> None:
    value = tree(*KEPT)
    before = paths(value)
    assert scrub(value) == []
    assert paths(value) == before


def test_every_rule_is_met_by_the_examples() -> None:
    found = {item.why for path in RESIDUE for item in scrub(tree(path))}
    assert found == {rule.why for rule in RULES}


def test_the_report_is_sorted_with_one_line_a_place() -> None:
    removed = scrub(tree("tmp/b/1", "tmp/b/2", "tmp/a", "root/.viminfo"))
    assert [(item.path, item.size) for item in removed] == [("/root/.viminfo", 10), ("/tmp/a", 10), ("/tmp/b", 20)]


def test_a_hard_link_counts_once() -> None:
    value = tree("tmp/d/a")
    directory = value.root.children[b"tmp"].children[b"d"]  # type: ignore[index]
    directory.children[b"b"] = directory.children[b"a"]  # type: ignore[index]
    assert scrub(value)[0].size == 10


def test_whiteouts_of_residue_go_too() -> None:
    """The lower layer's file shows again: it is the lower layer's business."""
    value = tree("etc/new", whiteouts=("var/lib/apt/lists/base", "var/log/base.log", "etc/gone"))
    assert [item.path for item in scrub(value)] == ["/var/lib/apt/lists/base", "/var/log/base.log"]
    assert "etc/gone" in paths(value)


def test_directories_of_logs_stay() -> None:
    value = tree("var/log/daemon/", "var/log/daemon/x.log")
    scrub(value)
    assert paths(value) == ["var", "var/log", "var/log/daemon"]


def test_a_directory_left_empty_as_the_layers_below_have_it_goes() -> None:
    below = {b"var": Inode(stat.S_IFDIR | 0o755), b"var/log": Inode(stat.S_IFDIR | 0o755), b"tmp": Inode(stat.S_IFDIR | 0o1777)}
    value = tree("var/log/x", "tmp/y", "etc/z")
    assert len(scrub(value, below=below.get)) == 2
    # /tmp is not as below (its mode was changed), so that change is kept.
    assert paths(value) == ["etc", "etc/z", "tmp"]


def test_an_opaque_directory_stays() -> None:
    value = tree("tmp/y")
    value.root.children[b"tmp"].xattrs = ((OPAQUE_XATTR, b"y"),)  # type: ignore[index]
    scrub(value, below={b"tmp": Inode(stat.S_IFDIR | 0o755)}.get)
    assert paths(value) == ["tmp"]


def test_keep_reaches_into_what_would_go() -> None:
    value = tree("tmp/d/a", "tmp/d/b", "tmp/e/f", "var/log/x", "tmp/k/l/m")
    removed = scrub_tree(value, rules_for(), keep=("/tmp/d/a", "var/log/x", "/tmp/k"))
    assert [item.path for item in removed] == ["/tmp/d/b", "/tmp/e"]
    assert {"tmp/d/a", "tmp/k/l/m", "var/log/x"} <= set(paths(value))


def test_rules_can_be_switched_off_and_added() -> None:
    value = tree("var/log/x", "opt/scratch/y", "opt/z.o")
    removed = scrub_tree(value, rules_for(["logs"], ["/opt/scratch", "*.o"]))
    assert [(item.path, item.why) for item in removed] == [
        ("/opt/scratch", "named in the layer file"),
        ("/opt/z.o", "named in the layer file"),
    ]
    with pytest.raises(UsageError, match="no scrub rule is called lgos"):
        rules_for(["lgos"])


def test_names_that_are_no_text_are_escaped_in_the_report() -> None:
    value = Tree()
    value.root.children = {b"tmp": Inode(stat.S_IFDIR | 0o755)}
    value.root.children[b"tmp"].children = {b"a\x1b[31m\xff": Inode(stat.S_IFREG)}
    assert [item.path for item in scrub(value)] == ["/tmp/a\\x1b[31m\\xff"]
