"""Replies on their way out, and the bounds on work: with streams that fail, stall and end where a test wants it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

import pytest

from dsec_layers.digest import Buffer
from dsec_layers.fuse.nbd.sender import Sender
from dsec_layers.fuse.nbd.workers import Workers

SECONDS = 20.0


class Stream:
    """A transport that keeps what was sent. ``file_error`` is met after ``file_bytes`` of files; ``gate`` holds up each send."""

    can_send_files = True

    def __init__(self, *, file_bytes: int = 1 << 40, file_error: int = 0) -> None:
        self.sent = bytearray()
        self.calls: list[int] = []
        self.left = file_bytes
        self.file_error = file_error
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def recv_into(self, buffer: memoryview) -> int:
        """Not used here."""
        return 0

    def send(self, parts: Sequence[Buffer], *, more: bool = False) -> None:
        """Keep the bytes."""
        self.entered.set()
        assert self.gate.wait(SECONDS)
        if self.broken:
            raise BrokenPipeError
        self.calls.append(len(parts))
        for part in parts:
            self.sent += part

    def send_file(self, fd: int, offset: int, length: int) -> tuple[int, int]:
        """``length`` bytes of value ``fd``, as far as the file goes."""
        good = min(length, self.left)
        self.left -= good
        self.sent += bytes([fd]) * good
        return good, self.file_error if good < length else 0

    def finish(self) -> None:
        """Nothing to say."""


class Account:
    """What a sender reports."""

    def __init__(self) -> None:
        self.settled: list[int] = []
        self.broke = 0

    def sender(self, stream: Stream) -> Sender:
        """A sender that reports here."""

        def broke() -> None:
            self.broke += 1

        return Sender(stream, self.settled.append, broke)


def test_files_after_their_header() -> None:
    stream = Stream()
    assert Account().sender(stream).send_file(b"head", [(1, 0, 3), (2, 5, 2)], pad=True) == (5, 0)
    assert stream.sent == b"head\1\1\1\2\2"


@pytest.mark.parametrize(("error", "reported"), [(errno.EIO, errno.EIO), (0, errno.EIO), (errno.ESTALE, errno.ESTALE)])
def test_a_failed_file_is_padded_to_its_announced_length(error: int, reported: int) -> None:
    stream = Stream(file_bytes=100_001, file_error=error)
    good, number = Account().sender(stream).send_file(b"head", [(1, 0, 100_000), (2, 0, 200_000), (3, 0, 7)], pad=True)
    assert (good, number) == (100_001, reported)
    assert stream.sent == b"head" + b"\1" * 100_000 + b"\2" + bytes(200_006)


def test_without_padding_a_failed_file_ends_the_connection() -> None:
    with pytest.raises(ConnectionError):
        Account().sender(Stream(file_bytes=1)).send_file(b"head", [(1, 0, 3)], pad=False)


def test_replies_that_become_ready_during_a_send_leave_together() -> None:
    stream, account = Stream(), Account()
    sender = account.sender(stream)
    stream.gate.clear()
    first = threading.Thread(target=sender.post, args=([b"first"], 1))
    first.start()
    assert stream.entered.wait(SECONDS)
    for number in range(5):
        sender.post([b"%d" % number, b","], 10)  # returns at once: the first thread will see to it
    assert account.settled == []
    stream.gate.set()
    first.join(SECONDS)
    assert stream.sent == b"first0,1,2,3,4,"
    assert stream.calls == [1, 10]
    assert account.settled == [1, *[10] * 5]


def test_no_reply_is_lost_or_cut_under_contention() -> None:
    stream, account = Stream(), Account()
    sender = account.sender(stream)

    def post(name: int) -> None:
        for number in range(500):
            sender.post([b"%02d" % name, b"%04d;" % number], 1)
            if number % 50 == 0:
                sender.send([b"%02d" % name, b"send;"])

    threads = [threading.Thread(target=post, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    pieces = bytes(stream.sent).split(b";")[:-1]
    assert sorted(p for p in pieces if not p.endswith(b"send")) == sorted(b"%02d%04d" % (n, i) for n in range(8) for i in range(500))
    assert len(account.settled) == 4000


def test_a_broken_stream_settles_what_it_drops() -> None:
    stream, account = Stream(), Account()
    sender = account.sender(stream)
    stream.broken = True
    sender.post([b"a"], 1)
    sender.post([b"b"], 2)
    assert (account.settled, account.broke) == ([1, 2], 1)
    with pytest.raises(BrokenPipeError):
        sender.send([b"c"])


def test_nothing_is_sent_after_close() -> None:
    stream, account = Stream(), Account()
    sender = account.sender(stream)
    sender.close()
    sender.post([b"late"], 3)
    assert stream.calls == []
    assert account.settled == [3]


def workers(**bounds: int) -> Workers:
    return Workers("test", **{"threads": 2, "requests": 4, "payload": 100, **bounds})


def test_threads_start_as_they_are_needed_and_no_more() -> None:
    pool = workers(requests=50)
    running = threading.Semaphore(0)
    release = threading.Event()
    names = set()

    def job() -> None:
        names.add(threading.current_thread())
        running.release()
        assert release.wait(SECONDS)
        pool.settle(0)

    before = threading.active_count()
    pool.submit(0, job)
    assert running.acquire(timeout=SECONDS)
    assert threading.active_count() == before + 1
    for _ in range(9):
        pool.submit(0, job)
    assert running.acquire(timeout=SECONDS)
    assert threading.active_count() == before + 2
    release.set()
    pool.finish()
    assert len(names) == 2
    for thread in names:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_room() -> None:
    pool = workers()
    assert pool.has_room(1000)  # alone
    pool.submit(60, lambda: None)
    assert pool.has_room(40)
    assert not pool.has_room(41)
    for _ in range(3):
        pool.submit(0, lambda: None)
    assert not pool.has_room(0)
    pool.settle(0)
    assert pool.has_room(0)


def _blocked(call: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def body() -> None:
        try:
            call()
        except ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, errors


def test_waiting_for_room_and_for_the_end() -> None:
    pool = workers(requests=1)
    pool.submit(5, lambda: None)
    waiting, errors = _blocked(lambda: pool.wait_for_room(5))
    assert waiting.is_alive()
    pool.settle(5)
    waiting.join(SECONDS)
    assert (waiting.is_alive(), errors) == (False, [])

    pool.submit(5, lambda: None)
    waiting, errors = _blocked(lambda: pool.wait_for_room(5))
    finishing, _ = _blocked(pool.finish)
    pool.abort()
    for thread in (waiting, finishing):
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert len(errors) == 1


def test_no_thread_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = workers()
    started = threading.Event()
    pool.submit(0, started.set)
    assert started.wait(SECONDS)
    done = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.submit(0, lambda: None)
        pool.submit(0, done.set)  # the one thread does it all
        assert done.wait(SECONDS)
        with pytest.raises(ConnectionError):
            workers().submit(0, lambda: None)
    for _ in range(3):
        pool.settle(0)
    pool.finish()
