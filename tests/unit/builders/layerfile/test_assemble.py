"""Trees on their way into a layer, and written out for steps."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.excludes import Excludes
from dsec_layers.builders.layerfile.assemble import HashSink, input_key, resolve_input
from dsec_layers.builders.output.directory import materialize
from dsec_layers.builders.overlay.trees import Underneath, cut_to_prefix, drop_marks, exclude, leading, rooted
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.erofs.overlay import OPAQUE_XATTR
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError, LimitError, NotFound, UsageError
from dsec_layers.progress import SILENT, Progress

OPAQUE = ((OPAQUE_XATTR, b"y"),)


def tree(**entries: str) -> Tree:
    """Paths -> ``d`` and three octal digits of a directory's mode, ``f`` a file, ``w`` a whiteout, ``o`` an opaque directory."""
    result = Tree()
    for path, what in entries.items():
        *parents, name = path.split("__")
        here = result.root
        for part in parents:
            assert here.children is not None
            here = here.children.setdefault(part.encode(), Inode(stat.S_IFDIR | 0o755))
        inode = Inode({"f": stat.S_IFREG | 0o644, "w": stat.S_IFCHR}.get(what, stat.S_IFDIR | int(what[1:] or "755", 8)))
        inode.xattrs = OPAQUE if what == "o" else ()
        assert here.children is not None
        here.children[name.encode()] = inode
    return result


def paths(value: Tree) -> list[str]:
    return [path.decode() for path, _ in value.walk() if path]


def test_what_is_underneath_is_what_an_overlay_shows() -> None:
    calls = []

    def load() -> list[Tree]:
        calls.append(1)
        return [tree(a="d700", gone="w", hidden="o", f="f"), tree(a__b="d711", gone__x="d", hidden__y="d", f__z="d", only="d705")]

    below = Underneath(load)
    assert calls == []
    asked = (b"a", b"a/b", b"gone", b"gone/x", b"hidden", b"hidden/y", b"f", b"f/z", b"only", b"no")
    found = {path: below(path) for path in asked}
    modes = {path: inode and stat.S_IMODE(inode.mode) for path, inode in found.items()}
    assert modes == {
        b"a": 0o700,
        b"a/b": 0o711,
        b"gone": None,
        b"gone/x": None,
        b"hidden": 0o755,
        b"hidden/y": None,
        b"f": 0o644,
        b"f/z": None,
        b"only": 0o705,
        b"no": None,
    }
    assert below(b"") is not None
    assert calls == [1]
    assert Underneath(list)(b"") is None


def test_a_tree_is_moved_below_a_directory_that_looks_like_the_parents() -> None:
    below = Underneath(lambda: [tree(etc="d750")])
    moved = rooted(tree(x="f"), "/etc/deep/here", below)
    assert paths(moved) == ["etc", "etc/deep", "etc/deep/here", "etc/deep/here/x"]
    etc = leading(moved.root, b"etc", below)
    assert stat.S_IMODE(etc.mode) == 0o750
    assert rooted(moved, "/", below) is moved


def test_marks_are_dropped_from_a_tree_with_nothing_below() -> None:
    value = tree(a="o", a__w="w", b__c="w", b__d="f")
    drop_marks(value)
    assert paths(value) == ["a", "b", "b/d"]
    assert all(not inode.xattrs for _, inode in value.walk())


def test_excludes_take_subtrees_along() -> None:
    value = tree(a__b__c="f", a__d="f", e="f")
    exclude(value, Excludes(["/a/b/", "e"]))
    assert paths(value) == ["a", "a/d"]


def test_a_toolkit_is_cut_to_its_prefix() -> None:
    value = tree(opt__tool__bin="f", opt__other__x="f", opt__empty="d", etc__y="f", gone="w")
    assert cut_to_prefix(value, "/opt/tool") == ["/etc/y", "/gone", "/opt/other/x"]
    assert paths(value) == ["opt", "opt/tool", "opt/tool/bin"]
    assert cut_to_prefix(tree(opt="f"), "/opt/tool") == []


def test_inputs_are_found_beside_the_layer_file(tmp_path: Path) -> None:
    (tmp_path / "p/sub").mkdir(parents=True)
    (tmp_path / "p/in").symlink_to("sub")
    (tmp_path / "p/out").symlink_to("../other")
    (tmp_path / "p/loop").symlink_to("loop")
    (tmp_path / "other").mkdir()
    assert resolve_input(tmp_path / "p", "in") == tmp_path / "p/sub"
    assert resolve_input(tmp_path / "p", str(tmp_path / "other")) == tmp_path / "other"
    for text in ("out", "../other", "sub/../../other"):
        with pytest.raises(UsageError, match="leads out"):
            resolve_input(tmp_path / "p", text)
    with pytest.raises(NotFound):
        resolve_input(tmp_path / "p", "none")
    with pytest.raises(UsageError, match="cannot be reached"):
        resolve_input(tmp_path / "p", "loop")


def test_the_key_of_an_input_is_its_content(tmp_path: Path) -> None:
    def key(epoch: int | None = None) -> str:
        return input_key(DirectorySource(tmp_path / "d").ingest, epoch)

    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_text("1")
    os.utime(tmp_path / "d/a", (50, 50))
    os.utime(tmp_path / "d", (50, 50))
    first, with_epoch = key(), key(10)
    os.utime(tmp_path / "d/a", (60, 60))
    assert key() != first
    assert key(10) == with_epoch
    (tmp_path / "d/a").write_text("2")
    os.utime(tmp_path / "d/a", (50, 50))
    assert key(10) != with_epoch
    (tmp_path / "d/a").write_text("1")
    os.utime(tmp_path / "d/a", (50, 50))
    (tmp_path / "d/a").chmod(0o600)
    assert key(10) != with_epoch


def test_a_hole_is_hashed_as_zeros() -> None:
    sink = HashSink()
    one, two = Inode(stat.S_IFREG), Inode(stat.S_IFREG)
    sink.stream(one, 3 << 20, [b"a", (3 << 20) - 2, b"b"])
    sink.whole(two, b"a" + bytes((3 << 20) - 2) + b"b")
    assert sink.digests[one] == sink.digests[two]
    assert one.size == two.size == 3 << 20


def everything(sink: ContentSink, progress: Progress) -> Tree:
    """Every kind of inode."""
    value = Tree(Inode(stat.S_IFDIR | 0o711, 5, 6, 100, 7))
    children = value.root.children
    assert children is not None
    children[b"dir"] = directory = Inode(stat.S_IFDIR | 0o1777, 1, 2, 50)
    directory.xattrs = ((b"user.x", b"y"),)
    file = Inode(stat.S_IFREG | 0o4755, 3, 4, 60, 999)
    sink.whole(file, b"content")
    assert directory.children is not None
    directory.children[b"file"] = children[b"link"] = file
    children[b"sparse"] = sparse = Inode(stat.S_IFREG | 0o600)
    sink.stream(sparse, 1 << 20, [b"a", (1 << 20) - 1])
    children[b"symlink"] = symlink = Inode(stat.S_IFLNK | 0o777, 8, 9, 70)
    symlink.data = b"/no/where"
    children[b"again"] = symlink
    children[b"fifo"] = Inode(stat.S_IFIFO | 0o644)
    children[b"device"] = device = Inode(stat.S_IFCHR | 0o640)
    device.rdev = os.makedev(1, 3)
    children[b"\xff"] = Inode(stat.S_IFDIR | 0o755)
    sink.whole(Inode(stat.S_IFREG), b"of no file in the end")
    return value


@pytest.mark.root
def test_a_tree_is_written_out_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    value = materialize(everything, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    again = DirectorySource(target)
    sink = HashSink()
    tree = again.ingest(sink, SILENT)
    seen = {
        path: (inode.mode, inode.uid, inode.gid, inode.mtime, inode.mtime_ns, inode.xattrs, inode.rdev, inode.size)
        for path, inode in tree.walk()
    }
    made = {
        path: (inode.mode, inode.uid, inode.gid, inode.mtime, inode.mtime_ns, inode.xattrs, inode.rdev, inode.size)
        for path, inode in value.walk()
    }
    # The length of a link is not set by the maker of this tree.
    for path in (b"symlink", b"again"):
        assert seen.pop(path)[:5] == made.pop(path)[:5]
    assert seen == made
    assert (target / "dir/file").read_text() == "content"
    assert (target / "dir/file").samefile(target / "link")
    assert os.lstat(target / "symlink").st_ino == os.lstat(target / "again").st_ino
    assert (target / "sparse").stat().st_blocks < 100


@pytest.mark.root
def test_a_stream_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    def short(sink: ContentSink, progress: Progress) -> Tree:
        sink.stream(Inode(stat.S_IFREG), 5, [b"abc"])
        return Tree()

    (tmp_path / "t").mkdir()
    with pytest.raises(InputError, match="5 bytes gave 3"):
        materialize(short, tmp_path / "t")


@pytest.mark.root
def test_a_tree_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    def deep(sink: ContentSink, progress: Progress) -> Tree:
        value = Tree()
        here = value.root
        for _ in range(600):
            assert here.children is not None
            deeper = here.children[b"d"] = Inode(stat.S_IFDIR | 0o755)
            here = deeper
        return value

    (tmp_path / "t").mkdir()
    with pytest.raises(LimitError, match="512 directories deep"):
        materialize(deep, tmp_path / "t")
