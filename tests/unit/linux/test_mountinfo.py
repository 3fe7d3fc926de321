"""The mount table, and that it is read in one place."""

from __future__ import annotations

import os
from pathlib import Path

from dsec_layers.linux import mountinfo
from dsec_layers.linux.mountinfo import MountPoint, file_system_of, mount_of, read_mounts

SAMPLE = (
    b"21 1 254:0 / / rw - ext4 /dev/vda rw\n"
    b"22 21 0:50 / /data rw shared:7 master:3 - tmpfs none rw\n"
    b"23 22 0:52 / /data rw - xfs /dev/vdb rw\n"
    b"24 23 0:51 /sub\\040dir /data/a\\040b\\134c\xff rw - fuse.hf3fs hf3fs.stage rw\n"
)


def test_fields_are_unescaped_and_optional_ones_are_passed_over(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(SAMPLE)
    assert read_mounts(table)[3] == MountPoint(24, "0:51", "/sub dir", "/data/a b\\c\udcff", "fuse.hf3fs", "hf3fs.stage")
    assert [mount.target for mount in read_mounts(table)][:3] == ["/", "/data", "/data"]


def test_the_file_system_of_a_path_is_that_of_the_last_mount_over_it(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(SAMPLE)
    kinds = [file_system_of(Path(path), table) for path in ("/x", "/data", "/data2", "/data/x", "/data/a b\\c\udcff/x")]
    assert kinds == ["ext4", "xfs", "ext4", "xfs", "fuse.hf3fs"]
    table.write_bytes(b"")
    assert file_system_of(Path("/x"), table) == "unknown"


def test_an_open_file_tells_its_mount() -> None:
    fd = os.open("/proc/self", os.O_PATH)
    mount = mount_of(fd)
    os.close(fd)
    assert mount is not None and (mount.kind, mount.target) == ("proc", "/proc")


def test_a3_nobody_else_reads_the_table() -> None:
    package = Path(mountinfo.__file__).parents[1]
    parsers = [
        path
        for folder in (package, *(entry for entry in package.iterdir() if entry.is_symlink()))
        for path in folder.rglob("*.py")
        if "self/mountinfo" in path.read_text()
    ]
    assert parsers == [Path(mountinfo.__file__)]
