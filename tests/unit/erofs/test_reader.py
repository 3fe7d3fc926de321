"""What the reader gives for good images and says of bad ones."""

from __future__ import annotations

import mmap
import stat
import struct
from pathlib import Path

import pytest

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import HOLE, Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import ImageError
from tests.kit.erofs_samples import CAPABILITY, SAMPLES, add, assert_same, chunked, directory, patched, regular, symlink


def place(image: bytes, path: bytes) -> int:
    """The byte offset of an inode."""
    read = Image(image)
    nid = read.lookup(path)
    assert nid is not None
    return read.superblock.meta_blkaddr * 4096 + nid * 32


def dirent(image: bytes, name: bytes) -> int:
    """The byte offset of the entry called ``name`` in the root, which must be inline."""
    read = Image(image)
    table = read.scan().inodes
    at = int(table.body_at[list(table.nid).index(read.superblock.root_nid)])
    names = sorted([*read.directory(read.superblock.root_nid), b".", b".."])
    return at + 12 * names.index(name)


# --- good ones ---------------------------------------------------------------------------------------------------------------------------------


def test_a_path_leads_to_an_inode() -> None:
    tree, devices = SAMPLES["everything"]()
    image = Image(render(tree, devices))
    nid = image.lookup(b"sub/again")
    assert nid == image.lookup(b"/a/") and nid is not None
    info = image.inode(nid)
    assert (info.mode, info.nlink, info.uid, info.size, info.mtime_ns) == (stat.S_IFREG | 0o644, 2, 1, 6, 5)
    assert dict(image.xattrs(nid)) == {b"security.capability": CAPABILITY, b"user.x": b""}
    assert image.lookup(b"sub/nothing") is None and image.lookup(b"a/below-a-file") is None
    assert image.read(nid, 1, 3) == b"ell" and image.read(nid, 6, 10) == b""
    assert image.read(image.lookup(b"link") or 0, 0, 100) == b"../target"


def test_data_on_devices_is_read_from_the_flat_view() -> None:
    tree = Tree()
    chunked(tree, tree.root, b"f", 3 * 4096 - 10, [2 << 32 | 1, HOLE, 1 << 32], bits=12)
    devices = [bytes([1]) * 4096, bytes([2]) * 4096 + bytes([3]) * 4096]
    image = render(tree, [1, 2])
    flat = Image(image + b"".join(devices))
    nid = flat.lookup(b"f") or 0
    assert flat.read(nid, 0, 1 << 20) == bytes([3]) * 4096 + bytes(4096) + bytes([1]) * 4086
    assert flat.read(nid, 4095, 2) == b"\x03\0"
    assert list(flat.extents(nid)) == [2 << 32 | 1, HOLE, 1 << 32]
    with pytest.raises(ImageError, match="not in this buffer"):
        Image(image).read(nid, 0, 1)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(kind: type) -> None:
    tree, devices = SAMPLES["everything"]()
    assert_same(tree, Image(kind(render(tree, devices))).tree())


def test_a_mapped_file_will_do(tmp_path: Path) -> None:
    tree, devices = SAMPLES["blocks"]()
    path = tmp_path / "image"
    path.write_bytes(render(tree, devices))
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        image = Image(view)
        assert_same(tree, image.tree())
        del image


# --- the superblock ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"\0", "not an EROFS image"),
        (12, b"\x0b", "blocks of 2\\^11 bytes"),
        (80, b"\x8c", "incompatible features 0x80"),
        (90, b"\1", "directory blocks"),
        (36, b"\xff\xff", "cut short"),
        (32, b"\xff\xff\xff\xff", "nanoseconds"),
        (88, b"\xff\xff", "device table"),
        (88, b"\0\0", "device table"),
        (14, b"\xff\xff", "outside the image"),
    ],
)
def test_a_bad_superblock_is_refused(at: int, data: bytes, says: str) -> None:
    image = patched(render(*SAMPLES["everything"]()), 1024 + at, data)
    with pytest.raises(ImageError, match=says):
        Image(image).scan()


def test_a_wrong_checksum_is_refused() -> None:
    image = bytearray(render(*SAMPLES["everything"]()))
    image[1024 + 48] ^= 1
    with pytest.raises(ImageError, match="checksum"):
        Image(image)


@pytest.mark.parametrize("size", [0, 1024, 4095])
def test_too_few_bytes_are_refused(size: int) -> None:
    with pytest.raises(ImageError, match="too few"):
        Image(bytes(size))


# --- inodes ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "at", "data", "says"),
    [
        (b"a", 0, b"\x15", "newer EROFS"),
        (b"a", 0, b"\x0b", "an unknown data layout"),
        (b"a", 5, b"\0", "another file type"),
        (b"a", 2, b"\x01", "that holds none"),
        (b"a", 2, b"\xff\xff", "beyond the end"),
        (b"a", 40, b"\xff\xff\xff\xff", "nanoseconds"),
        (b"a", 8, b"\xff" * 8, "2\\^63"),
        (b"a", 8, b"\xff\x0f", "inline data across blocks"),
        (b"\xff\x01", 8, b"\1", "a size on a device"),
        (b"link", 8, b"\0", "empty or too long"),
        (b"-dash", 8, b"\xff" * 7 + b"\x7f", "chunk indexes beyond"),
        (b"-dash", 16, b"\x64", "48-bit"),
        (b"-dash", 64, b"\1", "48-bit block address"),
        (b"-dash", 66, b"\3", "not in the table"),
        (b"-dash", 68, b"\x20", "beyond the end of its device"),
        (b"sub", 8, b"\x05", "too small"),
        (b"sub", 0, b"\x09", "a compressed directory|chunks on something else"),
        (b"sub", 0, b"\x07", "a compressed directory"),
        (b"a", 0, b"\x03", "a compressed file"),
    ],
)
def test_a_bad_inode_is_refused_by_number(path: bytes, at: int, data: bytes, says: str) -> None:
    image = render(*SAMPLES["everything"]())
    nid = Image(image).lookup(path)
    with pytest.raises(ImageError, match=says) as caught:
        Image(patched(image, place(image, path) + at, data)).tree()
    assert f"inode {nid}" in caught.value.message


def test_the_metadata_of_a_compressed_file_is_readable() -> None:
    image = render(*SAMPLES["everything"]())
    image = patched(image, place(image, b"a"), b"\x03")
    tree = Image(image).tree(metadata_only=True)
    assert tree.root.children is not None
    file = tree.root.children[b"a"]
    assert (file.size, file.uid, file.data, file.extent_count) == (6, 1, None, 0)
    read = Image(image)
    with pytest.raises(ImageError, match="compressed"):
        read.read(read.lookup(b"a") or 0, 0, 1)


def test_a11_a_whiteout_with_two_names_is_refused_by_number() -> None:
    tree = Tree()
    add(tree.root, b"gone", Inode(stat.S_IFCHR))
    add(tree.root, b"none", Inode(stat.S_IFIFO))
    image = render(tree, [])
    nid = Image(image).lookup(b"gone")
    twice = patched(
        image, dirent(image, b"none"), struct.pack("<QHB", nid, struct.unpack_from("<H", image, dirent(image, b"none") + 8)[0], 3)
    )
    for bad in (twice, patched(image, place(image, b"gone") + 6, b"\2")):
        with pytest.raises(ImageError, match=f"inode {nid} .*whiteout"):
            Image(bad).tree()


def test_48_bit_holes_are_holes() -> None:
    tree = Tree()
    chunked(tree, tree.root, b"f", 4096, [HOLE])
    image = render(tree, [])
    hole = patched(image, place(image, b"f") + 32, b"\xff" * 8)
    assert list(Image(hole).extents(Image(hole).lookup(b"f") or 0)) == [HOLE]


# --- directories -------------------------------------------------------------------------------------------------------------------------------


def small_directory() -> bytes:
    tree = Tree()
    for name in (b"aa", b"bb", b"cc"):
        regular(tree.root, name, b"")
    directory(tree.root, b"dd")
    return render(tree, [])


@pytest.mark.parametrize(
    ("name", "at", "data", "says"),
    [
        (b".", 8, b"\0\0", "first nameoff"),
        (b".", 8, b"\x49\0", "first nameoff"),
        (b".", 8, b"\xf0\xff", "first nameoff"),
        (b"bb", 8, b"\0\0", "name offsets out of order"),
        (b"bb", 8, b"\xff\xff", "name offsets out of order"),
        (b"aa", 0, b"\xff" * 8, "outside the image"),
        (b"aa", 10, b"\2", "another file type"),
        (b".", 0, b"\x60", "'\\.' is another"),
        (b"..", 0, b"\x60", "'\\.\\.' is another"),
    ],
)
def test_a_bad_entry_is_refused(name: bytes, at: int, data: bytes, says: str) -> None:
    image = small_directory()
    with pytest.raises(ImageError, match=says):
        Image(patched(image, dirent(image, name) + at, data)).tree()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"aabbcc", b"aaddcc", "out of order"),
        (b"aabbcc", b"aaaacc", "out of order"),
        (b"aabbcc", b"aab/cc", "with '/'"),
        (b"aabbcc", b"aab\0cc", "NUL"),
        (b"...aa", b"..xaa", "without '\\.\\.'"),
        (b"...aa", b"-..aa", "without '\\.'"),
    ],
)
def test_bad_names_are_refused(old: bytes, new: bytes, says: str) -> None:
    image = small_directory()
    assert image.count(old) == 1
    with pytest.raises(ImageError, match=says):
        Image(patched(image, image.index(old), new)).tree()


def test_a_directory_with_two_names_or_below_itself_is_refused() -> None:
    tree = Tree()
    directory(directory(tree.root, b"a"), b"b")
    directory(tree.root, b"c")
    image = render(tree, [])
    read = Image(image)
    for target in (b"a", b"", b"a/b"):
        nid = read.lookup(target)
        changed = patched(image, dirent(image, b"c"), struct.pack("<Q", nid))
        with pytest.raises(ImageError, match=r"two names|'\.\.' is another"):
            Image(changed).tree()


def test_directories_that_share_their_blocks_are_refused() -> None:
    """Many directories that each claim the same large block would give more names than the image can hold."""
    tree = Tree()
    for number in range(64):
        wide = directory(tree.root, b"d%02d" % number)
        for name in range(2000 if number == 0 else 1):
            regular(wide, b"%04d" % name, b"")
    image = render(tree, [])
    read = Image(image)
    table = read.scan().inodes
    large = list(table.nid).index(read.lookup(b"d00"))
    size, block = int(table.whole[large]) * 4096, int(table.i_u[large])
    assert size * 64 > len(image)
    for number in range(1, 64):
        at = place(image, b"d%02d" % number)
        image = patched(patched(patched(image, at, b"\0"), at + 8, struct.pack("<I", size)), at + 16, struct.pack("<I", block))
    with pytest.raises(ImageError, match="larger together than the image"):
        Image(image).tree()


def test_files_that_share_their_chunk_indexes_are_refused() -> None:
    """Many files whose indexes overlap would give more extents than the image can hold."""
    tree = Tree()
    for number in range(100):
        chunked(tree, tree.root, b"%03d" % number, 4096, [HOLE], bits=12)
    chunked(tree, tree.root, b"last", 4096 * 2000, [HOLE] * 2000, bits=12)
    image = render(tree, [])
    for number in range(100):
        image = patched(image, place(image, b"%03d" % number) + 8, struct.pack("<I", 4096 * 1000))
    with pytest.raises(ImageError, match="claim more than the image holds"):
        Image(image).tree()


def test_deep_nesting_is_refused_beyond_the_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    here = tree.root
    for _ in range(20):
        here = directory(here, b"d")
    image = render(tree, [])
    assert_same(tree, Image(image).tree())
    monkeypatch.setattr(fmt, "MAX_DEPTH", 19)
    with pytest.raises(ImageError, match="deeper than 19"):
        Image(image).tree()
    monkeypatch.setattr(fmt, "MAX_ENTRIES", 10)
    with pytest.raises(ImageError, match="more than 10 names"):
        Image(image).tree()


# --- extended attributes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (4, b"\xff", "more shared"),
        (4, b"\1", "does not fit|name index"),
        (12, b"\xff", "does not fit"),
        (13, b"\x81", "long extended attribute prefixes"),
        (13, b"\x09", "name index 9"),
        (13, b"\x02", "name index 2"),
        (14, b"\xff\xff", "does not fit"),
        (16, b"\0", "NUL"),
    ],
)
def test_bad_attributes_are_refused_by_inode(at: int, data: bytes, says: str) -> None:
    tree = Tree()
    symlink(tree.root, b"l", b"t").xattrs = ((b"user.name", b"value"),)
    image = render(tree, [])
    nid = Image(image).lookup(b"l")
    with pytest.raises(ImageError, match=says) as caught:
        Image(patched(image, place(image, b"l") + 32 + at, data)).tree()
    assert f"inode {nid}" in caught.value.message


def test_a_shared_attribute_outside_the_image_is_refused() -> None:
    tree, _ = SAMPLES["attributes"]()
    image = render(tree, [])
    at = place(image, b"label0") + 32 + 12
    with pytest.raises(ImageError, match="does not fit"):
        Image(patched(image, at, b"\xff\xff\xff\xff")).tree()
