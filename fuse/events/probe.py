"""Behaviour of this host's kernel that no version number tells, found out by trying."""

from __future__ import annotations

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import DsecError
from dsec_layers.linux.mount import mount_erofs, umount

__all__ = ["fails_closed"]


def fails_closed(directory: CacheDirectory) -> bool:
    """Whether a read through an EROFS mount fails if the segment's file is empty.

    Linux 6.18 gives EIO; earlier kernels may take a read that returns nothing for one that succeeded. Found out by doing it, on a mount of one small file.
    """
    place = directory.state / "probe"
    image, device, point = place / "image", place / "device", place / "mount"
    point.mkdir(parents=True, exist_ok=True)
    image.write_bytes(render(_one_file(), [1]))
    device.write_bytes(b"")
    try:
        umount(point, lazy=True)  # of a worker that was killed here
    except DsecError:
        pass
    mount_erofs(image, point, [device])
    try:
        return not (point / "file").read_bytes()
    except OSError:
        return True
    finally:
        umount(point, lazy=True)


def _one_file() -> Tree:
    tree = Tree()
    inode = Inode(0o100644)
    inode.size = 4096
    inode.extent_count = 1
    inode.chunk_bits = 12
    tree.extents.append(1 << 32)  # device 1, block 0
    assert tree.root.children is not None
    tree.root.children[b"file"] = inode
    return tree
