"""A real kernel in QEMU on our images and disks: EROFS by virtio-pmem and DAX, an OverlayBD disk by NBD, snapshots and branches, a server that dies."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec_layers import Session, export, import_source, stop
from dsec_layers.api.disks import attach_detached, branch, commit, create, detach
from dsec_layers.disks.attach import SOCKET
from dsec_layers.disks.owner import served
from dsec_layers.errors import HostError, ToolError
from dsec_layers.proc import find_tool
from tests.kit.guest import Guest, Kernel, boot, busybox_root, cache_directory, find_kernel, pad_image, program_with_libraries, unpack
from tests.kit.tools import missing

pytestmark = pytest.mark.slow

SIZE = 256 << 20
BIG = 8 << 20


@dataclass(frozen=True, slots=True)
class World:
    """What all guests here share: the kernel, the base's and the toolkit's image, and a file of the base."""

    home: Path
    session: Session
    kernel: Kernel
    images: tuple[Path, ...]
    big_sha256: str

    def boot_from(self, disk: Path, *, network: bool = False, reconnect: int = 0) -> AbstractContextManager[Guest]:
        return boot(self.kernel, self.images, disk / SOCKET, network=network, reconnect=reconnect)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """Debian's cloud kernel, if there is all that it takes to start it."""
    try:
        for program in ("qemu-system-x86_64", "busybox", "mke2fs"):
            find_tool(program)
        return find_kernel(cache_directory())
    except ToolError as error:
        missing(f"a guest cannot be had: {error.message}")


@pytest.fixture(scope="module")
def world(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A store with a base and a toolkit, and their images."""
    home = tmp_path_factory.mktemp("guest")
    content = os.urandom(BIG)
    busybox_root(home / "base")
    (home / "base/etc/big").write_bytes(content)
    (home / "base/etc/who").write_text("base\n")
    tool = home / "tool/usr/bin/greet"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho hello from the toolkit\n")
    tool.chmod(0o755)
    (home / "tool/etc").mkdir()
    (home / "tool/etc/who").write_text("toolkit\n")
    try:
        client = unpack(["nbd-client", "libnl-3-200", "libnl-genl-3-200"], cache_directory())
    except ToolError as error:
        missing(f"the guest's NBD client cannot be had: {error.message}")
    (program,) = client.glob("**/sbin/nbd-client")  # in /sbin or /usr/sbin
    program_with_libraries(program, client, home / "tool")
    with Session(home / "store", home / "cache") as session:
        images = []
        for name, kind in (("base", "base"), ("tool", "toolkit")):
            import_source(session, home / name, kind=kind, name=f"{name}:1")
            images.append(home / f"{name}.erofs")
            export(session, f"{name}:1", images[-1], format="erofs")
            pad_image(images[-1])
        yield World(home, session, kernel, tuple(images), hashlib.sha256(content).hexdigest())
        if os.geteuid() == 0:
            stop(session)


@contextmanager
def attached(world: World, disk: Path, *, port: int | None = None) -> Iterator[str]:
    """A disk with a server in a process of its own; the URI. Nothing is left of it afterwards."""
    uri = attach_detached(world.session, disk, port=port).uri
    try:
        yield uri
    finally:
        detach(disk)


def test_a_guest_runs_on_layers_by_dax_and_its_disk_branches_while_it_writes(world: World) -> None:
    first, one, two = (world.home / name for name in ("first", "one", "two"))
    create(world.session, first, size=SIZE, mkfs="ext4")
    with attached(world, first), world.boot_from(first) as guest:
        check_layers(world, guest)
        guest.run("mkdir /work && echo common >/work/common && cp /etc/big /work/big && sync")
        guest.start("for i in $(seq 30); do dd if=/etc/big of=/work/load bs=64k count=4 conv=fsync; done")
        commit(world.session, first, "work:1", fs_type="ext4")
        guest.finish()
        guest.run("echo late >/work/late; sync")
        guest.power_off()
    branch(world.session, "work:1", [one, two])
    for disk in (one, two):
        with attached(world, disk), world.boot_from(disk) as guest:
            assert "recovery complete" in guest.run("dmesg | grep 'EXT4-fs (vda)'")  # the snapshot is of a mounted file system
            assert guest.run("cat /work/common") == "common\n"
            assert guest.run("sha256sum </work/big").split()[0] == world.big_sha256
            assert guest.run("test -e /work/late || echo absent") == "absent\n"
            guest.run(f"echo {disk.name} >/work/{disk.name}; echo {disk.name} >>/etc/who")
            guest.power_off()
    for disk, other in ((one, two), (two, one)):
        with attached(world, disk), world.boot_from(disk) as guest:
            assert guest.run(f"cat /work/{disk.name} /etc/who") == f"{disk.name}\ntoolkit\n{disk.name}\n"
            assert guest.run(f"ls /work | grep -x -e {other.name} -e late || echo none") == "none\n"
            assert "EXT4-fs error" not in guest.console


def check_layers(world: World, guest: Guest) -> None:
    """The root is the overlay, the toolkit wins, and the images' bytes come without passing through the guest's page cache."""
    mounts = [line.split() for line in guest.run("cat /run/mounts").splitlines()]
    images = {fields[0]: fields[3].split(",") for fields in mounts if fields[2] == "erofs"}
    assert sorted(images) == ["/dev/pmem0", "/dev/pmem1"]
    assert all("dax=always" in options for options in images.values())
    assert [fields[0] for fields in mounts if fields[2] == "ext4"] == ["/dev/vda"]
    assert guest.run("cat /etc/who; greet") == "toolkit\nhello from the toolkit\n"
    said = guest.run(
        "sync; echo 3 >/proc/sys/vm/drop_caches; grep ^Cached: /proc/meminfo; sha256sum </etc/big; grep ^Cached: /proc/meminfo"
    )
    before, digest, after = said.splitlines()
    assert digest.split()[0] == world.big_sha256
    assert int(after.split()[1]) - int(before.split()[1]) < BIG / 1024 / 4


WRITER = r"""
mkdir -p /work
for i in $(seq 40); do
    dd if=/dev/urandom of=/work/$i bs=64k count=8 conv=fsync 2>/dev/null || exit 1
    (cd /work; sha256sum $i) >>/run/sums
    dd if=/dev/urandom of=/work/loose-$i bs=64k count=8 oflag=direct 2>/dev/null || exit 1
    (cd /work; sha256sum loose-$i) >>/run/sums
    echo "written $i" >/dev/console
done
"""


def test_e6_a_server_killed_under_a_guest_that_writes_loses_nothing(world: World) -> None:
    disk = world.home / "killed"
    create(world.session, disk, size=SIZE, mkfs="ext4")
    with attached(world, disk) as uri, world.boot_from(disk, reconnect=90) as guest:
        guest.start(WRITER)
        for written in (3, 12):
            wait_for(guest, f"written {written}\n")
            kill_server(disk)
            assert attach_detached(world.session, disk).uri == uri
        guest.finish(120)
        assert (
            guest.run("sync; echo 3 >/proc/sys/vm/drop_caches; cd /work && sha256sum -c /run/sums | grep -v ': OK' || echo whole")
            == "whole\n"
        )
        assert guest.run("touch /work/writable && grep -c ^ /run/sums") == "80\n"
        assert "I/O error" not in guest.console


def wait_for(guest: Guest, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in guest.console.replace("\r", ""):
        assert time.monotonic() < deadline, guest.console
        time.sleep(0.02)


def kill_server(disk: Path) -> None:
    """SIGKILL to the server of a disk; returns when it is gone, which closes the connection."""
    server = served(disk)
    assert server is not None
    try:
        os.kill(int(server.status()["pid"]), signal.SIGKILL)
        with pytest.raises(HostError):
            server.status()
    finally:
        server.close()


def test_the_kernels_own_nbd_client_mounts_our_disk(world: World) -> None:
    disk, other = world.home / "root", world.home / "other"
    for path in (disk, other):
        create(world.session, path, size=SIZE, mkfs="ext4")
    with attached(world, disk), attached(world, other, port=0) as uri, world.boot_from(disk, network=True) as guest:
        port = uri.rstrip("/").rpartition(":")[2]
        guest.run("ip link set lo up; ip link set eth0 up; ip address add 10.0.2.15/24 dev eth0")
        connect = f"nbd-client 10.0.2.2 {port} /dev/nbd0 -name '' -block-size 4096"
        guest.run(f"{connect}; mkdir /work; mount -t ext4 /dev/nbd0 /work")
        guest.run(
            "cp /etc/big /work/big; dd if=/etc/big of=/work/direct bs=1M oflag=direct; sync; rm /work/big; cp /etc/big /work/again; fstrim /work"
        )
        guest.run(f"umount /work; nbd-client -d /dev/nbd0; {connect}; mount -t ext4 /dev/nbd0 /work")
        assert {line.split()[0] for line in guest.run("cd /work; sha256sum direct again").splitlines()} == {world.big_sha256}
        assert guest.run("cat /sys/block/nbd0/size") == f"{SIZE // 512}\n"
        assert "error" not in guest.run("umount /work; nbd-client -d /dev/nbd0; dmesg | grep -i nbd0 || true").lower()
