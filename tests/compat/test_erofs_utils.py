"""erofs-utils as the judge and the reference: fsck and dump of our images, and mkfs images through our reader.

Runs with whatever version is installed (1.5 of Debian 12 to 1.9). What a version cannot do is skipped by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.dump import dump
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.proc import Completed, run
from tests.kit.erofs_samples import SAMPLES, make_source, pack_directory
from tests.kit.oracle import diff, snapshot_dir, snapshot_tree
from tests.kit.tools import missing, tool


def version() -> tuple[int, ...]:
    """The version of the installed erofs-utils."""
    words = run([tool("fsck.erofs"), "-V"], check=False).stdout.split()
    return tuple(int(part) for part in words[-1].split(b".")[:2]) if words[-1][:1].isdigit() else (1, 9)


def save(folder: Path, image: bytes, segments: list[bytes]) -> tuple[Path, list[str]]:
    """The image and its segments as files; the options that name the segments to erofs-utils."""
    path = folder / "image"
    path.write_bytes(image)
    options = []
    for number, data in enumerate(segments, 1):
        (folder / f"segment{number}").write_bytes(data)
        options.append(f"--device={folder / f'segment{number}'}")
    return path, options


# --- our images, their tools -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_fsck_accepts_every_sample_with_its_devices(tmp_path: Path, name: str) -> None:
    tree, devices = SAMPLES[name]()
    path, options = save(tmp_path, render(tree, devices), [bytes(4096 * blocks) for blocks in devices])
    run([tool("fsck.erofs"), "--extract", *options, path])


@pytest.mark.parametrize("name", SAMPLES)
def test_fsck_accepts_the_flat_view(tmp_path: Path, name: str) -> None:
    tree, devices = SAMPLES[name]()
    path, _ = save(tmp_path, render(tree, devices) + b"".join(bytes(4096 * blocks) for blocks in devices), [])
    if devices and version() < (1, 7):
        pytest.skip("fsck.erofs before 1.7 wants the devices of an image that has a device table")
    run([tool("fsck.erofs"), path])


def test_fsck_extracts_what_went_in(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    if version() < (1, 8):  # these lose set-user-id bits and skip holes without leaving room for them
        (source / "below").chmod(0o755)
        (source / "sparse").unlink()
    tree, segments = pack_directory(source, inline=200)
    path, options = save(tmp_path, render(tree, [len(segment) // 4096 for segment in segments]), segments)
    run([tool("fsck.erofs"), f"--extract={tmp_path / 'out'}", *options, path])
    # It restores neither extended attributes (before 1.8) nor hard links (before 1.7).
    assert diff(snapshot_dir(source), snapshot_dir(tmp_path / "out"), ignore=("xattrs", "nlink", "names")) == []


def test_fsck_extracts_a_joined_image_without_devices(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    if version() < (1, 8):
        (source / "below").chmod(0o755)
        (source / "sparse").unlink()
    tree, segments = pack_directory(source, inline=200)
    image = render(tree, [len(segment) // 4096 for segment in segments], joined=True)
    path, _ = save(tmp_path, image + b"".join(segments), [])
    run([tool("fsck.erofs"), f"--extract={tmp_path / 'out'}", path])
    assert diff(snapshot_dir(source), snapshot_dir(tmp_path / "out"), ignore=("xattrs", "nlink", "names")) == []


def test_dump_reads_our_superblock_and_inodes(tmp_path: Path) -> None:
    tree, devices = SAMPLES["everything"]()
    image = render(tree, devices)
    path, options = save(tmp_path, image, [bytes(4096 * blocks) for blocks in devices])
    shown = run([tool("dump.erofs"), "-s", *options, path]).stdout.decode()
    uuid = Image(image).superblock.uuid.hex()
    assert uuid in shown.replace("-", "") and "sb_csum mtime" in shown
    nid = Image(image).lookup(b"sub/again")
    shown = run([tool("dump.erofs"), f"--nid={nid}", *options, path]).stdout.decode()
    assert all(part in shown for part in ("Size: 6", "Links: 2", "Uid: 1", "Gid: 2", "Access: 0644/"))


# --- their images, our reader ------------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "default": [],
    "extended inodes": ["-Eforce-inode-extended"],
    "no inline data": ["-Enoinline_data"],
    "block maps": ["--chunksize=4096"],
    "large block maps": ["--chunksize=65536"],
    "chunk indexes": ["--chunksize=16384", "-Eforce-chunk-indexes"],
    "shared attributes": ["-x1"],
}


def mkfs(folder: Path, options: list[str], source: Path, *, check: bool = True) -> tuple[bytes, Completed]:
    done = run([tool("mkfs.erofs"), *options, folder / "reference", source], check=check)
    return (folder / "reference").read_bytes(), done


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_tree_comes_out_of_mkfs_images(tmp_path: Path, layout: str) -> None:
    source = make_source(tmp_path / "source")
    buffer, _ = mkfs(tmp_path, LAYOUTS[layout], source)
    image = Image(buffer)
    tree = image.tree()
    paths = {id(inode): path for path, inode in tree.walk()}

    def content(inode: Inode) -> bytes:
        return image.read(image.lookup(paths[id(inode)]) or 0, 0, inode.size) if inode.size else b""

    assert diff(snapshot_dir(source), snapshot_tree(tree, content)) == []


def test_the_same_tree_comes_out_of_an_image_with_a_blob_device(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    blob = tmp_path / "blob"
    buffer, done = mkfs(tmp_path, ["--chunksize=65536", f"--blobdev={blob}"], source, check=False)
    if done.code != 0:
        pytest.skip(f"this mkfs.erofs cannot write a blob device: exit code {done.code}")
    image, data = Image(buffer), blob.read_bytes()
    tree = image.tree()

    def content(inode_of: Tree) -> dict[int, bytes]:
        found = {}
        for _, inode in inode_of.walk():
            pieces = []
            for extent in inode_of.extents[inode.extent_at : inode.extent_at + inode.extent_count]:
                at = (extent & fmt.NULL_ADDR) * 4096
                size = 1 << inode.chunk_bits
                pieces.append(data[at : at + size].ljust(size, b"\0") if extent >> 32 else bytes(size))
            found[id(inode)] = inode.data if inode.data is not None else b"".join(pieces)[: inode.size]
        return found

    contents = content(tree)
    assert diff(snapshot_dir(source), snapshot_tree(tree, lambda inode: contents[id(inode)])) == []


def test_a_compressed_image_gives_its_metadata(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    buffer, done = mkfs(tmp_path, ["-zlz4"], source, check=False)
    if done.code != 0:
        missing("this mkfs.erofs has no lz4")
    tree = Image(buffer).tree(metadata_only=True)
    assert diff(snapshot_dir(source), snapshot_tree(tree, lambda inode: b""), ignore=("sha256",)) == []


@pytest.mark.parametrize("layout", ["default", "block maps"])
def test_the_dump_covers_each_byte_of_a_mkfs_image_once(tmp_path: Path, layout: str) -> None:
    buffer, _ = mkfs(tmp_path, LAYOUTS[layout], make_source(tmp_path / "source"))
    at = 0
    for line in dump(buffer):
        if not line.startswith("#"):
            start, size = line.split(" ", 1)[0].split("+")
            assert int(start, 16) == at
            at += int(size)
    assert at == len(buffer)
