"""Mounting layers and environments by the daemon: what works, what is refused and how, what heals."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import Conflict, HostError, LimitError, NotFound, StoreError, UsageError
from dsec_layers.fuse.client.control import connect, receive, send
from dsec_layers.fuse.client.host import open_host
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.frames import join_metadata
from dsec_layers.layers.manifest import Layer, LayerConfig
from dsec_layers.layers.tables import SEGMENT, pack_segments
from dsec_layers.linux.mount import mount_overlay, umount
from dsec_layers.proc import run
from dsec_layers.registry.objects import load_config, publish_object, put_blob
from dsec_layers.store.posix import PosixStore
from tests.kit.cache_kit import cached_bytes, daemon, eventually, log_of, needs_fanotify, processes_of, unmount_below
from tests.kit.store_samples import Sample, content, make_environment, make_layer, publish_config

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

BASE = {"os": content(1, 300_000), "same": content(2, 70_000)}
WORK = {"project": content(3, 150_000), "same": content(4, 70_001)}
TOOL = {"agent": content(5, 90_000)}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    needs_fanotify(tmp_path / "cache")
    (tmp_path / "target").mkdir()
    yield tmp_path
    unmount_below(tmp_path)


@pytest.fixture
def store(place: Path) -> PosixStore:
    return PosixStore(place / "store")


def read_tree(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def three(store: PosixStore) -> list[Sample]:
    return [
        make_layer(store, BASE),
        make_layer(store, WORK, kind=Kind.WORKSPACE),
        make_layer(store, TOOL, kind=Kind.TOOLKIT),
    ]


def test_an_environment_is_its_layers_in_order(place: Path, store: PosixStore) -> None:
    samples = three(store)
    environment = make_environment(store, samples)
    target = place / "target"
    with daemon(place / "cache", ["--linger", "0"]) as host:
        made = host.mount(store, environment, target, label="dev:1")
        assert read_tree(target) == BASE | WORK | TOOL
        assert (made.label, made.driver, made.layers) == ("dev:1", "fanotify", tuple(sample.digest for sample in samples))
        assert host.mounts() == [made]
        with pytest.raises(OSError, match="Read-only"):
            (target / "new").write_text("x")
        with host.attach(store, [samples[1].digest, samples[0].digest]) as lease:
            assert [read_tree(path) for path in lease.paths] == [WORK, BASE]
            assert sorted(layer.users for layer in host.show().layers) == [1, 2, 2]
        host.umount(target)
        assert host.mounts() == []
        eventually(lambda: host.show().layers == ())
        assert list((place / "cache" / "layers").iterdir()) == []


def test_targets_that_cannot_be(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    target = place / "target"
    (place / "file").write_text("x")
    with daemon(place / "cache") as host:
        with pytest.raises(NotFound, match="does not exist"):
            host.mount(store, sample.digest, place / "nowhere")
        with pytest.raises(UsageError, match="not a directory"):
            host.mount(store, sample.digest, place / "file")
        host.mount(store, sample.digest, target)
        with pytest.raises(Conflict, match="mounted at"):
            host.mount(store, sample.digest, target)
        with pytest.raises(NotFound, match="nothing of this cache"):
            host.umount(place)
        with pytest.raises(NotFound):
            host.mount(store, "sha256:" + "0" * 64, place / "cache")
        with pytest.raises(UsageError):
            host.mount(store, "no digest", place / "cache")
        with open(target / "os", "rb"):
            with pytest.raises(Conflict, match="in use"):
                host.umount(target)
            host.umount(target, lazy=True)
        (place / "link").symlink_to(target)
        assert host.mount(store, sample.digest, place / "link").target == str(target)
        umount(target)  # by hand, behind the daemon's back
        assert host.mounts() == []
        host.mount(store, sample.digest, target)
        assert read_tree(target) == BASE


def test_b5_what_somebody_else_mounted_over_a_mount_is_not_unmounted(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    target, other = place / "target", place / "other"
    for name in ("a/theirs", "b"):
        (other / name).mkdir(parents=True)
    with daemon(place / "cache") as host:
        host.mount(store, sample.digest, target)
        mount_overlay(target, [other / "a", other / "b"])
        for lazy in (False, True):
            with pytest.raises(Conflict, match="somebody else"):
                host.umount(target, lazy=lazy)
        assert (target / "theirs").is_dir()
        umount(target)
        assert read_tree(target) == BASE
        host.mount(store, sample.digest, other / "b")
        host.umount(other / "b")


def test_c1_many_layers_and_a_long_path(place: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)  # making the layers is not what is tested
    cache = place / ("long" * 25) / ("path" * 25) / "cache"
    samples = [
        make_layer(store, {f"f{number}": content(number, 5000)}, kind=Kind.BASE if number == 0 else Kind.TOOLKIT) for number in range(120)
    ]
    with daemon(cache) as host:
        host.mount(store, make_environment(store, samples), place / "target")
        assert read_tree(place / "target") == {f"f{number}": content(number, 5000) for number in range(120)}
        members = [samples[0], *(samples[1 + at % 119] for at in range(500))]
        too_many = make_environment(store, members)
        (place / "other").mkdir()
        with pytest.raises(LimitError, match="501 layers"):
            host.mount(store, too_many, place / "other")
        assert not os.path.ismount(place / "other")


@pytest.mark.slow
def test_c1_five_hundred_layers(place: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    samples = [
        make_layer(store, {f"f{number}": b"x" * (number + 1)}, kind=Kind.BASE if number == 0 else Kind.TOOLKIT) for number in range(500)
    ]
    with daemon(place / "cache") as host:
        host.mount(store, make_environment(store, samples), place / "target")
        assert len(read_tree(place / "target")) == 500


@pytest.mark.logs("is damaged and is fetched again")
def test_d3_damaged_metadata_is_fetched_again(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    metadata = place / "cache" / "metadata"
    for damage in ("flip", "truncate", "junk"):
        with daemon(place / "cache") as host, host.attach(store, [sample.digest]) as lease:
            assert read_tree(lease.paths[0]) == BASE
        for suffix in (".erofs", ".table", ".json"):
            (path,) = metadata.glob(f"*{suffix}")
            body = bytearray(path.read_bytes())
            body[len(body) // 2] ^= 1
            path.write_bytes({"flip": bytes(body), "truncate": bytes(body[:-100]), "junk": b"junk"}[damage])
    with daemon(place / "cache") as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE


@pytest.mark.logs("is fetched again")
def test_d3_damaged_segments_are_fetched_again_once(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    with daemon(place / "cache") as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
    for number, path in enumerate(sorted((place / "cache" / "present").iterdir())):
        body = bytearray(path.read_bytes())
        body[100] ^= 1
        path.write_bytes(bytes(body) if number % 2 else bytes(body[:4096]) if len(body) > 4096 else b"")
    with daemon(place / "cache") as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
        report = host.show()
        assert report.fetched == report.healed == len(sample.segments)


def test_a_warm_cache_needs_no_store(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    with daemon(place / "cache") as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
    store.root.rename(place / "gone")
    with daemon(place / "cache") as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
        assert (host.show().events, host.show().fetched) == (0, 0)


def test_two_layers_share_their_segments(place: Path, store: PosixStore) -> None:
    lower = make_layer(store, BASE)
    upper = make_layer(store, TOOL, kind=Kind.TOOLKIT, borrow=lower)
    with daemon(place / "cache") as host, host.attach(store, [lower.digest, upper.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
        before = host.show().fetched
        (lease.paths[1] / "borrowed").read_bytes()
        assert host.show().fetched == before, "the segment is here already"
        assert (lease.paths[1] / "agent").read_bytes() == TOOL["agent"]
    with daemon(place / "cache") as host, host.attach(store, [upper.digest]) as lease:
        assert (lease.paths[0] / "borrowed").read_bytes() in (BASE["os"][:65536], BASE["same"][:65536])


def test_clear_removes_what_no_mount_uses(place: Path, store: PosixStore) -> None:
    lower, upper = make_layer(store, BASE), make_layer(store, WORK, kind=Kind.WORKSPACE)
    with daemon(place / "cache", ["--linger", "600"]) as host:
        with host.attach(store, [lower.digest, upper.digest]) as lease:
            expected = [read_tree(path) for path in lease.paths]
        with host.attach(store, [lower.digest]) as lease:
            freed = host.clear()
            assert freed.segments == len(upper.segments) and freed.bytes > 0
            assert host.show().segments == len(lower.segments)
            assert read_tree(lease.paths[0]) == expected[0]
        assert host.clear().segments == len(lower.segments)
        assert [list((place / "cache" / name).iterdir()) for name in ("present", "absent", "metadata")] == [[], [], []]
        with host.attach(store, [lower.digest, upper.digest]) as lease:
            assert [read_tree(path) for path in lease.paths] == expected


def test_d5_the_cache_has_one_daemon_and_tools_ask_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsec_layers.cache.directory import CacheDirectory

    cache = place / "cache"
    with daemon(cache) as host:
        report = host.show()
        with open_host(cache) as other:
            assert other.show().pid == report.pid
        with pytest.raises(Conflict, match=str(report.keeper)):
            CacheDirectory(cache)
    monkeypatch.setattr("dsec_layers.fuse.daemon.__main__._START", 0.2)
    from dsec_layers.fuse.daemon.__main__ import main

    with CacheDirectory(cache):
        assert main(["--cache", str(cache)]) == Conflict.exit_code
        assert f"in use by process {os.getpid()}, which is no daemon" in capsys.readouterr().err


def test_a_layer_of_the_compressed_layout_is_one_image(place: Path, store: PosixStore) -> None:
    source, image = place / "source", place / "image"
    source.mkdir()
    for name, data in BASE.items():
        (source / name).write_bytes(data)
    run(["mkfs.erofs", "-zlz4hc", image, source])
    blob = put_blob(store, d.EROFS, image.read_bytes())
    sample = make_layer(store, BASE)
    config = compressed_config(store, sample)
    digest = publish_object(store, Layer(Kind.TOOLKIT, config, blob))
    with daemon(place / "cache") as host:
        host.mount(store, digest, place / "target")
        assert read_tree(place / "target") == BASE
        assert host.show().events == 0
        host.umount(place / "target")
    kept = place / "cache" / "images" / f"{blob.digest[7:]}.erofs"
    body = kept.read_bytes()
    kept.write_bytes(body[:-4096])
    with daemon(place / "cache") as host:
        host.mount(store, digest, place / "target")
        assert read_tree(place / "target") == BASE
    assert kept.read_bytes() == body


def compressed_config(store: PosixStore, sample: Sample) -> Descriptor:
    return publish_config(store, replace(load_config(store, sample.layer), kind=Kind.TOOLKIT, layout="compressed"))


def test_c5_a_cache_on_a_file_system_that_cannot_is_refused_with_the_way_out(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    memory = place / "memory"
    memory.mkdir()
    run(["mount", "-t", "tmpfs", "tmpfs", memory])
    with daemon(memory / "cache") as host, pytest.raises(HostError, match="is on tmpfs") as caught:
        host.attach(store, [sample.digest], driver="fanotify")
    assert caught.value.hint is not None and "fuse driver" in caught.value.hint
    assert processes_of(memory / "cache") == []


@pytest.mark.logs("is not a store")
def test_a_store_that_is_not_there_is_named(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    store.root.rename(place / "gone")
    with daemon(place / "cache", ["--deadline", "0.5"]) as host:
        with pytest.raises((StoreError, UsageError, NotFound), match="store"):
            host.attach(store, [sample.digest])
        assert host.show().leases == 0 and host.show().layers == ()


def test_hostile_messages_end_the_connection_at_most(place: Path) -> None:
    with daemon(place / "cache") as host:
        for raw in (b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{", b"\0\0\0\x05{}"):
            channel = connect(place / "cache", 5)
            assert channel is not None
            with channel:
                assert receive(channel) is not None
                channel.sendall(raw)
                channel.shutdown(1)
                assert receive(channel) is None
        channel = connect(place / "cache", 5)
        assert channel is not None
        with channel:
            receive(channel)
            for message in (
                {},
                {"op": "mount"},
                {"op": "attach", "identifier": "../../x", "store": 1, "layers": 7, "holder": []},
                {"op": "nonsense"},
            ):
                send(channel, message)
                answer = receive(channel)
                assert answer is not None and answer[0]["error"]["type"] == "UsageError"
        assert host.show().leases == 0


def test_it_ends_by_itself_when_nothing_is_mounted(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, BASE)
    host = open_host(place / "cache", options=["--idle", "0.2", "--linger", "0"])
    with host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
    pids = processes_of(place / "cache")
    assert len(pids) == 2
    host.close()
    eventually(lambda: processes_of(place / "cache") == [])
    host = open_host(place / "cache", options=["--idle", "60"])
    assert host.show().segments == len(sample.segments)
    host.stop()
    assert log_of(place / "cache").count("ended") == 2


@pytest.mark.logs("died together", "the (keeper|worker) died", "is about no segment of this cache .*/poisoned/")
def test_holes_instead_of_empty_files(place: Path, store: PosixStore) -> None:
    """As on kernels that take a short read for success: the same, but after total death mounts are poisoned and must not be served."""
    lower, upper = make_layer(store, BASE), make_layer(store, WORK, kind=Kind.WORKSPACE)
    options = ["--holes", "--linger", "0"]
    whole, part = place / "target", place / "part"
    part.mkdir()
    with daemon(place / "cache", options) as host:
        host.mount(store, upper.digest, whole)
        assert read_tree(whole) == WORK
        host.mount(store, lower.digest, part)
        holes = list((place / "cache" / "absent").iterdir())
        assert len(holes) == len(lower.segments)
        assert all(path.stat().st_size > 0 and path.stat().st_blocks == 0 for path in holes)
        report = host.show()
        os.kill(report.keeper, signal.SIGKILL)
        os.kill(report.pid, signal.SIGKILL)
        eventually(lambda: processes_of(place / "cache") == [])
        assert (part / "same").read_bytes() == bytes(70_000), "the hazard that this is about"
        host.close()
        with open_host(place / "cache", options=["--idle", "60", *options]) as again:
            (warning,) = again.warnings
            assert "umount -l" in warning and str(part) in warning and str(whole) not in warning
            assert {mount.target: mount.poisoned for mount in again.mounts()} == {str(whole): False, str(part): True}
            assert read_tree(whole) == WORK
            with pytest.raises(OSError, match="Input/output"):
                (part / "os").read_bytes()
            with again.attach(store, [lower.digest]) as lease:
                assert read_tree(lease.paths[0]) == BASE
                with pytest.raises(OSError, match="Input/output"):
                    (part / "os").read_bytes()
            again.umount(part)
            again.mount(store, lower.digest, part)
            assert read_tree(part) == BASE
        with open_host(place / "cache") as again:
            assert again.warnings == ()


def _whiteouts(store: PosixStore) -> Sample:
    """A diff as a build makes it: whiteouts of names below, of names that nobody has, and in a directory that nobody below has."""
    tree = Tree()
    marked = ((b"trusted.overlay.origin", b""),)
    folder = Inode(stat.S_IFDIR | 0o755)
    folder.xattrs = tree.root.xattrs = marked
    kept = Inode(stat.S_IFREG | 0o644)
    kept.data, kept.size = b"kept", 4
    folder.children = {b"kept": kept, b"ghost": Inode(stat.S_IFCHR)}
    tree.root.children = {b"os": Inode(stat.S_IFCHR), b"never": Inode(stat.S_IFCHR), b"new": folder}
    none = np.zeros(0, SEGMENT)
    metadata = put_blob(store, d.METADATA, join_metadata(render(tree, []), pack_segments(none)))
    config = publish_config(store, LayerConfig(Kind.DIFF, "diff"))
    layer = Layer(Kind.DIFF, config, metadata)
    return Sample(publish_object(store, layer), layer, none, none)


@pytest.mark.parametrize("driver", ["fanotify", "fuse"])
def test_a10_whiteouts_are_never_visible(place: Path, store: PosixStore, driver: str) -> None:
    base, diff = make_layer(store, BASE), _whiteouts(store)
    target = place / "target"
    with daemon(place / "cache") as host:
        for digest, wanted in ((make_environment(store, [base, diff]), {"same", "new"}), (diff.digest, {"new"})):
            host.mount(store, digest, target, driver=driver)
            assert {entry.name for entry in target.iterdir()} == wanted
            assert [entry.name for entry in (target / "new").iterdir()] == ["kept"]
            for name in ("os", "never", "new/ghost"):
                with pytest.raises(FileNotFoundError):
                    (target / name).lstat()
            assert (target / "new" / "kept").read_bytes() == b"kept"
            host.umount(target)


def test_b9_a_layer_without_segments_or_anything(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, {})
    with daemon(place / "cache") as host:
        host.mount(store, sample.digest, place / "target")
        assert list((place / "target").iterdir()) == []


def test_f1_unused_segments_are_kept_below_the_limit(place: Path, store: PosixStore) -> None:
    first, second = make_layer(store, BASE), make_layer(store, WORK, kind=Kind.WORKSPACE)
    limit = int(first.segments["size"].sum())
    with daemon(place / "cache", ["--linger", "0", "--limit", str(limit), "--idle", "60"]) as host:
        with host.attach(store, [first.digest]) as lease:
            assert read_tree(lease.paths[0]) == BASE
        with host.attach(store, [second.digest]) as lease:
            assert read_tree(lease.paths[0]) == WORK
            eventually(lambda: host.show().bytes <= limit)
            assert read_tree(lease.paths[0]) == WORK
            assert host.show().fetched == len(first.segments) + len(second.segments), "what is mounted is not removed"
        with host.attach(store, [first.digest]) as lease:
            assert read_tree(lease.paths[0]) == BASE


@pytest.mark.parametrize("options", [["--drop", "0.05"], ["--directio"]], ids=["dropped", "direct"])
def test_nothing_stays_cached_twice(place: Path, store: PosixStore, options: list[str]) -> None:
    sample = make_layer(store, BASE)
    with daemon(place / "cache", options) as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == BASE
        present = list((place / "cache" / "present").iterdir())
        assert len(present) == len(sample.segments)
        eventually(lambda: sum(map(cached_bytes, present)) == 0)
        if "--drop" in options:
            for path in present:
                path.read_bytes()  # as a reader that was slower than the daemon
            eventually(lambda: sum(map(cached_bytes, present)) == 0)
        assert sum(cached_bytes(path) for path in lease.paths[0].iterdir()) >= sum(map(len, BASE.values())), "the mounted files stay cached"
        assert read_tree(lease.paths[0]) == BASE
