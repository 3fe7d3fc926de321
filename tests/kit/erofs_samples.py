"""Trees to write as EROFS images: named samples, generated odd ones, and real directories with their data."""

from __future__ import annotations

import os
import stat
import struct
from array import array
from pathlib import Path

from hypothesis import strategies as st

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.tree import HOLE, Inode, Tree

__all__ = [
    "SAMPLES",
    "Sample",
    "add",
    "assert_same",
    "directory",
    "make_source",
    "pack_directory",
    "patched",
    "regular",
    "symlink",
    "trees",
]

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
"""A security.capability the kernel takes for one: cap_net_bind_service, effective and permitted."""

Sample = tuple[Tree, list[int]]
"""A tree and the block counts of its devices."""


def add(parent: Inode, name: bytes, inode: Inode) -> Inode:
    """Put ``inode`` into a directory; gives it back."""
    assert parent.children is not None
    parent.children[name] = inode
    return inode


def directory(parent: Inode, name: bytes, mode: int = 0o755) -> Inode:
    """A new directory in ``parent``."""
    return add(parent, name, Inode(stat.S_IFDIR | mode))


def regular(parent: Inode, name: bytes, data: bytes, mode: int = 0o644) -> Inode:
    """A new small file, stored inline."""
    inode = add(parent, name, Inode(stat.S_IFREG | mode))
    inode.data, inode.size = data, len(data)
    return inode


def symlink(parent: Inode, name: bytes, target: bytes) -> Inode:
    """A new symbolic link."""
    inode = add(parent, name, Inode(stat.S_IFLNK | 0o777))
    inode.data, inode.size = target, len(target)
    return inode


def chunked(tree: Tree, parent: Inode, name: bytes, size: int, extents: list[int], bits: int = 16) -> Inode:
    """A new file whose data lies on devices."""
    inode = add(parent, name, Inode(stat.S_IFREG | 0o644))
    inode.size, inode.chunk_bits = size, bits
    inode.extent_at, inode.extent_count = len(tree.extents), len(extents)
    tree.extents.extend(extents)
    return inode


def empty() -> Sample:
    """Only a root, no devices."""
    return Tree(), []


def everything() -> Sample:
    """One of everything, on two devices."""
    tree = Tree()
    root = tree.root
    small = regular(root, b"a", b"hello\n")
    small.uid, small.gid, small.mtime, small.mtime_ns = 1, 2, 1_700_000_000, 5
    small.xattrs = ((b"security.capability", CAPABILITY), (b"user.x", b""))
    big = chunked(tree, root, b"-dash", 3 * 65536 + 1, [1 << 32, 1 << 32 | 16, HOLE, 2 << 32 | 3])
    big.uid, big.gid, big.mtime, big.mtime_ns = 70_000, 70_001, -5, 999_999_999
    symlink(root, b"link", b"../target")
    add(root, b"null", Inode(stat.S_IFCHR | 0o600)).rdev = os.makedev(4, 70_000)
    add(root, b"disk", Inode(stat.S_IFBLK | 0o660)).rdev = os.makedev(259, 3)
    add(root, b"gone", Inode(stat.S_IFCHR))
    add(root, b"\xff\x01", Inode(stat.S_IFIFO | 0o600))
    add(root, b"socket", Inode(stat.S_IFSOCK | 0o755))
    sub = directory(root, b"sub", 0o1777)
    sub.mtime = 7
    add(sub, b"again", small)
    regular(sub, b"empty", b"")
    return tree, [32, 4]


def attributes() -> Sample:
    """Extended attributes alone, shared, many, and of every name space."""
    tree = Tree()
    tree.root.xattrs = ((b"trusted.overlay.opaque", b"y"),)
    for number in range(6):
        inode = regular(tree.root, b"label%d" % number, b"x" * number)
        inode.xattrs = ((b"security.selinux", b"system_u:object_r:etc_t:s0\0"), (b"user.number", b"%d" % number))
    acl = struct.pack("<IHHIHHI", 2, 1, 7, 0xFFFFFFFF, 4, 5, 0xFFFFFFFF)
    folder = directory(tree.root, b"acl")
    folder.xattrs = ((b"system.posix_acl_access", acl), (b"system.posix_acl_default", acl))
    many = symlink(tree.root, b"many", b"t")
    many.xattrs = tuple((b"trusted.%03d" % number, bytes([number]) * number) for number in range(200))
    return tree, []


def blocks() -> Sample:
    """What does not fit behind its inode: directories of several blocks, long links, contents near a block."""
    tree = Tree()
    wide = directory(tree.root, b"wide")
    for number in range(700):
        regular(wide, b"%04d-" % number + b"n" * (number % 40), b"")
    full = directory(tree.root, b"full")
    for number in range(135):
        regular(full, b"%03d" % number + b"." * 15, b"")
    regular(full, b"x" * 7, b"")  # 13 + 14 for "." and "..", 135 times 12 + 18, 12 + 7: exactly one block
    symlink(tree.root, b"link", b"../" * 1365)
    nearly = regular(tree.root, b"nearly", b"z" * 4095)
    nearly.xattrs = ((b"user.a", b"b"),)
    for number in range(20):
        regular(tree.root, b"small%02d" % number, b"s" * (number * 150))
    return tree, []


def same_time() -> Sample:
    """All times alike, so that every inode is of the short form; and one that needs the long form."""
    tree, devices = everything()
    for _, inode in tree.walk():
        inode.mtime, inode.mtime_ns = 1_600_000_000, 0
    return tree, devices


SAMPLES = {sample.__name__: sample for sample in (empty, everything, attributes, blocks, same_time)}


def patched(image: bytes, at: int, data: bytes) -> bytes:
    """``image`` with other bytes at ``at`` and no superblock checksum, so that the change is not refused for that alone."""
    changed = bytearray(image)
    changed[at : at + len(data)] = data
    changed[fmt.SUPER_OFFSET + 8] &= ~fmt.FEATURE_COMPAT_SB_CHKSUM
    return bytes(changed)


def assert_same(one: Tree, other: Tree) -> None:
    """Equal in every path, attribute, link and extent."""
    left, right = list(one.walk()), list(other.walk())
    assert [path for path, _ in left] == [path for path, _ in right]
    pairs: dict[int, int] = {}
    for (path, a), (_, b) in zip(left, right, strict=True):
        for name in ("mode", "uid", "gid", "mtime", "mtime_ns", "rdev", "size", "xattrs", "extent_count"):
            assert getattr(a, name) == getattr(b, name), (path, name)
        assert (a.data or b"") == (b.data or b""), path
        if a.extent_count:
            assert a.chunk_bits == b.chunk_bits, path
            mine = one.extents[a.extent_at : a.extent_at + a.extent_count]
            assert mine == other.extents[b.extent_at : b.extent_at + b.extent_count], path
        assert pairs.setdefault(id(a), id(b)) == id(b), path
    assert len(set(pairs.values())) == len(pairs)


# --- generated ---------------------------------------------------------------------------------------------------------------------------------

_NAMES = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.binary(min_size=255, max_size=255),
    st.sampled_from([b"-", b".a", b"...", b"..a", b"\xff", b" ", b"\n", b".wh.x", b"a", b"b"]),
).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"0")).filter(lambda name: name not in (b".", b".."))  # fmt: skip

_XATTRS = st.dictionaries(
    st.one_of(
        st.sampled_from([b"system.posix_acl_access", b"trusted.overlay.opaque", b"security.capability", b"user." + b"u" * 250]),
        st.text("abc.", min_size=1, max_size=3).map(lambda text: b"user." + text.encode()),
    ),
    st.one_of(st.binary(max_size=20), st.just(b"a value that is shared by many"), st.just(b"v" * 5000)),
    max_size=4,
).map(lambda pairs: tuple(sorted({**pairs, **{name: CAPABILITY for name in pairs if name == b"security.capability"}}.items())))

_TIMES = st.sampled_from([(0, 0), (0, 0), (1_700_000_000, 0), (1_700_000_000, 123_456_789), (-1, 999_999_999), (1 << 40, 1)])
_IDS = st.sampled_from([0, 0, 1000, 65535, 65536, fmt.MAX_ID])


@st.composite
def trees(draw: st.DrawFn) -> Sample:
    """Odd but legal trees: binary names, hard links of every kind, attributes, holes, several devices, wide and deep directories."""
    tree = Tree()
    devices = draw(st.lists(st.integers(1, 300), max_size=4))
    folders: list[Inode] = [tree.root]
    others: list[Inode] = []
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.sampled_from(folders))
        name = draw(_NAMES)
        if parent.children is None or name in parent.children:
            continue
        kind = draw(st.sampled_from(["dir", "dir", "small", "small", "chunked", "link", "special", "again"]))
        if kind == "again":
            if others:
                add(parent, name, draw(st.sampled_from(others)))
            continue
        inode = _draw_inode(draw, kind, tree, parent, name, devices)
        inode.mode |= draw(st.sampled_from([0, 0o644, 0o4755, 0o7777]))
        inode.uid, inode.gid = draw(_IDS), draw(_IDS)
        inode.mtime, inode.mtime_ns = draw(_TIMES)
        inode.xattrs = draw(_XATTRS)
        if kind == "dir":
            folders.append(inode)
        elif inode.mode & 0o170000 != stat.S_IFCHR or inode.rdev:
            others.append(inode)
    if draw(st.booleans()):
        _fill(draw, draw(st.sampled_from(folders)))
    return tree, devices


def _draw_inode(draw: st.DrawFn, kind: str, tree: Tree, parent: Inode, name: bytes, devices: list[int]) -> Inode:
    if kind == "dir":
        return directory(parent, name, 0)
    if kind == "small":
        return regular(parent, name, b"d" * draw(st.sampled_from([0, 1, 100, 2000, 4000, 4095])), 0)
    if kind == "link":
        return symlink(parent, name, b"t" * draw(st.sampled_from([1, 50, 1000, 4095])))
    if kind == "special":
        inode = add(parent, name, Inode(draw(st.sampled_from([stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK]))))
        if inode.mode & 0o170000 in (stat.S_IFCHR, stat.S_IFBLK):
            inode.rdev = draw(st.sampled_from([0, os.makedev(1, 3), os.makedev(fmt.MAX_MAJOR, fmt.MAX_MINOR)]))
        return inode
    bits = draw(st.integers(12, 18))
    extents = []
    for _ in range(draw(st.integers(1, 5))):
        usable = [number for number, blocks in enumerate(devices, 1) if blocks >= 1 << bits - 12]
        if not usable or draw(st.booleans()):
            extents.append(HOLE)
        else:
            number = draw(st.sampled_from(usable))
            extents.append(number << 32 | draw(st.integers(0, devices[number - 1] - (1 << bits - 12))))
    size = len(extents) << bits
    return chunked(tree, parent, name, size - draw(st.integers(0, (1 << bits) - 1)), extents, bits)


def _fill(draw: st.DrawFn, folder: Inode) -> None:
    """Thousands of names in one directory, or a long chain of directories below it."""
    if draw(st.booleans()):
        length = draw(st.integers(1, 250))
        for number in range(draw(st.integers(1, 3000))):
            regular(folder, b"%05d" % number + b"w" * (number * length % 250), b"")
        return
    for _ in range(draw(st.integers(1, 200))):
        folder = directory(folder, b"deep") if folder.children is not None and b"deep" not in folder.children else folder


# --- real directories --------------------------------------------------------------------------------------------------------------------------


def _below(path: Path) -> list[Path]:
    """All names below a directory. (pathlib's rglob of Python 3.11.2 fails on a link whose target is too long a name.)"""
    return [Path(place, name) for place, folders, names in os.walk(path) for name in [*folders, *names]]


def make_source(path: Path) -> Path:
    """A directory with some of everything that the user may make; root makes more."""
    path.mkdir()
    for name, size in {"empty": 0, "small": 100, "below": 4095, "block": 4096, "above": 4097, "two": 8192, "large": 300_000}.items():
        (path / name).write_bytes((name.encode() * size)[:size])
    (path / "again").write_bytes((path / "large").read_bytes())
    with (path / "sparse").open("wb") as stream:
        stream.seek(1 << 20)
        stream.write(b"end")
    deep = path / "d" / "e" / "f"
    deep.mkdir(parents=True)
    os.link(path / "large", deep / "large-too")
    os.link(path / "small", path / "d" / "small-too")
    for name, target in {"ln": "x", "broken": "y" * 1000, "long": "z" * 4000}.items():
        (path / name).symlink_to(target)
    os.mkfifo(path / "fifo")
    for folder, count in {"wide": 1200, "exact": 180}.items():
        (path / folder).mkdir()
        for number in range(count):
            (path / folder / f"{number:05}-{'q' * (number % 50)}").touch()
    os.close(os.open(os.fsencode(path) + b"/\xff\xfe\x01" + b"n" * 250, os.O_CREAT | os.O_WRONLY))
    (path / "d").chmod(0o1777)
    (path / "below").chmod(0o4755)
    for number in range(30):
        os.setxattr(path / "exact" / f"{number:05}-{'q' * (number % 50)}", "user.shared", b"one value for many inodes")
    os.setxattr(path / "large", "user.long", b"v" * 2000)
    if os.geteuid() == 0:
        os.mknod(path / "null", 0o20666, os.makedev(1, 3))
        os.mknod(path / "disk", 0o60600, os.makedev(259, 70_000))
        os.chown(path / "small", 1000, 70_000)
        os.setxattr(path / "d", "trusted.overlay.opaque", b"y")
        os.setxattr(path / "large", "security.capability", CAPABILITY)
    # Old times: mkfs.erofs drops the nanoseconds of a file as young as its image.
    for nth, place in enumerate([path, *sorted(_below(path))]):
        os.utime(place, ns=(5, (1_600_000_000 + nth % 7) * 10**9 + nth % 3 * 123_456_789), follow_symlinks=False)
    return path


def pack_directory(source: Path, *, inline: int = 0, bits: int = 14, segment: int = 64) -> tuple[Tree, list[bytes]]:
    """The tree of a directory and the segments that hold its data, each chunk once. Slurps everything: for tests only."""
    tree = Tree()
    segments: list[bytearray] = []
    inodes: dict[tuple[int, int], Inode] = {}
    chunks: dict[bytes, int] = {}

    def store(data: bytes) -> int:
        if not data.strip(b"\0"):
            return HOLE
        if data not in chunks:
            padded = data + bytes(-len(data) % 4096)
            if not segments or len(segments[-1]) + len(padded) > segment * 4096:
                segments.append(bytearray())
            chunks[data] = len(segments) << 32 | len(segments[-1]) // 4096
            segments[-1] += padded
        return chunks[data]

    def visit(path: bytes) -> Inode:
        info = os.lstat(path)
        known = inodes.get((info.st_dev, info.st_ino))
        if known is not None:
            return known
        inode = Inode(info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns // 10**9, info.st_mtime_ns % 10**9)
        inodes[info.st_dev, info.st_ino] = inode
        names = os.listxattr(path, follow_symlinks=False)
        inode.xattrs = tuple(sorted((os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)) for name in names))
        if stat.S_ISLNK(info.st_mode):
            inode.data, inode.size = os.readlink(path), info.st_size  # noqa: PTH115
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as stream:
                data = stream.read()
            inode.size = len(data)
            if len(data) <= inline:
                inode.data = data
            else:
                pieces = [store(data[at : at + (1 << bits)]) for at in range(0, len(data), 1 << bits)]
                inode.chunk_bits, inode.extent_at, inode.extent_count = bits, len(tree.extents), len(pieces)
                tree.extents += array("Q", pieces)
        elif inode.children is not None:
            inode.children.update((os.fsencode(name), visit(path + b"/" + os.fsencode(name))) for name in os.listdir(path))  # noqa: PTH208
        else:
            inode.rdev = info.st_rdev
        return inode

    tree.root = visit(os.fsencode(source))
    return tree, [bytes(segment) for segment in segments]
