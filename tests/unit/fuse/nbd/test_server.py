"""The server over real sockets, word by word: every command, in every way it can be carried out, and the life cycle."""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import SupportsIndex

import pytest

from dsec_layers.blocksource import BlockSource, BytesSource, MemoryDisk
from dsec_layers.digest import Buffer
from dsec_layers.errors import Conflict, CorruptError, HostError, NoSpace, StoreError, UsageError
from dsec_layers.fuse.nbd import Export, Limits, LocalDisk, LocalFile, Server
from dsec_layers.fuse.nbd import protocol as nbd
from tests.kit.nbd_client import SECONDS, Client, export_query

SIZE = 3 << 20
Start = Callable[..., Server]


class InlineDisk(MemoryDisk):
    """Never waits."""

    blocking = False
    fast_zero = True


class Log:
    """A progress that keeps what a server complains about."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> None:
        """Not used by servers."""

    def info(self, message: str) -> None:
        """Dropped."""

    def debug(self, message: str) -> None:
        """Dropped."""

    def warning(self, message: str) -> None:
        """Kept."""
        self.warnings.append(message)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers; at the end of the test all are stopped, in time, and have logged nothing that was not expected."""
    with ExitStack() as stack:

        def serve(*exports: Export | BlockSource, quiet: bool = True, **options: object) -> Server:
            if "port" not in options:
                options.setdefault("unix", tmp_path / f"s{len(list(tmp_path.iterdir()))}")
            log = Log()
            wrapped = [item if isinstance(item, Export) else Export(item) for item in exports]
            server = Server(wrapped, progress=log, **options)  # type: ignore[arg-type]

            def finish() -> None:
                assert server.stop(SECONDS)
                assert not (quiet and log.warnings), log.warnings
                assert quiet or log.warnings, "a failure should have been logged"

            stack.callback(finish)
            server.start()
            return server

        yield serve


def connect(server: Server, *, structured: bool = True, allocation: bool = False) -> Client:
    client = Client(server.address)
    client.greet()
    return client.go(structured=structured, allocation=allocation)


def wait_for_connections(server: Server, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while server.connections > count and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.connections == count


def pattern(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(params=["workers", "inline", "file", "cold file", "file system without RWF_NOWAIT"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockSource]:
    """A disk of zeros, served in each way there is."""
    if request.param == "workers":
        yield MemoryDisk(SIZE)
        return
    if request.param == "inline":
        yield InlineDisk(SIZE)
        return
    path = tmp_path / "disk"
    with open(path, "wb") as stream:
        stream.truncate(SIZE)
    if request.param == "cold file":
        monkeypatch.setattr(os, "preadv", _raising(BlockingIOError()))
    elif request.param != "file":
        monkeypatch.setattr(os, "preadv", _raising(OSError(95, "not supported")))
    with LocalDisk(path) as source:
        yield source


def _raising(error: OSError) -> Callable[..., int]:
    def preadv(fd: int, buffers: Sequence[Buffer], offset: int, flags: int = 0) -> int:
        raise error

    return preadv


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("tcp", [False, True])
def test_random_requests_agree_with_a_model(disk: BlockSource, start: Start, structured: bool, tcp: bool) -> None:
    """Batches of requests that do not overlap, so that any order of carrying them out is right, against a bytearray."""
    server = start(disk, port=0) if tcp else start(disk)
    rng = random.Random(repr((structured, tcp)))
    model = bytearray(SIZE)
    zone = SIZE // 8
    with connect(server, structured=structured) as client:
        assert client.size == SIZE
        for _ in range(25):
            requests = []
            expected: dict[int, bytes] = {}
            for slot in rng.sample(range(8), rng.randint(1, 8)):
                length = rng.choice([1, 512, 4096, 65536, 65537, 200_000, rng.randint(1, zone)])
                offset = slot * zone + rng.randint(0, zone - length)
                command = rng.choice([0, 0, 1, 1, 4, 6])
                flags = rng.choice([0, nbd.NBD_CMD_FLAG_FUA])
                if command == 6:
                    flags |= rng.choice([0, nbd.NBD_CMD_FLAG_NO_HOLE])
                payload = rng.randbytes(length) if command == 1 else b""
                cookie = rng.getrandbits(62)
                requests.append((cookie, command, flags, offset, length, payload))
                if command == 0:
                    expected[cookie] = bytes(model[offset : offset + length])
                elif command == 1:
                    model[offset : offset + length] = payload
                elif command == 6:
                    model[offset : offset + length] = bytes(length)
                else:
                    requests.append((cookie + 1, 6, 0, offset, 0, b""))  # the content after a trim is not promised: set it below
            replies = client.many(requests, rng.choice([1, 3, 16]))
            assert {cookie: reply.error for cookie, reply in replies.items()} == dict.fromkeys((r[0] for r in requests), 0)
            for cookie, data in expected.items():
                assert replies[cookie].data == data
            for _, command, _, offset, length, _ in requests:
                if command == 4:
                    model[offset : offset + length] = pattern(length, 5)
                    assert client.write(offset, pattern(length, 5)) == 0
        assert client.call(nbd.NBD_CMD_FLUSH).error == 0
        assert client.read(0, SIZE) == model
        client.disconnect()
    assert disk.pread(0, SIZE) == model


def test_every_refusal_keeps_the_stream_in_step(start: Start) -> None:
    server = start(Export(BytesSource(pattern(SIZE))))
    for structured in (True, False):
        with connect(server, structured=structured) as client:
            big = client.request(nbd.NBD_CMD_WRITE, 0, 100_000, payload=bytes(100_000))
            assert client.reply()[1].error == nbd.NBD_EPERM
            assert client.call(nbd.NBD_CMD_READ, SIZE, 1).error == nbd.NBD_EINVAL
            assert client.call(8, 0, 1 << 20).error == nbd.NBD_EINVAL  # resize
            assert client.call(nbd.NBD_CMD_FLUSH).error == nbd.NBD_EINVAL
            assert client.call(nbd.NBD_CMD_BLOCK_STATUS, 0, 512).error == nbd.NBD_EINVAL
            assert client.call(nbd.NBD_CMD_READ, 0, 0).error == 0
            assert client.read(5, 7) == pattern(SIZE)[5:12]
            assert big == 1


def test_an_oversized_write_is_skipped(start: Start) -> None:
    class Huge(MemoryDisk):
        def __init__(self) -> None:
            super().__init__(1 << 16)
            self.size = 1 << 30

    with connect(start(Huge())) as client:
        length = nbd.MAX_PAYLOAD + 512
        client.request(nbd.NBD_CMD_WRITE, 0, length)
        for _ in range(length // (1 << 20)):
            client.socket.sendall(bytes(1 << 20))
        client.socket.sendall(bytes(512))
        assert client.reply()[1].error == nbd.NBD_EINVAL
        assert client.read(0, 512) == bytes(512)


def test_the_largest_request(start: Start, tmp_path: Path) -> None:
    data = pattern(nbd.MAX_PAYLOAD)
    path = tmp_path / "disk"
    path.write_bytes(bytes(len(data)))
    for source in (MemoryDisk(len(data)), LocalDisk(path)):
        with connect(start(source)) as client:
            assert client.write(0, data) == 0
            assert client.read(0, len(data)) == data


def test_structured_reply_forms(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(pattern(SIZE))
    with LocalFile(path) as image, connect(start(image), allocation=True) as client:
        assert client.flags & nbd.NBD_FLAG_SEND_DF
        assert client.call(nbd.NBD_CMD_READ, 0, 4096).chunks == [nbd.NBD_REPLY_TYPE_OFFSET_DATA]
        # A reply that leaves by sendfile may still fail while it leaves: its data chunk is not the final one.
        assert client.call(nbd.NBD_CMD_READ, 0, 1 << 20).chunks == [nbd.NBD_REPLY_TYPE_OFFSET_DATA, nbd.NBD_REPLY_TYPE_NONE]
        unfragmented = client.call(nbd.NBD_CMD_READ, 0, 1 << 20, flags=nbd.NBD_CMD_FLAG_DF)
        assert unfragmented.chunks.count(nbd.NBD_REPLY_TYPE_OFFSET_DATA) == 1
        assert client.call(nbd.NBD_CMD_READ, 0, 0).chunks == [nbd.NBD_REPLY_TYPE_NONE]
        refused = client.call(nbd.NBD_CMD_READ, SIZE, 1)
        assert (refused.error, refused.message) == (nbd.NBD_EINVAL, "the range ends beyond the export")
        status = client.call(nbd.NBD_CMD_BLOCK_STATUS, 4096, 8192)
        assert (status.error, status.extents) == (0, [(8192, 0)])
        assert client.call(nbd.NBD_CMD_CACHE, 0, SIZE).error == 0


def test_holes_are_reported(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "image"
    with open(path, "wb") as stream:
        stream.truncate(SIZE)
        stream.seek(1 << 20)
        stream.write(b"x" * (1 << 20))
    with LocalFile(path) as image, connect(start(image), allocation=True) as client:
        whole = [(1 << 20, 3), (1 << 20, 0), (1 << 20, 3)]
        assert client.call(nbd.NBD_CMD_BLOCK_STATUS, 0, SIZE).extents == whole
        assert client.call(nbd.NBD_CMD_BLOCK_STATUS, 0, SIZE, flags=nbd.NBD_CMD_FLAG_REQ_ONE).extents == whole[:1]
        assert client.call(nbd.NBD_CMD_BLOCK_STATUS, (1 << 20) + 512, 512).extents == [(512, 0)]


def test_fast_zero_is_fast_or_refused(start: Start) -> None:
    with connect(start(MemoryDisk(SIZE))) as client:
        assert client.call(nbd.NBD_CMD_WRITE_ZEROES, 0, 512, flags=nbd.NBD_CMD_FLAG_FAST_ZERO).error == nbd.NBD_ENOTSUP
    with connect(start(InlineDisk(SIZE))) as client:
        assert client.write(0, b"x" * 512) == 0
        both = nbd.NBD_CMD_FLAG_FAST_ZERO | nbd.NBD_CMD_FLAG_NO_HOLE
        assert client.call(nbd.NBD_CMD_WRITE_ZEROES, 0, 512, flags=both).error == nbd.NBD_ENOTSUP
        assert client.read(0, 512) == b"x" * 512
        assert client.call(nbd.NBD_CMD_WRITE_ZEROES, 0, 512, flags=nbd.NBD_CMD_FLAG_FAST_ZERO).error == 0
        assert client.read(0, 512) == bytes(512)


def test_no_hole_means_written(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with open(path, "wb") as stream:
        stream.truncate(SIZE)
    with LocalDisk(path) as source, connect(start(source)) as client:
        assert client.call(nbd.NBD_CMD_WRITE_ZEROES, 0, SIZE, flags=nbd.NBD_CMD_FLAG_NO_HOLE).error == 0
        assert client.call(nbd.NBD_CMD_FLUSH).error == 0
        assert path.stat().st_blocks * 512 >= SIZE
        assert client.call(nbd.NBD_CMD_TRIM, 0, SIZE).error == 0
        assert path.stat().st_blocks * 512 < SIZE // 2


class Recording(MemoryDisk):
    """Remembers the order of what it was asked."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.calls: list[str] = []

    def pwrite(self, offset: int, data: Buffer) -> None:
        self.calls.append("write")
        super().pwrite(offset, data)

    def flush(self) -> None:
        self.calls.append("flush")


def test_fua_flushes_before_it_answers(start: Start) -> None:
    for inline in (False, True):
        source = Recording()
        source.blocking = not inline  # type: ignore[attr-defined]
        with connect(start(source)) as client:
            assert client.write(0, b"x" * 512, nbd.NBD_CMD_FLAG_FUA) == 0
            assert source.calls == ["write", "flush"]
            assert client.write(0, b"x" * 512) == 0
            assert source.calls == ["write", "flush", "write"]
            assert client.call(nbd.NBD_CMD_TRIM, 0, 512, flags=nbd.NBD_CMD_FLAG_FUA).error == 0
            assert source.calls[-1] == "flush"


def test_connections_see_each_others_writes(start: Start) -> None:
    server = start(MemoryDisk(SIZE))
    with connect(server) as one, connect(server) as two:
        assert one.flags & nbd.NBD_FLAG_CAN_MULTI_CONN
        assert one.write(4096, b"seen") == 0
        assert two.read(4096, 4) == b"seen"
        assert two.call(nbd.NBD_CMD_FLUSH).error == 0


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_failures_become_errors_and_the_connection_goes_on(start: Start, structured: bool, blocking: bool) -> None:
    class Failing(MemoryDisk):
        def pread(self, offset: int, length: int) -> bytes:
            if offset == 0:
                raise CorruptError("a digest that does not match, at s3://user:secret@host")
            if offset == 512:
                return b"short"
            if offset == 1024:
                raise ZeroDivisionError
            return super().pread(offset, length)

        def pwrite(self, offset: int, data: Buffer) -> None:
            raise NoSpace("full")

        def flush(self) -> None:
            raise OSError(108, "stopping")

        def block_status(self, offset: int, length: int) -> list[tuple[int, int]]:
            return []

    source = Failing(SIZE)
    source.blocking = blocking  # type: ignore[attr-defined]
    with connect(start(source, quiet=False), structured=structured, allocation=structured) as client:
        for offset in (0, 512, 1024):
            reply = client.call(nbd.NBD_CMD_READ, offset, 512)
            assert reply.error == nbd.NBD_EIO
            assert "secret" not in reply.message
        assert client.write(0, bytes(4096)) == nbd.NBD_ENOSPC
        assert client.call(nbd.NBD_CMD_FLUSH).error == nbd.NBD_ESHUTDOWN
        if structured:
            assert client.call(nbd.NBD_CMD_BLOCK_STATUS, 0, 512).error == nbd.NBD_EIO
        assert client.read(2048, 512) == bytes(512)


@pytest.mark.parametrize("length", [4096, 1 << 20])
def test_d1_a_transient_error_never_turns_into_zeros(start: Start, tmp_path: Path, length: int) -> None:
    """The public case D1: the store fails three times for a range that a sparse file already has room for."""
    path = tmp_path / "absent"
    with open(path, "wb") as stream:
        stream.truncate(SIZE)

    class Flaky(BytesSource):
        failures = 3
        present = False

        def sendable(self, offset: int, length: int) -> list[tuple[int, int, int]] | None:
            return [(descriptor, offset, length)] if self.present else None

        def pread(self, offset: int, length: int) -> bytes:
            if self.failures:
                self.failures -= 1
                raise StoreError("timed out")
            os.pwrite(descriptor, pattern(SIZE), 0)
            self.present = True
            return super().pread(offset, length)

    descriptor = os.open(path, os.O_RDWR)
    try:
        with connect(start(Flaky(pattern(SIZE)), quiet=False)) as client:
            for _ in range(3):
                assert client.call(nbd.NBD_CMD_READ, 0, length).error == nbd.NBD_EIO
            for _ in range(2):  # the first is fetched, the second leaves the file by itself
                assert client.read(0, length) == pattern(SIZE)[:length]
    finally:
        os.close(descriptor)


class Descriptor:
    """A descriptor that is closed when nobody holds it any more."""

    def __init__(self, path: Path, closed: list[int]) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._closed = closed

    def __index__(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)
        self._closed.append(self._fd)


class Split(BytesSource):
    """Two files one after the other; the first part of each is said to be absent."""

    def __init__(self, parts: list[Path]) -> None:
        super().__init__(b"".join(part.read_bytes() for part in parts))
        self.parts = parts
        self.closed: list[int] = []
        self.slow = 0

    def pread(self, offset: int, length: int) -> bytes:
        self.slow += 1
        return super().pread(offset, length)

    def sendable(self, offset: int, length: int) -> list[tuple[SupportsIndex, int, int]] | None:
        half = self.size // 2
        if offset < 4096:
            return None
        if offset >= half:
            return [(Descriptor(self.parts[1], self.closed), offset - half, length)]
        first = min(length, half - offset)
        pieces: list[tuple[SupportsIndex, int, int]] = [(Descriptor(self.parts[0], self.closed), offset, first)]
        if first < length:
            pieces.append((Descriptor(self.parts[1], self.closed), 0, length - first))
        return pieces


@pytest.mark.parametrize("structured", [True, False])
def test_ranges_over_several_files(start: Start, tmp_path: Path, structured: bool) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for number, part in enumerate(parts):
        part.write_bytes(pattern(SIZE // 2, number))
    source = Split(parts)
    whole = source.pread(0, SIZE)
    with connect(start(source), structured=structured) as client:
        for offset, length in ((4096, SIZE - 4096), (SIZE // 2 - 100, 200), (SIZE // 2 - 100_000, 200_000), (SIZE // 2, 4096)):
            assert client.read(offset, length) == whole[offset : offset + length]
        assert source.slow == 1
        assert len(source.closed) == 7  # the first three reads span both files
        assert client.read(0, 100) == whole[:100]
        assert client.read(0, 100_000) == whole[:100_000]
        assert source.slow == 3


def test_a_source_that_lies_about_pieces_is_not_believed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))

    class Lying(BytesSource):
        def sendable(self, offset: int, length: int) -> list[tuple[int, int, int]]:
            return [(descriptor, 0, length // 2)]

    descriptor = os.open(path, os.O_RDONLY)
    try:
        with connect(start(Lying(pattern(SIZE)))) as client:
            for length in (4096, 1 << 20):
                assert client.read(0, length) == pattern(SIZE)[:length]
    finally:
        os.close(descriptor)


class Gate(BytesSource):
    """Reads wait for ``opened``; ``waiting`` counts those that do."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.now = self.most = 0

    def pread(self, offset: int, length: int) -> bytes:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.entered.release()
        assert self.opened.wait(SECONDS)
        with self.lock:
            self.now -= 1
        return super().pread(offset, length)


def test_slow_reads_do_not_hold_up_others(start: Start) -> None:
    class Partly(Gate):
        def pread(self, offset: int, length: int) -> bytes:
            return BytesSource.pread(self, offset, length) if offset else super().pread(offset, length)

    source = Partly(pattern(SIZE))
    with connect(start(source)) as client:
        slow = client.request(nbd.NBD_CMD_READ, 0, 100)
        assert source.entered.acquire(timeout=SECONDS)
        fast = client.request(nbd.NBD_CMD_READ, 100, 100)
        assert client.reply()[0] == fast
        source.opened.set()
        assert client.reply()[0] == slow


def test_bounds_on_requests_in_flight(start: Start) -> None:
    source = Gate(pattern(SIZE))
    limits = Limits(workers=3, requests=5, payload=10_000)
    with connect(start(source, limits=limits)) as client:
        requests = [(100 + number, nbd.NBD_CMD_READ, 0, number * 100, 4000, b"") for number in range(40)]
        client.post(requests)
        for _ in range(2):  # two of 4000 bytes fit into 10,000
            assert source.entered.acquire(timeout=SECONDS)
        assert not source.entered.acquire(timeout=0.2)
        source.opened.set()
        for _ in requests:
            cookie, reply = client.reply()
            offset = (cookie - 100) * 100
            assert reply.data == pattern(SIZE)[offset : offset + 4000]
        assert source.most == 2


def test_a_request_over_the_bound_is_served_alone(start: Start) -> None:
    with connect(start(BytesSource(pattern(SIZE)), limits=Limits(payload=1000))) as client:
        assert client.read(0, 5000) == pattern(SIZE)[:5000]


def test_a_client_that_does_not_read_holds_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(pattern(SIZE))
    image = LocalFile(path)
    server = Server([Export(image)], unix=tmp_path / "s")
    with server, connect(server) as stuck, connect(server) as other:
        for _ in range(20):
            stuck.request(nbd.NBD_CMD_READ, 0, SIZE)
        assert other.read(0, SIZE) == pattern(SIZE)
        assert not server.stop(0.2)
        wait_for_connections(server, 0)
    image.close()


def test_stop_answers_what_has_arrived(start: Start, tmp_path: Path) -> None:
    source = Gate(pattern(SIZE))
    server = start(source, unix=tmp_path / "socket")
    with connect(server) as client, Client(server.address) as haggling:
        haggling.greet()
        for _ in range(3):
            client.request(nbd.NBD_CMD_READ, 7, 1000)
            assert source.entered.acquire(timeout=SECONDS)
        results: list[bool] = []
        stopper = threading.Thread(target=lambda: results.append(server.stop(SECONDS)))
        stopper.start()
        assert haggling.at_end()
        assert not (tmp_path / "socket").exists()
        with pytest.raises(OSError):
            Client(tmp_path / "socket")
        source.opened.set()
        for _ in range(3):
            assert client.reply()[1].data == pattern(SIZE)[7:1007]
        assert client.at_end()
        stopper.join(SECONDS)
        assert results == [True]
        assert server.stop()


@pytest.mark.parametrize("tcp", [False, True])
def test_stop_under_load_loses_no_reply_that_was_begun(tmp_path: Path, tcp: bool) -> None:
    """Clients keep reading until their connection ends; up to there every byte is right and no reply is cut."""
    source = MemoryDisk(SIZE)
    data = pattern(SIZE)
    source.pwrite(0, data)
    server = Server([Export(source)], port=0) if tcp else Server([Export(source)], unix=tmp_path / "s")
    served = threading.Semaphore(0)
    problems: list[str] = []

    def client_loop(seed: int, client: Client) -> None:
        rng = random.Random(seed)
        at: dict[int, int] = {}
        try:
            while True:
                while len(at) < 8:
                    offset = rng.randrange(SIZE - 5000)
                    at[client.request(nbd.NBD_CMD_READ, offset, 5000)] = offset
                cookie, reply = client.reply()
                offset = at.pop(cookie)
                if reply.error or reply.data != data[offset : offset + 5000]:
                    problems.append(f"{offset}: error {reply.error}")
                served.release()
        except (EOFError, ConnectionError):
            return
        except Exception as error:  # noqa: BLE001 - it belongs to the main thread's verdict
            problems.append(repr(error))

    with server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(4)]  # all are past the handshake, which a stop may cut
        threads = [threading.Thread(target=client_loop, args=(seed, client)) for seed, client in enumerate(clients)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            assert served.acquire(timeout=SECONDS)
        assert server.stop(SECONDS)
        for thread in threads:
            thread.join(SECONDS)
    assert problems == []


def test_stop_does_not_wait_for_ever(tmp_path: Path) -> None:
    source = Gate(bytes(SIZE))
    server = Server([Export(source)], unix=tmp_path / "s", limits=Limits(requests=1))
    server.start()
    with connect(server) as client:
        client.request(nbd.NBD_CMD_READ, 0, 100)
        client.request(nbd.NBD_CMD_READ, 0, 100)
        assert source.entered.acquire(timeout=SECONDS)
        before = time.monotonic()
        assert not server.stop(0.1)
        assert time.monotonic() - before < SECONDS / 2
        assert client.at_end()
    source.opened.set()


def test_disconnect_finishes_writes_in_flight(start: Start) -> None:
    class Slow(Recording):
        go = threading.Event()

        def pwrite(self, offset: int, data: Buffer) -> None:
            assert self.go.wait(SECONDS)
            super().pwrite(offset, data)

    source = Slow()
    with connect(start(source)) as client:
        client.request(nbd.NBD_CMD_WRITE, 0, 512, payload=b"y" * 512)
        client.request(nbd.NBD_CMD_DISC)
        Slow.go.set()
        assert client.reply()[1].error == 0
        assert client.at_end()
    assert source.pread(0, 512) == b"y" * 512


def test_a_stopped_server_has_left_its_sources(tmp_path: Path) -> None:
    """The client is gone, but reads for it go on: stop returns when they have ended."""
    source = Gate(bytes(SIZE))
    server = Server([Export(source)], unix=tmp_path / "s", limits=Limits(workers=2))
    server.start()
    client = connect(server)
    for _ in range(10):
        client.request(nbd.NBD_CMD_READ, 0, 100_000)
    for _ in range(2):
        assert source.entered.acquire(timeout=SECONDS)
    client.socket.close()
    results: list[bool] = []
    stopper = threading.Thread(target=lambda: results.append(server.stop(SECONDS)))
    stopper.start()
    stopper.join(0.1)
    assert stopper.is_alive()
    source.opened.set()
    stopper.join(SECONDS)
    assert results == [True]
    assert source.now == 0


def test_the_handshake_has_a_deadline(tmp_path: Path) -> None:
    server = Server([Export(BytesSource(b""))], unix=tmp_path / "s", limits=Limits(handshake_seconds=1.0))
    ended = threading.Event()
    server.start()
    with Client(server.address) as silent, Client(server.address) as slow:
        slow.greet()

        def drip() -> None:
            try:
                while not ended.wait(0.05):
                    slow.socket.sendall(b"I")
            except OSError:
                pass

        thread = threading.Thread(target=drip)
        thread.start()
        assert slow.at_end()
        ended.set()
        thread.join()
        silent.receive(18)
        assert silent.at_end()
    assert server.stop()


def test_too_many_clients_are_turned_away(tmp_path: Path) -> None:
    log = Log()
    server = Server([Export(BytesSource(pattern(512)))], unix=tmp_path / "s", limits=Limits(connections=2), progress=log)  # type: ignore[arg-type]
    with server, connect(server) as one, connect(server) as two:
        with Client(server.address) as third:
            assert third.at_end()
        assert one.read(0, 512) == two.read(0, 512) == pattern(512)
        two.disconnect()
        wait_for_connections(server, 1)
        with connect(server) as again:
            assert again.read(0, 512) == pattern(512)
    assert len(log.warnings) == 1


def test_old_clients(start: Start) -> None:
    server = start(Export(BytesSource(pattern(SIZE)), "image"))
    for flags in (0, 1, 2, 3):
        with Client(server.address) as client:
            assert client.greet(flags) == 3
            client.export_name("image", zeroes=not flags & 2)
            assert client.size == SIZE
            assert client.read(100, 1000) == pattern(SIZE)[100:1100]
            client.disconnect()
    for flags in (4, 0x80000000):
        with Client(server.address) as client:
            client.greet(flags)
            assert client.at_end()
    with Client(server.address) as client:
        client.greet()
        client.send_option(nbd.NBD_OPT_EXPORT_NAME, b"other")
        assert client.at_end()


def test_options_of_any_length_are_skipped(start: Start) -> None:
    with Client(start(BytesSource(b"abc")).address) as client:
        client.greet()
        assert client.option(99, bytes(3 << 20)) == [(nbd.NBD_REP_ERR_TOO_BIG, b"")]
        assert client.option(99, bytes(1000)) == [(nbd.NBD_REP_ERR_UNSUP, b"")]
        assert client.option(nbd.NBD_OPT_INFO, export_query("no"))[-1][0] == nbd.NBD_REP_ERR_UNKNOWN or client.size == 0
        client.abort()


def test_a_bad_request_magic_ends_only_its_connection(start: Start) -> None:
    server = start(BytesSource(pattern(SIZE)))
    with connect(server) as good:
        with connect(server) as bad:
            bad.socket.sendall(struct.pack(">IHHQQI", 0x21E41C71, 0, 0, 1, 0, 512))  # an extended request nobody agreed on
            assert bad.at_end()
        assert good.read(0, 512) == pattern(SIZE)[:512]


def test_a_write_cut_short_is_not_carried_out(start: Start) -> None:
    source = Recording()
    server = start(source)
    client = connect(server)
    client.request(nbd.NBD_CMD_WRITE, 0, 100_000, payload=bytes(50_000))
    client.socket.shutdown(socket.SHUT_WR)
    assert client.at_end()
    client.socket.close()
    assert source.calls == []


class TestListening:
    def server(self, path: Path) -> Server:
        return Server([Export(BytesSource(b""))], unix=path)

    def test_the_socket_is_the_owners(self, tmp_path: Path) -> None:
        with self.server(tmp_path / "s") as server:
            assert server.address == tmp_path / "s"
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []

    def test_a_dead_servers_socket_is_replaced(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "s"))
        with self.server(tmp_path / "s") as server, Client(server.address) as client:
            client.greet()

    def test_a_living_servers_socket_is_not(self, tmp_path: Path) -> None:
        with self.server(tmp_path / "s") as server:
            with pytest.raises(Conflict):
                self.server(tmp_path / "s").start()
            with Client(server.address) as client:
                client.greet()

    def test_anothers_socket_is_not_removed(self, tmp_path: Path) -> None:
        server = self.server(tmp_path / "s")
        server.start()
        (tmp_path / "s").unlink()
        with self.server(tmp_path / "s"):
            server.stop()
            assert (tmp_path / "s").exists()

    def test_paths_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("precious")
        with pytest.raises(Conflict):
            self.server(tmp_path / "file").start()
        assert (tmp_path / "file").read_text() == "precious"
        with pytest.raises(HostError):
            self.server(tmp_path / "no" / "s").start()
        with pytest.raises(UsageError):
            self.server(Path("/" + "x" * 107)).start()

    def test_either_a_socket_or_a_port(self, tmp_path: Path) -> None:
        for options in ({}, {"unix": tmp_path / "s", "port": 0}):
            with pytest.raises(UsageError):
                Server([Export(BytesSource(b""))], **options)  # type: ignore[arg-type]

    def test_other_machines_are_kept_out(self) -> None:
        for host in ("0.0.0.0", "::", "192.0.2.1"):
            with pytest.raises(UsageError, match="TLS"):
                Server([Export(BytesSource(b""))], host=host, port=0).start()
        with pytest.raises(UsageError):
            Server([Export(BytesSource(b""))], host="no.such.host.invalid", port=0).start()
        with pytest.raises(UsageError):
            Server([Export(BytesSource(b""))], port=70000).start()

    def test_ports(self) -> None:
        with Server([Export(BytesSource(b""), "a b/c")], port=0) as server:
            host, port = server.address  # type: ignore[misc]
            assert server.uri("a b/c") == f"nbd://127.0.0.1:{port}/a%20b%2Fc"
            with pytest.raises(Conflict):
                Server([Export(BytesSource(b""))], host=str(host), port=int(str(port))).start()
        with pytest.raises(UsageError):
            server.start()


def test_read_only_servers_refuse_writes(start: Start) -> None:
    with connect(start(MemoryDisk(SIZE), read_only=True)) as client:
        assert client.flags & nbd.NBD_FLAG_READ_ONLY
        assert client.write(0, b"x") == nbd.NBD_EPERM
