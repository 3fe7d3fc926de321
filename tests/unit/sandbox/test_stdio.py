"""Streams between the caller and a sandbox, without a sandbox."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dsec_layers.sandbox.output import Collector
from dsec_layers.sandbox.stdio import Streams
from tests.kit.descriptors import open_files, opened_since


def test_pipes_go_in_as_they_are_and_files_do_not(tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(tmp_path / "file", "wb") as stream:
        streams = Streams(read, write, stream.fileno())
        try:
            assert (streams.stdin, streams.stdout) == (read, write)
            assert streams.stderr not in (write, stream.fileno())
        finally:
            streams.finish()
    os.close(read)
    os.close(write)


def test_bytes_are_moved_in_order_to_one_file(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"input")
    with open(tmp_path / "in", "rb") as source, open(tmp_path / "out", "wb") as target:
        streams = Streams(source.fileno(), target.fileno(), target.fileno())
        assert streams.stdout == streams.stderr
        stdin, stdout = os.dup(streams.stdin), os.dup(streams.stdout)
        streams.started()
        os.write(stdout, b"one ")
        os.write(stdout, b"two ")
        os.write(stdout, os.read(stdin, 100))
        assert os.read(stdin, 100) == b""
        os.close(stdin)
        os.close(stdout)
        streams.finish()
        streams.finish()
    assert (tmp_path / "out").read_bytes() == b"one two input"


def test_input_that_never_ends_does_not_hold_the_end(tmp_path: Path) -> None:
    """The thread that waits for the caller's terminal is woken when the sandbox is over."""
    master, slave = os.openpty()
    with open(os.devnull, "wb") as null:
        streams = Streams(slave, null.fileno(), null.fileno())
        streams.started()
        finisher = threading.Thread(target=streams.finish)
        finisher.start()
        finisher.join(10)
        assert not finisher.is_alive()
    os.close(master)
    os.close(slave)


def test_a_stream_that_fails_closes_the_sandboxs_pipe(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        streams = Streams(None, full.fileno(), full.fileno())
        stdout = os.dup(streams.stdout)
        streams.started()
        os.write(stdout, b"x")
        with pytest.raises(BrokenPipeError):
            while True:
                os.write(stdout, b"y" * 4096)
        os.close(stdout)
        streams.finish()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = open_files()
    with open(tmp_path / "file", "w+b") as stream:
        for begin in (False, True):
            streams = Streams(stream.fileno(), stream.fileno(), stream.fileno())
            if begin:
                streams.started()
            streams.finish()
    assert opened_since(before) == []


def test_a_collector_keeps_the_head_or_the_tail() -> None:
    for tail, kept in ((False, b"0123"), (True, b"6789")):
        collector = Collector(4, tail=tail)
        os.write(collector.fd, b"01234")
        os.write(collector.fd, b"56789")
        assert collector.finish() == kept
        assert collector.truncated


def test_a_collector_tells_lines() -> None:
    lines: list[str] = []
    collector = Collector(line=lines.append)
    for part in (b"one\ntw", b"o\r\n\n", b"x" * 5000, b"y\n", b"last"):
        os.write(collector.fd, part)
    collector.finish()
    assert [line[:5] for line in lines] == ["one", "two", "", "xxxxx", "last"]
    assert len(lines[3]) == 4096
