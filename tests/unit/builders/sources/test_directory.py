"""The directory source: equal to what ``lstat`` and friends say, excludes, changes while it reads, hostile names."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.builders.excludes import Excludes
from dsec_layers.builders.names import Limits, Overrides
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.builders.sources.scan import Directory
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import InputError, LimitError, UsageError
from tests.kit.descriptors import open_files, opened_since
from tests.kit.oracle import MemorySink, Snapshot, diff, snapshot_dir, snapshot_tree

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: device nodes, owners, trusted attributes")


def read(path: Path, **options: object) -> Snapshot:
    sink = MemorySink()
    tree = DirectorySource(path, **options).ingest(sink)  # type: ignore[arg-type]
    return snapshot_tree(tree, sink.content)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/e").mkdir(parents=True)
    (root / "d/f").write_bytes(b"content" * 1000)
    (root / "d/e/big").write_bytes(os.urandom((2 << 20) + 77))
    (root / "empty").write_bytes(b"")
    os.link(root / "d/f", root / "hard")
    (root / "link").symlink_to("../outside")
    os.link(root / "link", root / "d/hard-link", follow_symlinks=False)
    os.mkfifo(root / "fifo")
    os.link(root / "fifo", root / "fifo2")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    os.link(root / "socket", root / "d/socket2")
    (root / "d").chmod(0o1751)
    (root / "d/f").chmod(0o4755)
    os.utime(root / "empty", ns=(0, 123_456_789_012_345_678))
    os.utime(root / "link", ns=(0, -1_500_000_000), follow_symlinks=False)
    os.setxattr(root / "d/f", "user.binary", b"\0\xff" * 100)
    os.setxattr(root / "d", "user.empty", b"")
    with open(os.fsencode(root) + b"/odd \xff\n name", "wb") as stream:
        stream.write(b"odd")
    return root


def test_a_directory_equals_itself(tree: Path) -> None:
    found = read(tree)
    assert diff(found, snapshot_dir(tree)) == []
    assert found[b"fifo"].nlink == found[b"socket"].nlink == found[b"link"].nlink == 2
    assert found[b"odd \xff\n name"].size == 3


@needs_root
@pytest.mark.root
def test_owners_devices_and_privileged_attributes(tree: Path) -> None:
    os.mknod(tree / "char", stat.S_IFCHR | 0o620, os.makedev(5, 300))
    os.mknod(tree / "block", stat.S_IFBLK | 0o660, os.makedev(259, 70000))
    os.link(tree / "char", tree / "char2")
    os.chown(tree / "d/f", 3_000_000_000, 12)
    os.setxattr(tree / "d/f", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.setxattr(tree / "link", "trusted.on-a-link", b"\0", follow_symlinks=False)
    os.setxattr(tree / "fifo", "trusted.on-a-fifo", b"v", follow_symlinks=False)
    acl = b"\2\0\0\0" + b"".join(
        item.to_bytes(2, "little") + perm.to_bytes(2, "little") + b"\xff\xff\xff\xff" for item, perm in ((1, 6), (4, 4), (32, 4))
    )
    os.setxattr(tree / "d", "system.posix_acl_default", acl)
    assert diff(read(tree), snapshot_dir(tree)) == []


def test_a3_hard_links_are_read_once(tree: Path) -> None:
    sink = MemorySink()
    DirectorySource(tree).ingest(sink)
    assert len(sink.pieces) == 4


def test_b9_an_empty_directory(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert list(found) == [b""] and diff(found, snapshot_dir(tmp_path)) == []


def test_b11_order_of_creation_does_not_matter(tmp_path: Path) -> None:
    orders = []
    for number, names in enumerate((["a", "b", "c/x", "c/y"], ["c/y", "b", "c/x", "a"])):
        root = tmp_path / str(number)
        (root / "c").mkdir(parents=True)
        for name in names:
            (root / name).write_bytes(name.encode())
        sink = MemorySink()
        DirectorySource(root).ingest(sink)
        orders.append(list(sink.pieces.values()))
    assert orders[0] == orders[1]


def test_b13_a_tar_of_a_directory_gives_the_same_tree(tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    (tree / "fifo2").unlink()  # GNU tar stores the names of a fifo as several fifos
    proc.run(["tar", "-C", tree, "--format=posix", "--xattrs", "--xattrs-include=*", "--exclude=*socket*", "-cf", archive, "."])
    sink = MemorySink()
    from_tar = snapshot_tree(TarSource(archive).ingest(sink), sink.content)
    assert diff(read(tree, excludes=["*socket*"]), from_tar) == []


def test_overrides_and_limits(tree: Path) -> None:
    found = read(tree, overrides=Overrides(uid=1, gid=2, epoch=10))
    assert {(node.uid, node.gid) for node in found.values()} == {(1, 2)} and max(node.mtime for node in found.values()) == 10 * 10**9
    assert found[b"link"].mtime == -1_500_000_000
    with pytest.raises(LimitError, match="more than 5 files"):
        read(tree, limits=Limits(inodes=5))
    with pytest.raises(LimitError, match="100 bytes in all"):
        read(tree, limits=Limits(attribute_bytes=100))


@needs_root
@pytest.mark.root
def test_overlayfs_attributes_do_not_get_into_a_layer(tree: Path) -> None:
    os.setxattr(tree / "d", "trusted.overlay.opaque", b"y")
    os.setxattr(tree / "d", "user.overlay.own", b"content")
    found = read(tree)
    assert set(found[b"d"].xattrs) == {b"user.empty", b"user.overlay.own"}


# -- excludes


@pytest.mark.parametrize(
    ("patterns", "gone"),
    [
        (["*.pyc"], {b"a.pyc", b"d/b.pyc", b"d/e/c.pyc"}),
        (["/a.pyc"], {b"a.pyc"}),
        (["d/*.pyc"], {b"d/b.pyc"}),
        (["d/**/*.pyc"], {b"d/b.pyc", b"d/e/c.pyc"}),
        (["**/c.pyc"], {b"d/e/c.pyc"}),
        (["./d/e"], {b"d/e", b"d/e/c.pyc", b"d/e/n"}),
        (["n/"], {b"d/e/n"}),
        (["n"], {b"d/e/n", b"d/n"}),
        (["[ab].pyc"], {b"a.pyc", b"d/b.pyc"}),
        (["[!a].pyc"], {b"d/b.pyc", b"d/e/c.pyc"}),
        (["?.pyc", "x"], {b"a.pyc", b"d/b.pyc", b"d/e/c.pyc", b"x"}),
        (["d/**"], {b"d/b.pyc", b"d/e", b"d/e/c.pyc", b"d/e/n", b"d/n"}),
        ([r"\*"], {b"*"}),
        (["[*]"], {b"*"}),
        (["*"], {b"a.pyc", b"d", b"d/b.pyc", b"d/e", b"d/e/c.pyc", b"d/e/n", b"d/n", b"x", b"*"}),
        ([], set()),
    ],
)
def test_excludes(tmp_path: Path, patterns: list[str], gone: set[bytes]) -> None:
    (tmp_path / "d/e/n").mkdir(parents=True)
    for name in ("a.pyc", "d/b.pyc", "d/e/c.pyc", "d/n", "x", "*"):
        (tmp_path / name).write_bytes(b"")
    everything = snapshot_dir(tmp_path).keys()
    assert everything - read(tmp_path, excludes=patterns).keys() == gone


def test_excludes_speak_of_bytes() -> None:
    assert Excludes(["é*"]).match("é1".encode(), is_dir=False)
    assert Excludes(["a?b"]).match(b"a\nb", is_dir=False) and not Excludes(["a?b"]).match(b"a/b", is_dir=False)
    assert Excludes(["a.b"]).match(b"a.b", is_dir=False) and not Excludes(["a.b"]).match(b"axb", is_dir=False)
    assert Excludes(["[]x]"]).match(b"]", is_dir=False) and Excludes(["[a-c^]"]).match(b"^", is_dir=False)
    assert Excludes(["[z"]).match(b"[z", is_dir=False)
    for bad in ("", "/", "//", "a\0b"):
        with pytest.raises(UsageError):
            Excludes([bad])


# -- what goes wrong


class Meddler(MemorySink):
    """Does something to the tree the first time a file's content arrives."""

    def __init__(self, deed: Callable[[], object]) -> None:
        super().__init__()
        self.deed: Callable[[], object] | None = deed

    def stream(self, inode: Inode, size: int, pieces) -> None:  # type: ignore[no-untyped-def]
        pieces = iter(pieces)
        first = next(pieces)
        if self.deed:
            self.deed()
        super().stream(inode, size, [first, *pieces])


def overwrite(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.write(b"x")


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "deed",
    [
        lambda path: os.truncate(path, 1 << 20),
        lambda path: path.write_bytes(bytes(5 << 20)),
        lambda path: overwrite(path),
        lambda path: path.chmod(0o600),
    ],
    ids=["truncated", "grown", "written", "chmod"],
)
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, deed: Callable[[Path], object]) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(3 << 20))
    os.utime(path, ns=(0, 0))
    with pytest.raises(InputError, match="'f' changed while it was read"):
        DirectorySource(tmp_path).ingest(Meddler(lambda: deed(path)))


@pytest.mark.parametrize(
    "deed",
    [
        lambda root: (root / "b").unlink(),
        lambda root: (root / "b").write_bytes(b"other"),
        lambda root: ((root / "b").unlink(), (root / "b").symlink_to("/etc/passwd")),
        lambda root: make_fifo(root / "b"),
        lambda root: ((root / "b").unlink(), (root / "b").mkdir()),
        lambda root: ((root / "d").rename(root / "gone"), (root / "d").symlink_to("/etc")),
        lambda root: (root / "d").rename(root / "gone"),
    ],
    ids=["gone", "rewritten", "symlink", "fifo", "directory", "parent-symlink", "parent-gone"],
)
def test_a_file_that_changes_between_scan_and_reading(tmp_path: Path, deed: Callable[[Path], object]) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "b").write_bytes(b"before")
    (tmp_path / "d/passwd").write_bytes(b"mine")
    with Directory(tmp_path, lambda path, is_dir, name, value: name) as directory:
        scan = directory.scan()
        deed(tmp_path)
        with pytest.raises(InputError, match="changed while it was read"):
            for file in scan.files:
                directory.feed(file, MemorySink())


def test_directories_that_are_swapped_for_links_do_not_lead_out(tmp_path: Path) -> None:
    """Another thread swaps a directory for a link to one outside; whatever the reader says, it never brings the outside in."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d/f").write_bytes(b"public")
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for one, two in (("d", "tmp"), ("link", "d"), ("d", "link"), ("tmp", "d")):
                (root / one).rename(root / two)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            sink = MemorySink()
            try:
                DirectorySource(root).ingest(sink)
            except InputError:
                continue
            assert all(piece == b"public" for pieces in sink.pieces.values() for _, piece in pieces)
    finally:
        stop.set()
        thread.join()


def test_without_root_what_can_be_read_is_and_what_cannot_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        (root / "f").write_bytes(b"readable")
        os.setxattr(root / "f", "user.x", b"1")
        (root / "secret").write_bytes(b"x")
        (root / "secret").chmod(0)
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)
        try:
            found = read(root, excludes=["secret"])
            with pytest.raises(InputError, match="cannot read 'secret': Permission denied") as caught:
                read(root)
        finally:
            os.seteuid(me)
        assert found[b"f"].xattrs == {b"user.x": b"1"} and caught.value.hint == "run as root, or exclude it"


def test_descriptors_are_given_back(tree: Path) -> None:
    before = open_files()
    read(tree)
    with pytest.raises(LimitError):
        read(tree, limits=Limits(inodes=5))
    assert opened_since(before) == []


def test_depth_is_bounded(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(514):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    with pytest.raises(LimitError, match="512 directories deep"):
        read(tmp_path)


def test_no_such_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    for name in ("none", "f"):
        with pytest.raises(InputError, match="cannot open the directory"):
            read(tmp_path / name)
    assert DirectorySource(tmp_path).describe() == {"kind": "directory", "name": str(tmp_path)}
    assert DirectorySource(tmp_path).image_config is None


def test_holes_are_found_where_the_file_system_tells(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as stream:
        stream.truncate(1 << 30)
        os.pwrite(stream.fileno(), b"middle", 500 << 20)
    sink = MemorySink()
    tree = DirectorySource(tmp_path).ingest(sink)
    assert tree.root.children is not None
    inode = tree.root.children[b"f"]
    stored = sum(len(piece) for _, piece in sink.pieces[inode])
    assert inode.size == 1 << 30 and stored <= 1 << 16 and sink.holes[inode] == inode.size - stored
