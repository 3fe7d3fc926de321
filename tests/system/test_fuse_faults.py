"""The fanotify driver when things die or go away: no wrong byte, ever; a reader waits, gets the right bytes, or gets an error."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec_layers.errors import Conflict, HostError
from dsec_layers.fuse.client.host import Host, Lease, open_host
from dsec_layers.linux.process import start_time
from dsec_layers.proc import inherited_environment, run, spawn
from dsec_layers.store.posix import PosixStore
from tests.kit.cache_kit import daemon, eventually, in_threads, kill, log_of, needs_fanotify, processes_of, unmount_below
from tests.kit.store_samples import Sample, content, make_layer

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

READERS = 32
BLOCK = 4096


@dataclass
class Stage:
    """A store with a layer of ``files``, and where its cache is."""

    cache: Path
    store: PosixStore
    sample: Sample
    files: Mapping[str, bytes]

    def away(self) -> Path:
        """Make the store unreachable; returns where it went."""
        elsewhere = self.store.root.with_name("elsewhere")
        self.store.root.rename(elsewhere)
        return elsewhere

    def back(self) -> None:
        """Make it reachable again."""
        self.store.root.with_name("elsewhere").rename(self.store.root)

    @property
    def blob(self) -> Path:
        """The file of the layer's segments blob."""
        return self.store.local_path(self.sample.own.digest)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sample, Mapping[str, bytes]]:
    """A store with one layer, to be copied."""
    root = tmp_path_factory.mktemp("built") / "store"
    files = {f"f{number:02}": content(number, 2_000_000 + 4096 * number + number) for number in range(24)}
    return root, make_layer(PosixStore(root), files, per_segment=8), files


@pytest.fixture
def stage(tmp_path: Path, built: tuple[Path, Sample, Mapping[str, bytes]]) -> Iterator[Stage]:
    root, sample, files = built
    needs_fanotify(tmp_path / "cache")
    shutil.copytree(root, tmp_path / "store")
    yield Stage(tmp_path / "cache", PosixStore(tmp_path / "store"), sample, files)
    unmount_below(tmp_path)


class Readers:
    """Threads that read random blocks and compare them; every outcome is counted."""

    def __init__(self, root: Path, files: Mapping[str, bytes], count: int = READERS) -> None:
        self.root, self.files = root, files
        self.right = self.wrong = self.zero = self.errors = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def reads(self) -> int:
        return self.right + self.wrong + self.zero + self.errors

    def await_more(self, count: int) -> None:
        """Until so many more reads were made."""
        goal = self.reads + count
        eventually(lambda: self.reads > goal, 60)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a reader hangs"

    def _loop(self, seed: int) -> None:
        choose = random.Random(seed)
        names = sorted(self.files)
        while not self._stop.is_set():
            name = choose.choice(names)
            wanted = self.files[name]
            offset = choose.randrange(len(wanted) // BLOCK) * BLOCK
            got, failed = b"", False
            try:
                fd = os.open(self.root / name, os.O_RDONLY)
                try:
                    got = os.pread(fd, BLOCK, offset)
                finally:
                    os.close(fd)
            except OSError as error:
                assert error.errno == errno.EIO
                failed = True
            with self._lock:
                if failed:
                    self.errors += 1
                elif got == wanted[offset : offset + BLOCK]:
                    self.right += 1
                elif not any(got):
                    self.zero += 1
                else:
                    self.wrong += 1


def worker_of(host: Host) -> int:
    return host.show().pid


def fresh(host: Host, stage: Stage, lease: Lease) -> Lease:
    """The layer mounted anew with nothing in the cache."""
    lease.release()
    host.clear()
    return host.attach(stage.store, [stage.sample.digest])


def check_all(root: Path, files: Mapping[str, bytes]) -> None:
    for name, wanted in files.items():
        assert hashlib.sha256((root / name).read_bytes()).digest() == hashlib.sha256(wanted).digest(), name


@pytest.mark.slow
@pytest.mark.logs("the worker died", r"taking over \d+ events")
def test_e1_e2_worker_killed_again_and_again_under_32_readers(stage: Stage) -> None:
    total = zero = wrong = 0
    with daemon(stage.cache, ["--linger", "0"]) as host:
        lease = host.attach(stage.store, [stage.sample.digest])
        for _ in range(4):
            lease = fresh(host, stage, lease)
            readers = Readers(lease.paths[0], stage.files)
            for _ in range(2):
                readers.await_more(20)
                kill(worker_of(host))
            readers.await_more(2600)
            readers.stop()
            assert readers.errors == 0, "with the keeper alive readers only wait"
            total, zero, wrong = total + readers.reads, zero + readers.zero, wrong + readers.wrong
        check_all(lease.paths[0], stage.files)
        lease.release()
    print(f"\n{total} reads, zero-filled {zero}, otherwise wrong {wrong}")
    assert total >= 10_000 and zero == 0 and wrong == 0
    assert log_of(stage.cache).count("the worker died") == 8


@pytest.mark.slow
@pytest.mark.logs("the keeper died", r"taking over \d+ events")
def test_e2_keeper_killed_under_32_readers(stage: Stage) -> None:
    with daemon(stage.cache, ["--linger", "0"]) as host:
        lease = host.attach(stage.store, [stage.sample.digest])
        for _ in range(4):
            lease = fresh(host, stage, lease)
            readers = Readers(lease.paths[0], stage.files)
            readers.await_more(20)
            report = host.show()
            kill(report.keeper)
            readers.await_more(2000)
            readers.stop()
            assert (readers.errors, readers.zero, readers.wrong) == (0, 0, 0)
            after = host.show()
            assert after.keeper == report.pid, "the worker took the keeper's place"
            assert after.pid != report.pid
        check_all(lease.paths[0], stage.files)
        lease.release()


@pytest.mark.slow
@pytest.mark.logs("died together", "the (keeper|worker) died", r"taking over \d+ events")
def test_e2_keeper_and_worker_killed_together_fail_closed_and_the_next_start_says_so(stage: Stage) -> None:
    total = 0
    with daemon(stage.cache, ["--linger", "0"]) as host:
        lease = host.attach(stage.store, [stage.sample.digest])
        for _ in range(4):
            lease = fresh(host, stage, lease)
            root = lease.paths[0]
            readers = Readers(root, stage.files)
            readers.await_more(20)
            report = host.show()
            os.kill(report.keeper, signal.SIGKILL)
            os.kill(report.pid, signal.SIGKILL)
            eventually(lambda: processes_of(stage.cache) == [])
            readers.await_more(3000)
            readers.stop()
            assert (readers.zero, readers.wrong) == (0, 0)
            assert readers.errors > 0, "what is not here cannot be read"
            total += readers.reads
            host.show()
            (warning,) = host.warnings
            assert "got I/O errors" in warning and str(root) in warning
            check_all(root, stage.files)  # the same mount works again
        lease.release()
    print(f"\n{total} reads, zero-filled 0")
    assert total >= 10_000
    assert "died together" in log_of(stage.cache)


@pytest.mark.logs("is not a store")
def test_readers_can_be_killed_while_they_wait(stage: Stage) -> None:
    with daemon(stage.cache) as host, host.attach(stage.store, [stage.sample.digest]) as lease:
        stage.away()
        with spawn(["cat", lease.paths[0] / "f00"]) as reader:
            eventually(lambda: host.show().events > 0)
            began = time.monotonic()
            reader.kill()
            reader.wait(10)
            assert time.monotonic() - began < 5
        stage.back()
        check_all(lease.paths[0], stage.files)


@pytest.mark.logs("is not a store")
def test_d1_the_store_is_away_for_a_while(stage: Stage) -> None:
    """Readers wait; it comes back; they get the right bytes."""
    with daemon(stage.cache) as host, host.attach(stage.store, [stage.sample.digest]) as lease:
        stage.away()
        outcome: list[bytes] = []
        reader = threading.Thread(target=lambda: outcome.append((lease.paths[0] / "f01").read_bytes()), daemon=True)
        reader.start()
        eventually(lambda: host.show().retries > 0)
        assert reader.is_alive()
        stage.back()
        reader.join(30)
        assert outcome == [stage.files["f01"]]


@pytest.mark.logs("is not a store")
def test_the_store_stays_away_error_at_the_deadline_and_the_next_read_tries_again(stage: Stage) -> None:
    with daemon(stage.cache, ["--deadline", "1"]) as host, host.attach(stage.store, [stage.sample.digest]) as lease:
        stage.away()
        began = time.monotonic()
        with pytest.raises(OSError) as caught:
            (lease.paths[0] / "f02").read_bytes()
        assert caught.value.errno == errno.EIO
        assert 0.5 < time.monotonic() - began < 10
        stage.back()
        assert (lease.paths[0] / "f02").read_bytes() == stage.files["f02"]
        assert host.show().failures > 0


@pytest.mark.logs("bad zstd frame", "wanted .* file has")
def test_d2_d7_a_corrupt_segment_is_an_error_that_names_it(stage: Stage) -> None:
    blob = stage.blob
    good = blob.read_bytes()
    blob.chmod(0o600)
    with daemon(stage.cache) as host, host.attach(stage.store, [stage.sample.digest]) as lease:
        for bad in (bytes(len(good)), good[: len(good) // 2], good[::-1]):
            blob.write_bytes(bad)
            with pytest.raises(OSError) as caught:
                (lease.paths[0] / "f23").read_bytes()
            assert caught.value.errno == errno.EIO
            assert stage.sample.own.digest in host.show().last_error
        blob.write_bytes(good)
        check_all(lease.paths[0], stage.files)
    assert stage.sample.own.digest in log_of(stage.cache)


def test_the_cache_disk_is_full(tmp_path: Path) -> None:
    disk, place = tmp_path / "disk", tmp_path / "place"
    place.mkdir()
    with open(disk, "wb") as stream:
        stream.truncate(24 << 20)
    run(["mkfs.ext4", "-q", "-m", "0", disk])
    run(["mount", "-o", "loop", disk, place])
    try:
        cache = place / "cache"
        needs_fanotify(cache)
        store = PosixStore(tmp_path / "store")
        files = {f"f{number}": content(number, 3_000_000) for number in range(10)}
        sample = make_layer(store, files, per_segment=16)
        with daemon(cache) as host, host.attach(store, [sample.digest]) as lease:
            outcomes = []
            for name, wanted in files.items():
                try:
                    assert (lease.paths[0] / name).read_bytes() == wanted
                    outcomes.append("right")
                except OSError as error:
                    # The page cache of a file system image has one error for every failure of its device: EIO. Who reads the segment itself sees ENOSPC.
                    outcomes.append(errno.errorcode[error.errno or 0])
            assert set(outcomes) == {"right", "EIO"}
            absent = next(path for path in (cache / "absent").iterdir() if path.stat().st_size == 0)
            with pytest.raises(OSError) as caught:
                absent.read_bytes()
            assert caught.value.errno == errno.ENOSPC
            assert "no space left" in host.show().last_error
            for path in (cache / "absent").iterdir():
                assert path.stat().st_blocks == 0, "a failed write gives its space back"
            for name in list(files)[:4]:
                assert (lease.paths[0] / name).read_bytes() == files[name]
    finally:
        unmount_below(tmp_path)


def test_i3_fifty_cold_readers_of_one_image_fetch_each_segment_once(stage: Stage) -> None:
    with daemon(stage.cache) as host, host.attach(stage.store, [stage.sample.digest]) as lease:
        assert in_threads(50, lambda _: check_all(lease.paths[0], stage.files)) == []
        report = host.show()
        assert report.fetched == len(stage.sample.segments)
        assert report.fetched_bytes == int(stage.sample.segments["stored"].sum())
        assert report.failures == report.retries == 0
        before = report.events
        check_all(lease.paths[0], stage.files)
        assert host.show().events == before, "nothing present raises events"


def test_one_reader_makes_one_event_a_segment(stage: Stage) -> None:
    with daemon(stage.cache) as host, host.attach(stage.store, [stage.sample.digest]) as lease:
        for name in sorted(stage.files):
            with open(lease.paths[0] / name, "rb", buffering=0) as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                while stream.read(BLOCK):
                    pass
        assert host.show().events == len(stage.sample.segments)


@pytest.mark.logs("with mounts in place")
def test_e3_told_to_stop_with_mounts_in_place(stage: Stage, tmp_path: Path) -> None:
    """Nothing mounted is lost: the keeper holds the readers until the daemon is started again."""
    target = tmp_path / "target"
    target.mkdir()
    with daemon(stage.cache) as host:
        host.mount(stage.store, stage.sample.digest, target)
        report = host.show()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(host.show().keeper, number)
            worker = worker_pid(stage.cache, report.keeper)
            eventually(lambda worker=worker: start_time(worker) is None)  # type: ignore[misc]
            assert processes_of(stage.cache) == [report.keeper]
            outcome: list[bytes] = []
            reader = threading.Thread(target=lambda: outcome.append((target / "f03").read_bytes()), daemon=True)  # noqa: B023
            reader.start()
            reader.join(0.2)
            assert number is signal.SIGINT or reader.is_alive(), "nobody serves: it waits"
            assert [mount.target for mount in host.mounts()] == [str(target)]
            reader.join(20)
            assert outcome == [stage.files["f03"]]
        host.umount(target)


def worker_pid(cache: Path, keeper: int) -> int:
    pids = [pid for pid in processes_of(cache) if pid != keeper]
    return pids[0] if pids else 0


def test_stopping_with_mounts_is_refused_and_forcing_it_unmounts(stage: Stage, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with daemon(stage.cache) as host:
        host.mount(stage.store, stage.sample.digest, target)
        with pytest.raises(Conflict, match="1 mounts"):
            host.stop()
        with open(target / "f04", "rb"), pytest.raises(Conflict, match="in use"):
            host.stop(force=True)
        assert (target / "f04").read_bytes() == stage.files["f04"] if os.path.ismount(target) else True
        host.stop(force=True)
        assert not os.path.ismount(target)
        assert processes_of(stage.cache) == []


def test_the_client_is_killed_while_it_mounts(stage: Stage, tmp_path: Path) -> None:
    """Whatever moment it is: the same command afterwards leaves the mount in place."""
    target = tmp_path / "target"
    target.mkdir()
    script = (
        "import sys; from pathlib import Path; from dsec_layers.fuse.client.host import open_host\n"
        f"host = open_host(Path({str(stage.cache)!r})); print('go', flush=True)\n"
        f"host.mount({stage.store.url!r}, {stage.sample.digest!r}, Path({str(target)!r}))\n"
    )
    with daemon(stage.cache) as host:
        for delay in (0.0, 0.002, 0.01, 0.03):
            with spawn([sys.executable, "-c", script], stdout=-1) as client:
                assert client.stdout is not None
                client.stdout.readline()
                time.sleep(delay)  # not to synchronise: to hit different moments
                client.kill()
            eventually(lambda: _settled(host, stage, target))
            assert (target / "f05").read_bytes() == stage.files["f05"]
            host.umount(target)


def _settled(host: Host, stage: Stage, target: Path) -> bool:
    try:
        host.mount(stage.store, stage.sample.digest, target)
    except Conflict as error:  # the daemon is still at the dead client's request, or the client got its answer before it died
        return "something is mounted" in error.message
    return True


@pytest.mark.logs("the worker died", r"taking over \d+ events", "is not mounted; its record is dropped")
def test_the_worker_is_killed_while_it_mounts(stage: Stage, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with daemon(stage.cache, ["--linger", "0"]) as host:
        for delay in (0.0, 0.001, 0.003, 0.01):
            pid = worker_of(host)
            killer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
            killer.start()
            host.mount(stage.store, stage.sample.digest, target)  # asked again by the library when the connection breaks
            killer.join()
            assert (target / "f06").read_bytes() == stage.files["f06"]
            eventually(lambda pid=pid: start_time(pid) is None)  # type: ignore[misc]
            host.umount(target)
            host.clear()


@pytest.mark.logs("the worker died", r"taking over \d+ events")
def test_leases_end_with_their_holder(stage: Stage) -> None:
    script = (
        "import sys; from pathlib import Path; from dsec_layers.fuse.client.host import open_host\n"
        f"lease = open_host(Path({str(stage.cache)!r})).attach({stage.store.url!r}, [{stage.sample.digest!r}])\n"
        "print(lease.paths[0], flush=True); sys.stdin.read()"
    )
    with daemon(stage.cache, ["--linger", "0"]) as host:
        with spawn([sys.executable, "-c", script], stdin=-1, stdout=-1) as holder:
            assert holder.stdout is not None
            path = Path(holder.stdout.readline().decode().strip())
            assert (path / "f07").read_bytes() == stage.files["f07"]
            assert [layer.users for layer in host.show().layers] == [1]
            kill(worker_of(host))
            assert [layer.users for layer in host.show().layers] == [1], "a lease outlives the worker"
            holder.kill()
        assert host.show().leases == 0
        assert host.show().layers == ()
        assert not path.exists()


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    needs_fanotify(tmp_path / "probe")
    cache = tmp_path / "cache"
    (cache / "present").mkdir(parents=True)
    (cache / "state").write_text("not a directory")
    with pytest.raises(HostError, match=r"cache .*: (File exists|Not a directory)"):
        open_host(cache)
    assert processes_of(cache) == []


@pytest.mark.logs("is not a store", r"taking over \d+ events")
def test_systemd_keeps_the_group_when_both_are_ended(stage: Stage, tmp_path: Path) -> None:
    """The part of systemd is played here: a notify socket, a descriptor store, a new start with what was stored."""
    address = tmp_path / "notify"
    stored: dict[str, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(address))
        channel.settimeout(30)

        def until_ready() -> None:
            while True:
                text, fds, _, _ = socket.recv_fds(channel, 4096, 4)
                fields = dict(line.split("=", 1) for line in text.decode().splitlines())
                for fd in fds:
                    name = fields["FDNAME"]
                    if name in stored:
                        os.close(fd)
                    else:
                        stored[name] = fd
                if "READY" in fields:
                    return

        command = f"exec {sys.executable} -P -m dsec_layers.fuse.daemon --foreground --idle 0 --cache {stage.cache}"
        environment = inherited_environment() | {"NOTIFY_SOCKET": str(address)}
        with spawn(["sh", "-c", command], env=environment) as first:
            until_ready()
            host = open_host(stage.cache)
            lease = host.attach(stage.store, [stage.sample.digest])
            root = lease.paths[0]
            stage.away()  # before the first read: a store keeps the files open that it has read from
            outcome: list[bytes] = []
            readers = [threading.Thread(target=lambda: outcome.append((root / "f01").read_bytes()), daemon=True) for _ in range(3)]
            for reader in readers:
                reader.start()
            eventually(lambda: host.show().retries > 0)
            worker = host.show().pid
            host.close()
            os.kill(first.pid, signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
            eventually(lambda: not set(processes_of(stage.cache)) - {os.getpid()})
        late = threading.Thread(target=lambda: outcome.append((root / "f01").read_bytes()), daemon=True)
        late.start()
        late.join(0.3)
        assert outcome == [] and late.is_alive(), "the stored group holds them all"
        stage.back()
        again = f"exec 3<&{stored['group']} 4<&{stored['hand']}; export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=group:hand; {command}"
        with spawn(["bash", "-c", again], env=environment, pass_fds=list(stored.values())) as second:
            until_ready()
            for reader in [*readers, late]:
                reader.join(30)
            assert outcome == [stage.files["f01"]] * 4
            check_all(root, stage.files)
            host = open_host(stage.cache)
            assert host.warnings == ()
            lease = host.attach(stage.store, [stage.sample.digest])
            host.stop(force=True)
            host.close()
            second.wait(20)
            assert second.returncode == 0
        for fd in stored.values():
            os.close(fd)
    assert "Traceback" not in log_of(stage.cache)
