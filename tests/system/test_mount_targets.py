"""Where the daemon mounts: at the directory it looked at, whatever has its name by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_layers.errors import Conflict, HostError, NotFound, UsageError
from dsec_layers.fuse.mounts import manager as module
from dsec_layers.linux.mount import MountTarget, mount_bind, mount_overlay, umount
from dsec_layers.linux.mountinfo import read_mounts
from tests.kit.cache_kit import Stage, unmount_below

pytestmark = pytest.mark.root


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    for name in ("outer/target", "victim/target"):
        (tmp_path / name).mkdir(parents=True)
    yield tmp_path
    unmount_below(tmp_path)


def mounts_below(place: Path) -> list[str]:
    return [mount.target for mount in read_mounts() if mount.target.startswith(f"{place}/")]


def to_a_link(place: Path) -> None:
    (place / "outer/target").rename(place / "moved")
    (place / "outer/target").symlink_to(place / "victim")


def to_a_link_in_the_path(place: Path) -> None:
    (place / "outer").rename(place / "moved")
    (place / "outer").symlink_to(place / "victim")


def to_a_directory(place: Path) -> None:
    (place / "outer/target").rename(place / "moved")
    (place / "victim").rename(place / "outer/target")


def to_nothing(place: Path) -> None:
    (place / "outer/target").rmdir()


@pytest.mark.parametrize("change", [to_a_link, to_a_link_in_the_path, to_a_directory, to_nothing])
def test_b5_the_target_changes_between_the_check_and_the_mount(
    place: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    stage = Stage(place)

    def change_and_mount(source: Path, target: MountTarget) -> None:
        change(place)
        mount_bind(source, target)

    monkeypatch.setattr(module, "mount_bind", change_and_mount)
    with pytest.raises((Conflict, HostError)):
        stage.manager.mount(stage.use.store, stage.sample.digest, str(place / "outer/target"), "", "test")
    assert mounts_below(place) == []
    assert stage.manager.leases() == []
    stage.close()


def test_a_target_is_a_directory_without_links_or_mounts(place: Path) -> None:
    target = place / "outer/target"
    (place / "link").symlink_to(place / "outer")
    (place / "file").touch()
    (place / "lower/seen").mkdir(parents=True)
    for wrong, kind in (
        (place / "link", UsageError),
        (place / "link/target", UsageError),
        (place / "file", UsageError),
        (Path("target"), UsageError),
        (place / "victim/../outer/target", UsageError),
        (place / "nowhere", NotFound),
        (place / "file/x", NotFound),
    ):
        with pytest.raises(kind):
            MountTarget(str(wrong))
    with MountTarget(str(target)) as found:
        mount_overlay(found, [place / "victim", place / "lower"])
    assert mounts_below(place) == [str(target)] and (target / "seen").is_dir()
    with pytest.raises(Conflict, match="mounted at"):
        MountTarget(str(target))
    umount(target)
    assert mounts_below(place) == []
