"""The kernel is the judge: images are mounted, with their devices and as flat images, and compared with what they were made from."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import Conflict, HostError, NotFound
from dsec_layers.linux.mount import mount_erofs, mount_overlay, umount
from tests.kit.erofs_samples import SAMPLES, Sample, chunked, directory, make_source, pack_directory, regular, trees
from tests.kit.oracle import diff, snapshot_dir, snapshot_tree

pytestmark = pytest.mark.root


@contextmanager
def mounted(folder: Path, image: bytes, segments: list[bytes], *, flat: bool = False) -> Iterator[Path]:
    """Write the files, mount them, unmount at the end."""
    target = folder / "mnt"
    target.mkdir(exist_ok=True)
    paths = []
    if flat:
        (folder / "image").write_bytes(image + b"".join(segments))
    else:
        (folder / "image").write_bytes(image)
        for number, data in enumerate(segments, 1):
            paths.append(folder / f"segment{number}")
            paths[-1].write_bytes(data)
    mount_erofs(folder / "image", target, paths)
    try:
        yield target
    finally:
        umount(target)


@pytest.mark.parametrize("view", ["devices", "flat", "joined"])
@pytest.mark.parametrize("inline", [0, 4095])
def test_a_real_directory_comes_back_through_the_kernel(tmp_path: Path, view: str, inline: int) -> None:
    source = make_source(tmp_path / "source")
    tree, segments = pack_directory(source, inline=inline)
    image = render(tree, [len(segment) // 4096 for segment in segments], joined=view == "joined")
    with mounted(tmp_path, image, segments, flat=view != "devices") as target:
        assert diff(snapshot_dir(source), snapshot_dir(target)) == []
        with (target / "sparse").open("rb") as stream:
            assert os.lseek(stream.fileno(), 0, os.SEEK_DATA) == 1 << 20


def pattern(device: int, block: int) -> bytes:
    """What the block of a device holds in these tests."""
    return b"%07d/%08d" % (device, block) * 256


def content(tree: Tree, inode: Inode) -> bytes:
    if inode.data is not None:
        return inode.data
    parts = []
    for extent in tree.extents[inode.extent_at : inode.extent_at + inode.extent_count]:
        device, block = extent >> 32, extent & 0xFFFFFFFF
        count = 1 << inode.chunk_bits - 12
        parts.append(b"".join(pattern(device, block + nth) for nth in range(count)) if device else bytes(count * 4096))
    return b"".join(parts)[: inode.size]


def check(folder: Path, sample: Sample) -> None:
    tree, devices = sample
    segments = [b"".join(pattern(number, block) for block in range(blocks)) for number, blocks in enumerate(devices, 1)]
    with mounted(folder, render(tree, devices), segments) as target:
        assert diff(snapshot_tree(tree, lambda inode: content(tree, inode)), snapshot_dir(target)) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_come_back_through_the_kernel(tmp_path: Path, name: str) -> None:
    check(tmp_path, SAMPLES[name]())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(trees())
def test_generated_trees_come_back_through_the_kernel(tmp_path: Path, sample: Sample) -> None:
    paths = dict(sample[0].walk())
    assume(max(map(len, paths)) < 4000)  # longer ones cannot be asked for
    for inode in paths.values():
        # The kernel shows user attributes of files and directories only, and the ACLs here are none.
        hidden = (b"system.",) if stat.S_ISREG(inode.mode) or stat.S_ISDIR(inode.mode) else (b"system.", b"user.")
        inode.xattrs = tuple(pair for pair in inode.xattrs if not pair[0].startswith(hidden))
    check(tmp_path, sample)


def test_b8_device_numbers_above_255_are_right(tmp_path: Path) -> None:
    tree = Tree()
    for number in range(1, 401):
        chunked(tree, tree.root, b"%03d" % number, 4096, [number << 32], bits=12)
    check(tmp_path, (tree, [1] * 400))


def test_a3_hard_links_are_one_inode(tmp_path: Path) -> None:
    tree = Tree()
    file = regular(tree.root, b"a", b"x")
    directory(tree.root, b"d").children = {b"b": file, b"c": file}
    with mounted(tmp_path, render(tree, []), []) as target:
        infos = [(target / name).stat() for name in ("a", "d/b", "d/c")]
        assert {info.st_ino for info in infos} == {infos[0].st_ino} and {info.st_nlink for info in infos} == {3}


# --- mounting ----------------------------------------------------------------------------------------------------------------------------------


def test_paths_longer_than_an_option_can_be_still_mount(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200) / "with space, comma:colon\\backslash" / ("y" * 200)
    folder.mkdir(parents=True)
    tree = Tree()
    chunked(tree, tree.root, b"f", 4096, [1 << 32], bits=12)
    with mounted(folder, render(tree, [1]), [b"z" * 4096]) as target:
        assert (target / "f").read_bytes() == b"z" * 4096
        upper, work, merged = (folder / name for name in ("up\\per", "work", "merged"))
        for path in (upper, work, merged):
            path.mkdir()
        mount_overlay(merged, [target], upper=upper, work=work)
        try:
            (merged / "new").write_text("1")
        finally:
            umount(merged)
        assert (upper / "new").exists()


def test_c1_more_than_100_layers_stack(tmp_path: Path) -> None:
    lowers = []
    for number in range(130):
        lowers.append(tmp_path / f"lower{number}")
        lowers[-1].mkdir()
        (lowers[-1] / f"f{number}").write_text(str(number))
        (lowers[-1] / "top").write_text(str(number))
    target = tmp_path / "merged"
    target.mkdir()
    mount_overlay(target, lowers, options={"index": "off"}, source="layers")
    try:
        assert len(list(target.iterdir())) == 131
        assert (target / "top").read_text() == "0"
        assert f"layers {target} overlay ro," in Path("/proc/self/mounts").read_text()
        with pytest.raises(OSError, match="Read-only"):
            (target / "new").touch()
    finally:
        umount(target)


def test_whiteouts_and_opaque_directories_of_an_image_work_in_overlayfs(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    (lower / "d").mkdir(parents=True)
    (lower / "d" / "hidden").touch()
    (lower / "gone").touch()
    tree, _ = SAMPLES["empty"]()
    assert tree.root.children is not None
    tree.root.children[b"gone"] = Inode(stat.S_IFCHR)
    directory(tree.root, b"d").xattrs = ((b"trusted.overlay.opaque", b"y"),)
    merged = tmp_path / "merged"
    merged.mkdir()
    with mounted(tmp_path, render(tree, []), []) as upper:
        mount_overlay(merged, [upper, lower])
        try:
            assert sorted(path.name for path in merged.rglob("*")) == ["d"]
        finally:
            umount(merged)


def test_failures_carry_the_kernels_words(tmp_path: Path) -> None:
    target = tmp_path / "mnt"
    target.mkdir()
    with pytest.raises(HostError, match=r"overlay: Unknown parameter 'nonsense'"):
        mount_overlay(target, [tmp_path, target], options={"nonsense": "1"})
    with pytest.raises(HostError, match=r"lowerdir\+=.*absent: No such file"):
        mount_overlay(target, [tmp_path / "absent"])
    with pytest.raises(HostError, match=r"cannot mount .*absent: No such file"):
        mount_erofs(tmp_path / "absent", target)
    with pytest.raises(HostError, match=r"absent.* No such file"):
        mount_erofs(tmp_path / ("absent" * 30) / ("x" * 200), target)
    (tmp_path / "zeros").write_bytes(bytes(8192))
    with pytest.raises(HostError, match="Invalid argument") as caught:
        mount_erofs(tmp_path / "zeros", target)
    assert caught.value.hint and "dmesg" in caught.value.hint
    assert list(target.iterdir()) == []


def test_unmounting_says_what_is_in_the_way(tmp_path: Path) -> None:
    tree, devices = SAMPLES["blocks"]()
    with pytest.raises(NotFound, match="nothing is mounted there"):
        umount(tmp_path)
    with pytest.raises(NotFound):
        umount(tmp_path / "absent")
    with mounted(tmp_path, render(tree, devices), []) as target:
        with (target / "nearly").open("rb"), pytest.raises(Conflict, match="in use"):
            umount(target)
        (tmp_path / "image2").write_bytes((tmp_path / "image").read_bytes())
        over = tmp_path / "over"
        over.mkdir()
        mount_erofs(tmp_path / "image2", over)
        with (over / "nearly").open("rb") as stream:
            umount(over, lazy=True)
            assert len(stream.read()) == 4095
        assert list(over.iterdir()) == []
