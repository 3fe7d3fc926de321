"""The directory store beyond the contract: what is on disk, what a crash or another process leaves, full disks, unmounted directories."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import Conflict, CorruptError, NoSpace, NotFound, StoreError, UsageError
from dsec_layers.store import posix_refs
from dsec_layers.store.open import open_store, register_scheme
from dsec_layers.store.posix import MARKER, PosixStore, is_3fs
from dsec_layers.store.transfer import put_bytes, put_stream

DATA = b"0123456789" * 1000
DIGEST = sha256_digest(DATA)
OTHER = sha256_digest(b"other")


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


def blob_path(store: PosixStore, digest: str = DIGEST) -> Path:
    return store.root / "blobs" / "sha256" / digest[7:9] / digest[7:]


def damage(store: PosixStore, data: bytes) -> None:
    """Write to the blob's file, which nobody does who means well: it is read-only."""
    blob_path(store).chmod(0o644)
    blob_path(store).write_bytes(data)


def files_below(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*") if item.is_file())


def age(path: Path, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


def test_what_is_on_disk(store: PosixStore) -> None:
    put_bytes(store, DATA)
    store.set_ref("a/b:1", DIGEST, expected=None)
    number = f"refs/a+b/1/{1:020d}"
    assert files_below(store.root) == [f"blobs/sha256/{DIGEST[7:9]}/{DIGEST[7:]}", MARKER, number]
    assert blob_path(store).read_bytes() == DATA
    assert (store.root / number).read_text() == DIGEST + "\n"
    store.set_ref("a/b:1", None, expected=DIGEST)
    assert (store.root / f"refs/a+b/1/{2:020d}").read_text() == "-\n"


def test_a_directory_that_is_not_mounted_is_unknown_not_empty(store: PosixStore) -> None:
    put_bytes(store, DATA)
    store.set_ref("a:1", DIGEST, expected=None)
    store.root.rename(store.root.with_name("elsewhere"))
    store.root.mkdir()
    calls = (
        lambda: store.stat(DIGEST),
        lambda: store.read(DIGEST, 0, 1),
        lambda: store.touch(DIGEST),
        lambda: store.delete(DIGEST),
        lambda: store.get_ref("a:1"),
        lambda: store.set_ref("a:1", DIGEST, expected=None),
        lambda: list(store.list()),
        lambda: list(store.list_refs()),
        lambda: put_bytes(store, DATA),
    )
    for call in calls:
        with pytest.raises(StoreError):
            call()
    assert files_below(store.root) == []


def test_only_a_store_or_an_empty_directory_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError):
        PosixStore(tmp_path)
    assert files_below(tmp_path) == ["file"]
    with pytest.raises(StoreError):
        PosixStore(tmp_path / "absent", create=False)
    assert not (tmp_path / "absent").exists()
    with pytest.raises(StoreError):
        PosixStore(tmp_path / "file" / "below")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: PosixStore(tmp_path / "new"), range(32)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_space_and_leaves_nothing(store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpace):
            put_bytes(store, DATA)
        with pytest.raises(NoSpace):
            store.set_ref("a:1", DIGEST, expected=None)
    assert files_below(store.root) == [MARKER]
    assert put_bytes(store, DATA).size == len(DATA)


def test_an_io_error_is_a_store_error(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put_bytes(store, DATA)

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        with pytest.raises(StoreError, match="Input/output error"):
            store.read(DIGEST, 0, 10)


def test_c4_a_blob_cut_short_is_corrupt_and_heals_when_it_is_put_again(store: PosixStore) -> None:
    put_bytes(store, DATA)
    damage(store, DATA[:4096])
    with pytest.raises(CorruptError):
        store.read(DIGEST, 0, len(DATA))
    assert put_bytes(store, DATA).size == len(DATA)
    assert store.read(DIGEST, 0, len(DATA)) == DATA


def test_c4_bytes_are_durable_before_the_name_and_the_name_before_the_answer(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of system calls is the oracle: what a power failure leaves is a prefix of what was made durable."""
    trace: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def traced_fsync(fd: int) -> None:
        path = str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(store.root))
        size = os.fstat(fd).st_size if path.startswith("tmp/") else 0
        trace.append(("fsync", f"tmp {size}" if path.startswith("tmp/") else path))
        fsync(fd)

    def traced_link(source: Path, target: Path) -> None:
        trace.append(("link", str(Path(target).relative_to(store.root))))
        link(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    put_bytes(store, DATA)
    shard = f"blobs/sha256/{DIGEST[7:9]}"
    assert trace == [("fsync", f"tmp {len(DATA)}"), ("fsync", "blobs/sha256"), ("link", f"{shard}/{DIGEST[7:]}"), ("fsync", shard)]
    trace.clear()
    store.set_ref("a:1", DIGEST, expected=None)
    number = f"refs/a/1/{1:020d}"
    assert trace == [("fsync", "refs"), ("fsync", "refs/a"), ("fsync", "tmp 72"), ("link", number), ("fsync", "refs/a/1")]


def test_a_file_replaced_by_another_process_is_opened_anew_when_the_old_one_is_short(store: PosixStore) -> None:
    put_bytes(store, DATA)
    damage(store, b"")
    with pytest.raises(CorruptError):
        store.read(DIGEST, 0, 10)
    whole = store.root / "tmp" / "whole"
    whole.write_bytes(DATA)
    whole.rename(blob_path(store))
    assert store.read(DIGEST, 0, 10) == DATA[:10]


def test_suspect_reads_through_a_new_descriptor(store: PosixStore) -> None:
    put_bytes(store, DATA)
    assert store.read(DIGEST, 0, 3) == b"012"
    whole = store.root / "tmp" / "whole"
    whole.write_bytes(b"abc" + DATA[3:])
    whole.rename(blob_path(store))
    assert store.read(DIGEST, 0, 3) == b"012"
    store.suspect(DIGEST)
    assert store.read(DIGEST, 0, 3) == b"abc"


def test_old_temporary_files_are_swept_and_young_ones_stay(store: PosixStore) -> None:
    for name, seconds in (("dead", 25 * 3600), ("alive", 23 * 3600)):
        (store.root / "tmp" / name).write_bytes(b"x")
        age(store.root / "tmp" / name, seconds)
    put_bytes(store, DATA)
    assert files_below(store.root / "tmp") == ["alive"]


def test_strange_names_are_not_blobs_or_refs(store: PosixStore) -> None:
    put_bytes(store, DATA)
    shard = blob_path(store).parent
    (shard / ".nfs0001").write_bytes(b"x")
    (shard / ("A" * 64)).write_bytes(b"x")
    (shard / ("0" * 64)).mkdir()
    (shard.parent / "lost+found").mkdir()
    (store.root / "refs" / "a" / "1").mkdir(parents=True)
    (store.root / "refs" / "a" / "1" / ".nfs0002").write_bytes(b"x")
    (store.root / "refs" / "file").write_bytes(b"x")
    assert [info.digest for info in store.list()] == [DIGEST]
    assert list(store.list_refs()) == []


def test_a_collector_killed_between_its_steps_loses_no_blob_that_was_touched(store: PosixStore) -> None:
    """Its last step before the kill was the rename into the trash, and a publisher had touched the blob just before."""
    put_bytes(store, DATA)
    cutoff = time.time_ns() - 3600 * 10**9
    trashed = store.root / "trash" / DIGEST[7:9] / f"{DIGEST[7:]}.{cutoff}.{time.time_ns()}"
    for call in (lambda: store.stat(DIGEST), lambda: store.touch(DIGEST), lambda: store.read(DIGEST, 0, 1), store.housekeep):
        trashed.parent.mkdir(exist_ok=True)
        blob_path(store).rename(trashed)
        store.suspect(DIGEST)
        call()
        assert blob_path(store).read_bytes() == DATA
        assert files_below(store.root / "trash") == []


def test_a_collector_killed_between_its_steps_brings_nothing_back_that_was_old(store: PosixStore) -> None:
    put_bytes(store, DATA)
    age(blob_path(store), 7200)
    trashed = store.root / "trash" / DIGEST[7:9] / f"{DIGEST[7:]}.{time.time_ns() - 3600 * 10**9}.{time.time_ns()}"
    trashed.parent.mkdir()
    blob_path(store).rename(trashed)
    with pytest.raises(NotFound):
        store.touch(DIGEST)
    store.housekeep()
    assert files_below(store.root / "trash") == []


def test_a_touch_between_look_and_rename_keeps_the_blob(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put_bytes(store, DATA)
    age(blob_path(store), 7200)
    rename = os.rename

    def touched_first(source: Path, target: Path) -> None:
        os.utime(source)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", touched_first)
        assert not store.delete(DIGEST, older_than=time.time() - 3600)
    assert store.read(DIGEST, 0, 10) == DATA[:10]


def test_removed_blobs_stay_for_a_time_where_that_is_asked_for(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store", keep_removed=3600)
    put_bytes(store, DATA)
    store.delete(DIGEST)
    assert len(files_below(store.root / "trash")) == 1
    with pytest.raises(NotFound):
        store.stat(DIGEST)
    store.housekeep()
    (kept,) = (store.root / "trash" / DIGEST[7:9]).iterdir()
    name, cutoff, when = kept.name.split(".")
    kept.rename(kept.with_name(f"{name}.{cutoff}.{int(when) - 3601 * 10**9}"))
    store.housekeep()
    assert files_below(store.root / "trash") == []


# Refs


def numbers(store: PosixStore, ref: str = "a/1") -> list[int]:
    return sorted(int(path.name) for path in (store.root / "refs" / ref).iterdir())


def test_old_numbers_go_when_old_and_not_among_the_last(store: PosixStore) -> None:
    value = None
    for number in range(12):
        new = sha256_digest(str(number).encode())
        store.set_ref("a:1", new, expected=value)
        value = new
    assert numbers(store) == list(range(1, 13))
    for number in range(1, 12):
        age(store.root / "refs/a/1" / f"{number:020d}", 3700)
    store.set_ref("a:1", OTHER, expected=value)
    assert numbers(store) == list(range(6, 14))
    assert store.get_ref("a:1").digest == OTHER


def test_a_link_made_too_late_is_taken_back(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_ref("a:1", DIGEST, expected=None)
    times = iter((0.0, posix_refs.LATE + 1))
    monkeypatch.setattr(posix_refs, "_now", lambda: next(times))
    with pytest.raises(StoreError, match="taken back"):
        store.set_ref("a:1", OTHER, expected=DIGEST)
    assert numbers(store) == [1]
    assert store.get_ref("a:1").digest == DIGEST


def test_a_writer_with_an_old_view_of_the_directory_loses(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_ref("a:1", DIGEST, expected=None)
    store.set_ref("a:1", OTHER, expected=DIGEST)
    monkeypatch.setattr(posix_refs, "_numbers", lambda _: [1])
    with pytest.raises(Conflict):
        store.set_ref("a:1", sha256_digest(b"late"), expected=DIGEST)
    monkeypatch.undo()
    assert store.get_ref("a:1").digest == OTHER


def test_a_damaged_ref_is_named(store: PosixStore) -> None:
    store.set_ref("a:1", DIGEST, expected=None)
    for text in ("", "sha256:short\n", DIGEST + "\nmore", "\xff"):
        (store.root / f"refs/a/1/{2:020d}").write_text(text)
        with pytest.raises(CorruptError, match="00000000000000000002"):
            store.get_ref("a:1")


# Opening


def test_urls(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/s%20p?patience=0.5&keep-removed=60")
    assert isinstance(store, PosixStore)
    assert store.root == tmp_path / "s p"
    put_stream(store, [b"x"])
    again = open_store(store.url, create=False)
    assert again.url == store.url
    assert again.stat(sha256_digest(b"x")).size == 1
    for bad in ("", "nfs://x/y", f"file://{tmp_path}/x?other=1", f"file://{tmp_path}/x?patience=long", "file://host/x"):
        with pytest.raises(UsageError):
            open_store(bad)


def test_schemes_are_registered_once() -> None:
    with pytest.raises(ValueError, match="taken"):
        register_scheme("file", "x:y")


def test_3fs_is_found_in_the_mount_table(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "22 21 0:50 / /3fs/stage rw shared:7 - fuse.hf3fs hf3fs.stage rw\n"
        "23 22 0:51 / /3fs/stage/local rw - tmpfs none rw\n"
        "24 21 0:52 / /with\\040space rw - fuse.hf3fs hf3fs.x rw\n"
    )
    for path, expected in (
        ("/3fs/stage/a", True),
        ("/3fs/stage", True),
        ("/3fs/stage/local/x", False),
        ("/3fs/stage2", False),
        ("/with space/x", True),
        ("/home", False),
    ):
        assert is_3fs(Path(path), table) is expected


def _as_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name[:8]}")  # the whole path is too long for an address
    finally:
        os.close(folder)
    path.with_name(path.name[:8]).rename(path)


def _as_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkfifo, "FIFO"), (Path.mkdir, "directory"), (_as_socket, "socket"), (_as_link, "symbolic link")],
    ids=["fifo", "directory", "socket", "link"],
)
def test_what_is_no_file_in_place_of_a_blob_is_an_answer_at_once(store: PosixStore, make: Callable[[Path], None], kind: str) -> None:
    put_bytes(store, DATA)
    blob_path(store).unlink()
    make(blob_path(store))
    answered = Event()

    def read() -> None:
        for call in (
            lambda: store.read(DIGEST, 0, 10),
            lambda: store.open_fd(DIGEST),
            lambda: store.stat(DIGEST),
            lambda: store.local_path(DIGEST),
        ):
            with pytest.raises(CorruptError, match=f"{DIGEST}.* is a {kind}, not a blob"):
                call()
        answered.set()

    Thread(target=read, daemon=True).start()
    assert answered.wait(1)


def test_a_file_in_place_of_a_folder_of_blobs_is_an_answer_for_good(store: PosixStore) -> None:
    put_bytes(store, DATA)
    folder = blob_path(store).parent
    blob_path(store).unlink()
    folder.rmdir()
    folder.write_bytes(b"")
    with pytest.raises(CorruptError, match=f"{folder} is no directory") as raised:
        store.read(DIGEST, 0, 10)
    assert raised.value.final


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to become a user without rights")
@pytest.mark.parametrize("mode", [0o000, 0o200])
def test_a_blob_that_may_not_be_read_is_an_answer_at_once(mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:  # one that another user can enter
        Path(folder).chmod(0o755)
        store = PosixStore(Path(folder) / "store")
        put_bytes(store, DATA)
        blob_path(store).chmod(mode)
        reader = os.fork()
        if reader == 0:
            try:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                store.read(DIGEST, 0, 10)
            except CorruptError as error:
                os._exit(0 if "cannot be read: Permission denied" in error.message else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0


def test_a_kept_descriptor_whose_file_system_is_gone_is_opened_anew(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put_bytes(store, DATA)
    assert store.read(DIGEST, 0, 10) == DATA[:10]
    real = os.pread
    failed: list[int] = []

    def pread(fd: int, length: int, offset: int) -> bytes:
        if not failed:
            failed.append(fd)
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return real(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert store.read(DIGEST, 0, 10) == DATA[:10]
    assert failed


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, _as_link], ids=["fifo", "directory", "link"])
def test_what_is_no_file_in_place_of_a_ref_is_an_answer_at_once(store: PosixStore, make: Callable[[Path], None]) -> None:
    store.set_ref("a:1", DIGEST, expected=None)
    path = store.root / f"refs/a/1/{1:020d}"
    path.unlink()
    make(path)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            store.get_ref("a:1")
        except CorruptError as error:
            raised.append(error)

    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(1)
    assert "is not a ref" in str(raised[0])
