"""For every tree: what is written is what is read, the proof of it holds, and the dump accounts for every byte."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_layers.erofs.dump import dump
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.verify import compare
from dsec_layers.erofs.writer import render
from dsec_layers.errors import ImageError
from tests.kit.erofs_samples import Sample, assert_same, trees

_SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@_SETTINGS
@given(trees())
def test_a_tree_comes_back_as_it_was(sample: Sample) -> None:
    tree, devices = sample
    image = render(tree, devices)
    compare(tree, image, devices)
    back = Image(image).tree()
    assert_same(tree, back)
    assert render(back, devices) == image


@_SETTINGS
@given(trees())
def test_the_dump_covers_each_byte_once(sample: Sample) -> None:
    image = render(*sample)
    at = 0
    for line in dump(image):
        if not line.startswith("#"):
            place = line.split(" ", 1)[0]
            start, size = place.split("+")
            assert int(start, 16) == at, line
            at += int(size)
    assert at == len(image)


@_SETTINGS
@given(trees(), st.data())
def test_another_tree_is_not_taken_for_this_one(sample: Sample, data: st.DataObject) -> None:
    tree, devices = sample
    image = render(tree, devices)
    inode = data.draw(st.sampled_from([inode for _, inode in tree.walk()]))
    change = data.draw(st.sampled_from(["mode", "uid", "gid", "mtime", "mtime_ns", "xattrs", "name", "extent", "data"]))
    if change == "xattrs":
        inode.xattrs = (*inode.xattrs, (b"user.zzzz", b""))
    elif change == "name" and inode.children:
        name = min(inode.children)
        inode.children[name[:254] + b"'"] = inode.children.pop(name)
    elif change == "extent" and inode.extent_count:
        tree.extents[inode.extent_at] ^= 1
    elif change == "data" and inode.data:
        inode.data = inode.data[:-1] + b"\x01"
    elif change not in ("name", "extent", "data"):
        setattr(inode, change, getattr(inode, change) ^ 1)
    else:
        return
    try:
        compare(tree, image, devices)
    except ImageError:
        return
    raise AssertionError(f"a changed {change} was not noticed")
