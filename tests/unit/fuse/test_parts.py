"""The parts of the daemon that need no root: shared memory, messages, records, events."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_layers import errors
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.errors import DsecError, HostError, NotFound
from dsec_layers.fuse.client import control
from dsec_layers.fuse.client.control import error_from, error_message, receive, send
from dsec_layers.fuse.client.host import Host, HostPool
from dsec_layers.fuse.daemon.requirements import check_fanotify
from dsec_layers.fuse.events import keeper
from dsec_layers.fuse.events.keeper import Hand
from dsec_layers.fuse.events.serve import EventServer
from dsec_layers.fuse.records import Holder, LayerUse, LeaseRecord, MountRecord, Records
from dsec_layers.linux.fanotify import parse_events
from dsec_layers.linux.process import is_alive, start_time
from dsec_layers.proc import run
from dsec_layers.segment import Segment

EVENT = struct.Struct("=IBBHQii")


def event(fd: int, pid: int = 1, extra: int = 24) -> bytes:
    """An event with a range record behind it."""
    return EVENT.pack(24 + extra, 3, 0, 24, 0x100000, fd, pid) + bytes(extra)


def test_events_are_parsed_up_to_the_first_that_is_none() -> None:
    data = event(7) + event(9, extra=0) + event(-24)
    assert [found.fd for found in parse_events(data + bytes(100))] == [7, 9, -24]
    assert parse_events(b"") == parse_events(bytes(24)) == parse_events(data[:20]) == []
    assert [found.fd for found in parse_events(data[:-1])] == [7, 9]


@given(st.binary(max_size=200))
def test_events_never_crash(data: bytes) -> None:
    assert len(parse_events(data)) <= len(data) // 24


def test_the_hand_remembers_events_across_processes() -> None:
    fd = Hand.create()
    hand = Hand(fd)
    hand.add(12)
    hand.add(40_000, b"d" * 32)
    hand.buffer[: 2 * 48] = event(5) + event(12)
    other = Hand(fd)
    assert other.numbers() == {5: b"", 12: b"", 40_000: b"d" * 32}
    other.clear_buffer()
    other.drop(12)
    assert hand.numbers() == {40_000: b"d" * 32}
    before = hand.ready
    other.set_ready()
    assert (before, hand.ready) == (False, True)
    os.close(fd)


def test_b4_a_short_batch_after_a_long_one_leaves_nothing_of_the_long_one(tmp_path: Path) -> None:
    """A worker serves a long batch, reads a short one and is killed before it can note it: the next takes over the short one, and closes nothing else."""
    memory = Hand.create()
    group, kernel = socket.socketpair()
    null = os.open("/dev/null", os.O_RDWR)
    directory = SimpleNamespace(absent=tmp_path / "absent", present=tmp_path / "present")
    cache = cast(SegmentCache, SimpleNamespace(directory=directory))
    with group, kernel:
        long_batch = [os.dup(null) for _ in range(5)]
        kernel.sendall(b"".join(map(event, long_batch)))
        hand = Hand(memory)
        EventServer(group.fileno(), hand, cache, lambda _: ())._read()  # about no segment: answered with EIO, and closed
        assert hand.numbers() == {}
        innocent = [os.dup(null) for _ in range(5)]
        assert innocent == long_batch, "the numbers are used again, for what is no event"
        kernel.sendall(event(innocent[0]))
        os.readv(group.fileno(), [hand.buffer])
        other = Hand(memory)
        assert other.numbers() == {innocent[0]: b""}
        following = EventServer(group.fileno(), other, cache, lambda _: ())
        following.start()
        following.stop()
        with pytest.raises(OSError):
            os.fstat(innocent[0])
        for fd in innocent[1:]:
            os.close(fd)  # still open
        assert not any(other.buffer), "also what a worker left that was killed while it cleared the buffer"
    os.close(null)
    os.close(memory)


def test_the_keeper_loads_nothing_but_the_standard_library() -> None:
    program = (
        "import sys, runpy\n"
        f"runpy.run_path({keeper.__file__!r}, run_name='keeper')\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'__main__', '__mp_main__'}))"
    )
    done = run([sys.executable, "-I", "-S", "-c", program])
    assert done.stdout.strip() == b"[]"


def test_messages_carry_descriptors() -> None:
    left, right = socket.socketpair()
    with left, right, open("/dev/null", "rb") as null:
        send(left, {"op": "x", "text": "ä" * 5_000}, [null.fileno()])
        received = receive(right)
        assert received is not None
        message, (fd,) = received
        assert message == {"op": "x", "text": "ä" * 5_000}
        assert os.path.samestat(os.fstat(fd), os.fstat(null.fileno())) and not os.get_inheritable(fd)
        os.close(fd)
        left.close()
        assert receive(right) is None


@given(st.binary(max_size=64))
def test_messages_never_crash(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.close()
        try:
            assert receive(right) is None or len(data) > 4
        except (OSError, ValueError):
            pass


def test_errors_travel() -> None:
    for kind in (kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), DsecError)):
        found = error_from(error_message(kind("what", hint="how"))["error"])
        assert type(found) is kind and (found.message, found.hint) == ("what", "how")
    for code in errors.ImageCode:
        message = json.loads(json.dumps(error_message(errors.ImageError("what", code=code))))
        carried = error_from(message["error"])
        assert isinstance(carried, errors.ImageError) and carried.code is code
    others: tuple[object, ...] = ("other", 7, None, [], {})
    for odd in others:
        assert type(error_from({"type": "ImageError", "message": "x", "code": odd})) is errors.ImageError
    for hostile in ({"type": "annotations"}, {"type": "DsecError.__init__"}, {"type": 7}, {}):
        assert type(error_from(hostile)) is DsecError


def test_a_socket_below_a_long_path(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 120) / ("y" * 120)
    root.mkdir(parents=True)
    assert control.connect(root) is None
    with control.listen(root) as server:
        assert (root / "control").stat().st_mode & 0o777 == 0o600
        client = control.connect(root)
        assert client is not None
        with client, server.accept()[0] as accepted:
            assert control.peer_uid(accepted) == os.geteuid()
            send(client, {"a": 1})
            assert receive(accepted) == ({"a": 1}, [])
    assert control.connect(root) is None


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("mounts", {"target": 5}), ("mounts", {"done": "yes"}), ("mounts", {"layers": "sha256"}), ("mounts", {"digest": "sha256:no"}),
        ("mounts", {"since": None}), ("leases", {"layers": [{"digest": "sha256:no", "store": "s", "driver": "fuse"}]}), ("leases", {"holder": {"pid": "1"}}),
        ("leases", {"identifier": 7}), ("leases", {"layers": {}}), ("leases", {"holder": {"pid": True}}),
    ],
)  # fmt: skip
def test_a_record_with_a_field_of_a_wrong_kind_is_junk(tmp_path: Path, folder: str, change: dict[str, object]) -> None:
    digest = "sha256:" + "1" * 64
    records = Records(tmp_path, "boot")
    records.save(LeaseRecord("a", Holder(1, 2), (LayerUse(digest, "s", "fuse"),)))
    records.save(MountRecord("a", "/m", digest, "s", "l", "fuse", "b", [digest]))
    path = tmp_path / folder / "a.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [len(list(records.leases())), len(list(records.mounts()))] == ([0, 1] if folder == "leases" else [1, 0])
    assert not path.exists()


def test_records_survive_and_junk_does_not(tmp_path: Path) -> None:
    records = Records(tmp_path, "boot")
    lease = LeaseRecord("l1", Holder(pid=1, starttime=2), (LayerUse("sha256:" + "a" * 64, "file:///s", "fuse"),))
    mount = MountRecord(
        "m1", "/mnt", "sha256:" + "b" * 64, "file:///s", "dev:1", "fanotify", "l1", ["sha256:" + "d" * 64], 1.5, True, False
    )
    records.save(lease)
    records.save(mount)
    records.remember("sha256:" + "c" * 64, "file:///s")
    for folder in ("leases", "mounts", "known"):
        for name, junk in (("j1.json", b"{"), ("j2.json", b"[]"), ("j3.json", b'{"identifier": 1}'), ("j4.tmp", b"")):
            (tmp_path / folder / name).write_bytes(junk)
    again = Records(tmp_path, "boot")
    assert list(again.leases()) == [lease]
    assert list(again.mounts()) == [mount]
    assert list(again.known()) == [("sha256:" + "c" * 64, "file:///s")]
    after = Records(tmp_path, "another boot")
    assert (list(after.leases()), list(after.mounts()), len(list(after.known()))) == ([], [], 1)


def test_a_process_is_known_by_pid_and_start() -> None:
    started = start_time(os.getpid())
    assert started is not None and is_alive(os.getpid(), started) and not is_alive(os.getpid(), started + 1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert start_time(child) is None, "a zombie is gone"
    os.waitpid(child, 0)
    assert Holder(pid=child, starttime=1).is_gone() and not Holder(target="/mnt").is_gone()


def test_old_kernels_are_refused_with_the_version_and_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.12.48+deb13-amd64")
    with pytest.raises(HostError, match=r"needs Linux 6\.14 or newer, this is 6\.12\.48") as caught:
        check_fanotify(tmp_path)
    assert caught.value.hint == "use the fuse driver"


def test_mounting_without_root_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dsec_layers.fuse.daemon.__main__ import main

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["--cache", str(tmp_path)]) == HostError.exit_code
    assert "mounting needs root, this is uid 1000" in capsys.readouterr().err


class SilentDaemon:
    """Greets, and answers requests for segments of ``mem://b`` alone, with an error."""

    def __init__(self, cache: Path) -> None:
        self.asked = threading.Semaphore(0)
        self._listening = control.listen(cache)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join(5)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: socket.socket) -> None:
        with channel:
            control.send(channel, {"version": control.VERSION, "pid": 1, "warnings": []})
            while (received := control.receive(channel)) is not None:
                self.asked.release()
                if received[0]["piece"]["store"] == "mem://b":
                    control.send(channel, control.error_message(NotFound("no such segment")))


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[SilentDaemon]:
    daemon = SilentDaemon(tmp_path)
    yield daemon
    daemon.close()


def piece_in(store: str) -> Segment:
    return Segment(bytes(32), 4096, store, "sha256:" + "0" * 64, 0, 4096)


def test_segments_of_a_store_that_hangs_keep_nobody_from_another_and_closing_ends_them(tmp_path: Path, silent: SilentDaemon) -> None:
    pool = HostPool(tmp_path)
    ended: list[DsecError] = []

    def ask() -> None:
        try:
            pool.open(piece_in("mem://a"))
        except DsecError as error:
            ended.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(100)]
    for thread in threads:
        thread.start()
    for _ in range(64):
        assert silent.asked.acquire(timeout=10)
    began = time.monotonic()
    with pytest.raises(NotFound):
        pool.open(piece_in("mem://b"))
    pool.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - began < 5
    assert len(ended) == 100 and all(isinstance(error, HostError) for error in ended)


def test_closing_a_connection_does_not_wait_for_the_answer_to_another_thread(tmp_path: Path, silent: SilentDaemon) -> None:
    host = Host(tmp_path)
    ended: list[DsecError] = []

    def ask() -> None:
        try:
            host.open(piece_in("mem://a"))
        except DsecError as error:
            ended.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert silent.asked.acquire(timeout=10)
    began = time.monotonic()
    host.close()
    thread.join(5)
    assert time.monotonic() - began < 2 and isinstance(ended[0], HostError)
    with pytest.raises(NotFound):
        host.open(piece_in("mem://b"))
    host.close()
