"""What the writer makes of trees, and what it refuses."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import HOLE, Inode, Tree
from dsec_layers.erofs.verify import compare
from dsec_layers.erofs.writer import render
from dsec_layers.errors import DsecError, ImageError, LimitError
from tests.kit.erofs_samples import SAMPLES, add, assert_same, chunked, directory, regular, symlink


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_come_back(name: str) -> None:
    tree, devices = SAMPLES[name]()
    image = render(tree, devices)
    compare(tree, image, devices)
    assert_same(tree, Image(image).tree())


def test_the_same_tree_gives_the_same_bytes_in_any_order_of_insertion() -> None:
    one, devices = SAMPLES["everything"]()
    two, _ = SAMPLES["everything"]()
    assert two.root.children is not None
    two.root.children = dict(reversed(two.root.children.items()))
    assert render(one, devices) == render(two, devices)


def test_the_device_table_gives_unified_addresses_behind_the_image() -> None:
    image = Image(render(Tree(), [3, 1, 7]))
    blocks = image.superblock.blocks
    assert [(device.blocks, device.mapped_blkaddr) for device in image.devices] == [(3, blocks), (1, blocks + 3), (7, blocks + 4)]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_joined_image_has_no_devices_and_the_data_behind_it(name: str) -> None:
    tree, devices = SAMPLES[name]()
    data = render(tree, devices, joined=True)
    image = Image(data + bytes(4096 * sum(devices)))
    blocks = len(data) // 4096
    assert (image.devices, image.superblock.blocks) == ((), blocks + sum(devices))
    assert not image.superblock.feature_incompat & fmt.FEATURE_INCOMPAT_DEVICE_TABLE
    starts = [0, *(blocks + sum(devices[:number]) for number in range(len(devices)))]
    wanted = Image(render(tree, devices)).tree().extents
    assert image.tree().extents.tolist() == [e if e == HOLE else starts[e >> 32] + (e & 0xFFFFFFFF) for e in wanted]


def test_the_identity_comes_from_the_content_unless_given() -> None:
    tree, devices = SAMPLES["everything"]()
    one = Image(render(tree, devices)).superblock
    tree.root.mode ^= 1
    other = Image(render(tree, devices)).superblock
    assert one.uuid != other.uuid
    named = Image(render(tree, devices, uuid=b"0123456789abcdef", volume_name=b"layer", build_time=(5, 6))).superblock
    assert (named.uuid, named.volume_name, named.build_time, named.build_time_nsec) == (b"0123456789abcdef", b"layer", 5, 6)


def test_inodes_that_share_the_build_time_are_short() -> None:
    tree, devices = SAMPLES["same_time"]()
    short = len(render(tree, devices).rstrip(b"\0"))
    long = len(render(tree, devices, build_time=(1, 1)).rstrip(b"\0"))
    table = Image(render(tree, devices)).scan().inodes
    assert short < long
    assert ((table.area_at - table.pos == 64) == (table.uid == 70_000)).all()
    assert_same(tree, Image(render(tree, devices, build_time=(1, 1))).tree())


def test_link_counts_are_the_numbers_of_names() -> None:
    tree = Tree()
    a, _b = directory(tree.root, b"a"), directory(tree.root, b"b")
    file = regular(a, b"x", b"1")
    add(tree.root, b"y", file)
    add(tree.root, b"z", file)
    image = Image(render(tree, []))
    counts = {path: image.inode(image.lookup(path) or 0).nlink for path in (b"", b"a", b"b", b"y")}
    assert counts == {b"": 4, b"a": 2, b"b": 2, b"y": 3}


def test_inline_data_never_crosses_a_block() -> None:
    tree = Tree()
    for number in range(300):
        regular(tree.root, b"%d" % number, b"d" * (number * 37 % 4096))
    image = render(tree, [])
    table = Image(image).scan().inodes
    assert ((table.body_at % 4096 + table.inline)[table.inline > 0] <= 4096).all()
    compare(tree, image, [])


def test_the_root_keeps_a_16_bit_nid_with_every_device_there_can_be() -> None:
    tree = Tree()
    devices = [1] * fmt.MAX_DEVICES
    chunked(tree, tree.root, b"f", 4096, [fmt.MAX_DEVICES << 32])
    image = render(tree, devices)
    compare(tree, image, devices)
    assert 0 < Image(image).superblock.root_nid < 200


# --- limits ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [(b"user.v", b"v" * 65535), (b"user." + b"n" * 250, b""), (b"trusted." + b"n" * 247, b"v" * 65535)],
)
def test_b4_attributes_at_the_limits_are_stored_exactly(name: bytes, value: bytes) -> None:
    tree = Tree()
    for number in range(3):
        regular(tree.root, b"f%d" % number, b"x").xattrs = ((name, value),)
    image = render(tree, [])
    assert_same(tree, Image(image).tree())


def test_b4_500_attributes_on_one_inode_are_stored_exactly() -> None:
    tree = Tree()
    regular(tree.root, b"f", b"x").xattrs = tuple((b"user.%03d" % number, b"v" * 100) for number in range(500))
    image = render(tree, [])
    compare(tree, image, [])
    assert_same(tree, Image(image).tree())


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (((b"user.v", b"v" * 65536),), "attribute user.v: a value of 65536 bytes"),
        (((b"user." + b"n" * 251, b""),), "a name of 256 bytes"),
        (tuple((b"user.%d" % number, b"v" * 60000) for number in range(5)), "attribute user.4: together"),
        (((b"system.nfs4_acl", b""),), "attribute system.nfs4_acl: EROFS has no such name space"),
        (((b"lustre.lov", b""),), "attribute lustre.lov"),
        (((b"user.", b""),), "attribute user."),
        (((b"nodots", b""),), "attribute nodots"),
    ],
)
def test_b4_attributes_over_a_limit_are_refused_by_path_and_name(pairs: tuple[tuple[bytes, bytes], ...], says: str) -> None:
    tree = Tree()
    regular(directory(tree.root, b"sub"), b"file", b"x").xattrs = pairs
    with pytest.raises(LimitError) as caught:
        render(tree, [])
    assert "/sub/file" in caught.value.message and says in caught.value.message


def _long_name(tree: Tree) -> None:
    regular(tree.root, b"n" * 256, b"")


def _deep(tree: Tree) -> None:
    here = tree.root
    for _ in range(fmt.MAX_DEPTH + 1):
        here = directory(here, b"d")


def _device_number(tree: Tree) -> None:
    add(tree.root, b"x", Inode(stat.S_IFBLK)).rdev = os.makedev(4096, 0)


def _user(tree: Tree) -> None:
    regular(tree.root, b"x", b"").uid = (1 << 32) - 1


def _huge_time(tree: Tree) -> None:
    regular(tree.root, b"x", b"").mtime = 1 << 63


def _target(tree: Tree) -> None:
    symlink(tree.root, b"x", b"t" * 4096)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_long_name, "a name of 256 bytes; the limit is 255"),
        (_deep, "nested deeper than 2048"),
        (_device_number, "/x: device number"),
        (_user, "/x: uid outside 0..4294967294"),
        (_huge_time, "mtime"),
        (_target, "/x: a link target longer than 4095"),
    ],
)
def test_what_the_format_cannot_express_is_a_limit_error(spoil: Callable[[Tree], None], says: str) -> None:
    tree = Tree()
    spoil(tree)
    with pytest.raises(LimitError, match=says):
        render(tree, [])


@pytest.mark.parametrize(("devices", "says"), [([1] * 65536, "65536 segments"), ([0xFFFFFFFF], "4294967296 blocks")])
def test_too_many_or_too_large_devices_are_a_limit_error(devices: list[int], says: str) -> None:
    with pytest.raises(LimitError, match=says):
        render(Tree(), devices)


# --- trees that make no sense ------------------------------------------------------------------------------------------------------------------


def _two_names(tree: Tree) -> None:
    add(directory(tree.root, b"a"), b"again", directory(tree.root, b"b"))


def _cycle(tree: Tree) -> None:
    add(directory(tree.root, b"a"), b"up", tree.root)


def _dot(tree: Tree) -> None:
    regular(tree.root, b"..", b"")


def _slash(tree: Tree) -> None:
    regular(tree.root, b"a/b", b"")


def _no_name(tree: Tree) -> None:
    regular(tree.root, b"", b"")


def _whiteout(tree: Tree) -> None:
    add(tree.root, b"other", add(tree.root, b"gone", Inode(stat.S_IFCHR)))


def _no_type(tree: Tree) -> None:
    add(tree.root, b"x", Inode(0o644))


def _not_a_directory(tree: Tree) -> None:
    regular(tree.root, b"x", b"").children = {}


def _wrong_length(tree: Tree) -> None:
    regular(tree.root, b"x", b"123").size = 4


def _a_whole_block(tree: Tree) -> None:
    regular(tree.root, b"x", b"1" * 4096)


def _few_extents(tree: Tree) -> None:
    chunked(tree, tree.root, b"x", 65537, [1 << 32])


def _foreign_extents(tree: Tree) -> None:
    chunked(tree, tree.root, b"x", 4096, [1 << 32]).extent_at = 1


def _extents_on_a_link(tree: Tree) -> None:
    symlink(tree.root, b"x", b"t").extent_count = 1


def _beyond(tree: Tree) -> None:
    chunked(tree, tree.root, b"x", 2 * 65536, [HOLE, 1 << 32 | 1])


def _unknown_device(tree: Tree) -> None:
    chunked(tree, tree.root, b"x", 1, [2 << 32])


def _device_zero(tree: Tree) -> None:
    chunked(tree, tree.root, b"x", 1, [5])


def _nanoseconds(tree: Tree) -> None:
    regular(tree.root, b"x", b"").mtime_ns = 10**9


def _no_target(tree: Tree) -> None:
    symlink(tree.root, b"x", b"")


def _nul_in_target(tree: Tree) -> None:
    symlink(tree.root, b"x", b"a\0b")


def _sized_pipe(tree: Tree) -> None:
    add(tree.root, b"x", Inode(stat.S_IFIFO)).size = 1


def _twice_the_attribute(tree: Tree) -> None:
    regular(tree.root, b"x", b"").xattrs = ((b"user.a", b"1"), (b"user.a", b"2"))


NONSENSE = [
    _two_names, _cycle, _dot, _slash, _no_name, _whiteout, _no_type, _not_a_directory, _wrong_length, _a_whole_block, _few_extents,
    _foreign_extents, _extents_on_a_link, _beyond, _unknown_device, _device_zero, _nanoseconds, _no_target, _nul_in_target, _sized_pipe,
    _twice_the_attribute,
]  # fmt: skip


@pytest.mark.parametrize("spoil", NONSENSE)
def test_a_tree_that_makes_no_sense_is_refused_by_path(spoil: Callable[[Tree], None]) -> None:
    tree = Tree()
    spoil(tree)
    with pytest.raises(ImageError) as caught:
        render(tree, [16])
    assert caught.value.message.startswith("/")


@pytest.mark.parametrize("devices", [[0], [1, 1 << 32]])
def test_impossible_device_sizes_are_refused(devices: list[int]) -> None:
    with pytest.raises(DsecError):
        render(Tree(), devices)


def test_sparse_files_over_4_gib_keep_their_size() -> None:
    tree = Tree()
    bits, size = 16, (5 << 30) + 1
    extents = [HOLE] * ((size >> bits) + 1)
    extents[0] = 1 << 32
    extents[(1 << 32) - 1 >> bits] = 1 << 32 | 16
    extents[1 << 32 >> bits] = 2 << 32
    chunked(tree, tree.root, b"large", size, extents)
    image = render(tree, [32, 300])
    compare(tree, image, [32, 300])
    assert_same(tree, Image(image).tree())


def test_a_nearly_full_block_goes_to_a_block_of_its_own() -> None:
    tree = Tree()
    inode = regular(tree.root, b"f", bytes(range(256)) * 15 + b"t" * 255)
    inode.xattrs = ((b"user.a", b"1"),)
    image = Image(render(tree, []))
    nid = image.lookup(b"f") or 0
    assert image.inode(nid).layout == fmt.FLAT_PLAIN
    assert image.read(nid, 0, 5000) == inode.data
