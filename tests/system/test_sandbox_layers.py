"""What a sandbox leaves in its writable layer, and environments that mean harm."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_layers.errors import UsageError
from dsec_layers.sandbox import Bind, Captured, Network, RunSpec, Sandbox

pytestmark = pytest.mark.root

Shell = Callable[..., Captured]


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    path = tmp_path / "upper"
    path.mkdir()
    return path


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """An empty layer to go above the busybox root."""
    path = tmp_path / "top"
    path.mkdir(mode=0o755)
    return path


def names(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


def is_whiteout(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


@pytest.mark.parametrize("network", list(Network))
def test_a_run_that_writes_nothing_leaves_nothing(shell: Shell, upper: Path, tmp_path: Path, network: Network) -> None:
    """Neither mount points, nor the files bound over them, nor directories on the way: the busybox root has none of them."""
    binds = (Bind(tmp_path, "/some/where/deep"), Bind(Path("/etc/os-release"), "/etc/host-release"))
    done = shell("cat /etc/hosts /some/where/deep/nothing; ls -d /proc/1 /sys/kernel /dev/null", upper=upper, network=network, binds=binds)
    assert done.stdout.endswith(b"/dev/null\n/proc/1\n/sys/kernel\n")
    assert names(upper) == []


def test_the_root_directory_keeps_its_mode_and_owner(shell: Shell, upper: Path, busybox_root: Path, top: Path) -> None:
    top.chmod(0o711)
    os.chown(top, 5, 6)
    done = shell("stat -c '%a %u %g' /; ls /bin/cat", upper=upper, lower=[top, busybox_root], user="ann")
    assert done.stdout == b"711 5 6\n/bin/cat\n"
    assert (stat.S_IMODE(upper.stat().st_mode), upper.stat().st_uid, upper.stat().st_gid) == (0o711, 5, 6)


def test_a_missing_working_directory_is_made_alike_by_all(shell: Shell, upper: Path) -> None:
    assert shell("pwd", upper=upper, workdir="/new/work", user="ann").stdout == b"/new/work\n"
    assert names(upper) == ["new", "new/work"]
    for path in (upper / "new", upper / "new/work"):
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid, path.stat().st_gid) == (0o755, 0, 0)


def test_a_directory_with_mount_points_is_copied_up_as_the_environment_has_it(
    shell: Shell, upper: Path, busybox_root: Path, top: Path
) -> None:
    etc = top / "etc"
    etc.mkdir(mode=0o750)
    os.chown(etc, 7, 8)
    os.setxattr(etc, "user.mark", b"kept")
    shell("echo x > /etc/new; mkdir /etc/sub", upper=upper, lower=[top, busybox_root], network=Network.HOST)
    copied = (upper / "etc").stat()
    assert (stat.S_IMODE(copied.st_mode), copied.st_uid, copied.st_gid) == (0o750, 7, 8)
    assert os.getxattr(upper / "etc", "user.mark") == b"kept"
    assert names(upper) == ["etc", "etc/new", "etc/sub"]


def test_mount_points_that_a_layer_deleted_are_there_again(
    shell: Shell, upper: Path, busybox_root: Path, top: Path, tmp_path: Path
) -> None:
    below = tmp_path / "below"
    (below / "etc").mkdir(parents=True)
    for name in ("hosts", "resolv.conf"):
        (below / "etc" / name).write_text("old\n")
    (top / "etc").mkdir()
    os.mknod(top / "etc/hosts", stat.S_IFCHR, 0)
    os.mknod(top / "sys", stat.S_IFCHR, 0)
    done = shell("cat /etc/hosts; ls /sys/kernel >/dev/null && echo sys", upper=upper, lower=[top, below, busybox_root])
    assert b"localhost" in done.stdout
    assert done.stdout.endswith(b"sys\n")
    assert names(upper) == []


def test_an_opaque_directory_stays_opaque(shell: Shell, upper: Path, busybox_root: Path, top: Path) -> None:
    (top / "etc").mkdir()
    os.setxattr(top / "etc", "trusted.overlay.opaque", b"y")
    done = shell("ls /etc; echo x > /etc/new", upper=upper, lower=[top, busybox_root])
    assert done.stdout.split() == [b"hostname", b"hosts"]
    assert names(upper) == ["etc", "etc/new"]


def test_changes_are_kept_in_overlay_form(shell: Shell, upper: Path, tmp_path: Path, busybox_root: Path) -> None:
    """Case G7, the part that the writable layer decides: nothing in it needs redirects, metadata-only copies or an index."""
    base = tmp_path / "base"
    for name in ("gone", "again/old", "moved/deep", "attr"):
        (base / name).mkdir(parents=True)
    for name in ("gone/f", "again/old/f", "moved/deep/f", "chmod", "link", "replaced", "mtime"):
        (base / name).write_text(name)
    script = (
        "rm -r /gone; rm -r /again; mkdir /again; touch /again/new; mv /moved /renamed; chmod 600 /chmod; ln /link /linked; rm /replaced; mkdir /replaced;"
        "mknod /node c 1 3; dd if=/dev/zero of=/sparse bs=1 count=1 seek=1048575 2>/dev/null; touch /suid; chmod 4755 /suid; touch -d '2001-01-01' /mtime; touch /empty"
    )
    assert shell(script, upper=upper, lower=[base, busybox_root]).outcome.code == 0
    assert is_whiteout(upper / "gone")
    assert is_whiteout(upper / "moved")
    assert os.getxattr(upper / "again", "trusted.overlay.opaque") == b"y"
    assert os.getxattr(upper / "replaced", "trusted.overlay.opaque") == b"y"
    assert (upper / "renamed/deep/f").read_text() == "moved/deep/f"
    assert (upper / "chmod").read_text() == "chmod"
    assert (upper / "link").stat().st_ino == (upper / "linked").stat().st_ino
    assert (upper / "sparse").stat().st_blocks * 512 < 1 << 20
    assert stat.S_IMODE((upper / "suid").stat().st_mode) == 0o4755
    assert (upper / "node").stat().st_rdev == os.makedev(1, 3)
    allowed = {"trusted.overlay.opaque", "trusted.overlay.origin", "trusted.overlay.impure", "trusted.overlay.uuid"}
    for name in names(upper):
        assert set(os.listxattr(upper / name, follow_symlinks=False)) <= allowed, name


def test_a14_a_hard_link_is_broken_by_the_copy(shell: Shell, upper: Path, tmp_path: Path, busybox_root: Path) -> None:
    """Case A14. Without an index the other name keeps the old content; the writable layer says exactly what the sandbox saw."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "a").write_text("old\n")
    (base / "b").hardlink_to(base / "a")
    done = shell("echo new >> /a; cat /a /b", upper=upper, lower=[base, busybox_root])
    assert done.stdout == b"old\nnew\nold\n"
    assert names(upper) == ["a"]
    assert shell("cat /a /b", lower=[upper, base, busybox_root]).stdout == done.stdout


@pytest.mark.parametrize("target", ["{victim}", "../../../../../../../../..{victim}", "/proc/self/root{victim}"])
def test_links_at_mount_points_do_not_lead_out(
    shell: Shell, upper: Path, busybox_root: Path, top: Path, tmp_path: Path, target: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched\n")
    (top / "etc").mkdir()
    for name in ("resolv.conf", "hosts", "hostname"):
        (top / "etc" / name).symlink_to(target.format(victim=victim))
    script = "for f in resolv.conf hosts hostname; do echo changed > /etc/$f; test -L /etc/$f; echo $?; done"
    done = shell(script, upper=upper, lower=[top, busybox_root], network=Network.HOST)
    assert done.stdout == b"1\n1\n1\n"
    assert victim.read_text() == "untouched\n"
    assert names(upper) == []


@pytest.mark.parametrize("shape", ["link", "dangling", "file", "fifo", "device"])
def test_system_directories_of_the_wrong_shape(
    shell: Shell, upper: Path, busybox_root: Path, top: Path, tmp_path: Path, shape: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("proc", "dev", "sys", "run"):
        place = top / name
        match shape:
            case "link":
                place.symlink_to(victim)
            case "dangling":
                place.symlink_to("/no/where")
            case "file":
                place.write_text("x")
            case "fifo":
                os.mkfifo(place)
            case _:
                os.mknod(place, stat.S_IFCHR, os.makedev(4, 64))
    done = shell(
        "cat /proc/1/comm; ls /dev/null /sys/kernel/mm -d; ls /run/dsec-layers",
        upper=upper,
        lower=[top, busybox_root],
        network=Network.HOST,
    )
    assert done.stdout.startswith(b"sh\n")
    assert b"/dev/null\n/sys/kernel/mm\n" in done.stdout
    assert b"apt.conf" in done.stdout
    assert list(victim.iterdir()) == []
    assert names(upper) == []


def test_etc_that_is_a_link_is_followed_inside(shell: Shell, upper: Path, tmp_path: Path, busybox_root: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(busybox_root, base, symlinks=True)
    (base / "etc").rename(base / "usr/etc")
    (base / "etc").symlink_to("/usr/etc")
    done = shell("grep -c localhost /usr/etc/hosts; id -un; readlink /etc", upper=upper, lower=[base], user="ann")
    assert done.stdout == b"2\nann\n/usr/etc\n"
    assert names(upper) == []


@pytest.mark.parametrize("shape", ["outside", "fifo", "loop", "huge"])
def test_a_passwd_file_that_means_harm(shell: Shell, busybox_root: Path, top: Path, tmp_path: Path, shape: str) -> None:
    """Looking a user up neither hangs, nor reads the host's file, nor takes more memory than a passwd file may."""
    secret = tmp_path / "passwd"
    secret.write_text("bob:x:77:77::/:/bin/sh\n")
    place = top / "etc/passwd"
    place.parent.mkdir()
    match shape:
        case "outside":
            place.symlink_to(secret)
        case "fifo":
            os.mkfifo(place)
        case "loop":
            place.symlink_to("passwd")
        case _:
            with open(place, "wb") as stream:
                stream.truncate(1 << 40)
    with pytest.raises(UsageError, match="no user 'bob'"):
        shell("true", lower=[top, busybox_root], user="bob")


def test_a_writable_layer_must_be_empty(busybox_root: Path, state: Path, upper: Path) -> None:
    (upper / "x").touch()
    with pytest.raises(UsageError, match="not empty"):
        Sandbox(RunSpec(("/bin/true",)), [busybox_root], state=state, upper=upper)
