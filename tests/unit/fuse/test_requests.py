"""Control requests that are improper in one field are refused by name; proper ones pass."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict
from typing import Any, cast

import pytest

from dsec_layers.errors import UsageError
from dsec_layers.fuse.client.control import error_from, receive, send
from dsec_layers.fuse.daemon import requests
from dsec_layers.fuse.daemon.service import Service
from dsec_layers.fuse.records import Holder
from dsec_layers.layers.tables import MAX_SEGMENT, MAX_STORED
from dsec_layers.linux.process import mount_namespace
from dsec_layers.segment import Segment

DIGEST = "sha256:" + "0" * 64
PIECE: dict[str, Any] = {
    "digest": "ab" * 32,
    "size": 4096,
    "store": "file:///s",
    "blob": DIGEST,
    "offset": 0,
    "stored": 100,
    "codec": "zstd",
}
HOLDER: dict[str, Any] = asdict(Holder(pid=1, starttime=2))


class Taken:
    """Stands for the manager and the cache: notes that something got through."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object, **options: object) -> Any:
            self.calls.append((name, arguments))
            raise UsageError("got through", hint="none")

        return call


def ask(message: dict[str, Any]) -> tuple[str, Taken]:
    """What the service answers to a message (an error's text), and what it did."""
    taken = Taken()
    here, there = socket.socketpair()
    made = (cast(Any, item) for item in (here, taken, taken, taken, None, lambda name: name or "fanotify", lambda: None, list))
    service = Service(*made)
    with here, there:
        thread = threading.Thread(target=service._server._converse, args=(here,))
        thread.start()
        receive(there)
        send(there, json.loads(json.dumps(message)))
        received = receive(there)
        there.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert received is not None
    error = error_from(received[0]["error"])
    assert isinstance(error, UsageError)
    return error.message, taken


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0}, {"size": -1}, {"size": MAX_SEGMENT + 1}, {"size": 1 << 40}, {"size": True}, {"size": 4096.0}, {"size": "4096"}, {"size": None},
        {"stored": 0}, {"stored": MAX_STORED + 1}, {"stored": "x"}, {"stored": [1]},
        {"offset": -1}, {"offset": 1 << 63}, {"offset": ((1 << 63) - 1 - MAX_STORED) + 1}, {"offset": 0.5},
        {"codec": "lz4"}, {"codec": ""}, {"codec": None}, {"codec": ["raw"]}, {"codec": "raw"},
        {"blob": "0" * 64}, {"blob": "sha256:../../etc/passwd"}, {"blob": 7},
        {"digest": "ab" * 31}, {"digest": "AB" * 32}, {"digest": "../" * 21 + "a"}, {"digest": 5}, {"digest": " " + "ab" * 32},
        {"store": ""}, {"store": "x" * 5000}, {"store": 1}, {"store": "a\0b"},
        {"more": 1},
    ],
)  # fmt: skip
def test_b7_an_improper_piece_is_refused(change: dict[str, Any]) -> None:
    message, taken = ask({"op": "open", "piece": PIECE | change})
    assert message.startswith("improper request") and not taken.calls


@pytest.mark.parametrize("piece", [None, [], "x", 1, {}, {"size": 1}])
def test_b7_what_is_no_piece_is_refused(piece: object) -> None:
    message, taken = ask({"op": "open", "piece": piece})
    assert message.startswith("improper request") and not taken.calls


@pytest.mark.parametrize(
    "change", [{}, {"size": MAX_SEGMENT, "stored": MAX_STORED, "offset": ((1 << 63) - 1 - MAX_STORED)}, {"codec": "raw", "stored": 4096}]
)
def test_a_proper_piece_passes(change: dict[str, Any]) -> None:
    value = PIECE | change
    _, taken = ask({"op": "open", "piece": value})
    piece = Segment(bytes.fromhex(value.pop("digest")), **value)
    assert taken.calls == [("open", (piece,))]


ATTACH: dict[str, Any] = {
    "op": "attach", "identifier": "a1", "store": "file:///s", "layers": [DIGEST], "holder": HOLDER, "driver": "", "namespace": mount_namespace(),
}  # fmt: skip
MOUNT: dict[str, Any] = {
    "op": "mount", "store": "file:///s", "digest": DIGEST, "target": "/mnt", "label": "", "driver": "", "namespace": mount_namespace(),
}  # fmt: skip


ATTACHES: list[dict[str, Any]] = [
    {"layers": DIGEST}, {"layers": [1]}, {"layers": ["sha256:../x"]}, {"layers": [DIGEST] * (requests.MAX_LAYERS + 1)}, {"layers": None},
    {"identifier": 1}, {"identifier": ""}, {"store": None}, {"driver": None}, {"driver": []},
    {"holder": HOLDER | {"pid": "1"}}, {"holder": HOLDER | {"pid": -1}}, {"holder": HOLDER | {"starttime": 1.5}},
    {"holder": HOLDER | {"target": 1}}, {"holder": {}}, {"holder": HOLDER | {"more": 1}}, {"holder": 1},
]  # fmt: skip
MOUNTS: list[dict[str, Any]] = [
    {"digest": "x"}, {"digest": None}, {"target": ""}, {"target": 1}, {"label": 1}, {"label": "x" * 5000}, {"store": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        *(ATTACH | change for change in ATTACHES),
        *(MOUNT | change for change in MOUNTS),
        {"op": "umount", "target": "/mnt", "lazy": "no"}, {"op": "umount", "target": 1, "lazy": False}, {"op": "umount"},
        {"op": "release", "identifier": {}}, {"op": "release"},
    ],
)  # fmt: skip
def test_b7_improper_requests_are_refused(message: dict[str, Any]) -> None:
    text, taken = ask(message)
    assert text.startswith("improper request") and not taken.calls


@pytest.mark.parametrize(
    "message", [ATTACH, MOUNT, {"op": "umount", "target": "/mnt", "lazy": False}, {"op": "release", "identifier": "a1"}]
)
def test_proper_requests_pass(message: dict[str, Any]) -> None:
    _, taken = ask(message)
    assert [name for name, _ in taken.calls] == [message["op"]]
