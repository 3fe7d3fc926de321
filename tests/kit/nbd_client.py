"""An NBD client for tests: speaks the protocol word by word, checks what the server must keep to, and can break every rule itself."""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dsec_layers.fuse.nbd.protocol import (
    NBD_CMD_DISC,
    NBD_CMD_READ,
    NBD_CMD_WRITE,
    NBD_MAGIC,
    NBD_OPT_ABORT,
    NBD_OPT_EXPORT_NAME,
    NBD_OPT_GO,
    NBD_OPT_SET_META_CONTEXT,
    NBD_OPT_STRUCTURED_REPLY,
    NBD_OPTION_MAGIC,
    NBD_REP_ACK,
    NBD_REP_INFO,
    NBD_REPLY_MAGIC,
    NBD_REQUEST_MAGIC,
    NBD_SIMPLE_REPLY_MAGIC,
    NBD_STRUCTURED_REPLY_MAGIC,
)

SECONDS = 20.0


@dataclass
class Reply:
    """One request's whole reply. ``data`` is in order of offset; ``extents`` are those of a block status."""

    error: int = 0
    data: bytearray = field(default_factory=bytearray)
    extents: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    message: str = ""
    error_offset: int | None = None


class Client:
    """One connection. Reading past the end of the stream raises EOFError, waiting for more than 20 s raises TimeoutError."""

    def __init__(self, address: Path | tuple[str, int]) -> None:
        if isinstance(address, Path):
            self.socket: Any = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(SECONDS)
            try:
                self.socket.connect(str(address))
            except OSError:
                self.socket.close()
                raise
        else:
            self.socket = socket.create_connection(address, SECONDS)
        self.structured = False
        self.size = self.flags = 0
        self._pending: dict[int, tuple[int, int, int]] = {}
        self._partial: dict[int, Reply] = {}
        self._cookie = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def receive(self, length: int) -> bytes:
        """Exactly ``length`` bytes."""
        parts = []
        while length:
            part = self.socket.recv(min(length, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def at_end(self) -> bool:
        """Whether the server has closed the connection, and sent nothing before."""
        try:
            return bytes(self.socket.recv(1)) == b""
        except ConnectionResetError:
            return True

    def greet(self, flags: int = 3) -> int:
        """The first exchange; returns the handshake flags."""
        magic, option_magic, handshake = struct.unpack(">QQH", self.receive(18))
        assert (magic, option_magic) == (NBD_MAGIC, NBD_OPTION_MAGIC)
        self.socket.sendall(struct.pack(">I", flags))
        return int(handshake)

    def send_option(self, option: int, data: bytes = b"") -> None:
        """An option, without waiting for its reply."""
        self.socket.sendall(struct.pack(">QII", NBD_OPTION_MAGIC, option, len(data)) + data)

    def option(self, option: int, data: bytes = b"") -> list[tuple[int, bytes]]:
        """An option and all its replies, the last of which is ACK or an error."""
        self.send_option(option, data)
        replies = []
        while True:
            magic, echoed, kind, length = struct.unpack(">QIII", self.receive(20))
            assert (magic, echoed) == (NBD_REPLY_MAGIC, option)
            replies.append((kind, self.receive(length)))
            if kind == NBD_REP_ACK or kind >> 31:
                return replies

    def go(self, name: str = "", *, structured: bool = True, allocation: bool = False) -> Self:
        """Enter the transmission phase by NBD_OPT_GO."""
        if structured:
            assert self.option(NBD_OPT_STRUCTURED_REPLY) == [(NBD_REP_ACK, b"")]
            self.structured = True
        if allocation:
            replies = self.option(NBD_OPT_SET_META_CONTEXT, meta_query(name, "base:allocation"))
            assert [kind for kind, _ in replies] == [4, NBD_REP_ACK]
        replies = self.option(NBD_OPT_GO, export_query(name))
        assert replies[-1][0] == NBD_REP_ACK, replies
        (info,) = [data for kind, data in replies if kind == NBD_REP_INFO and data[:2] == b"\0\0"]
        self.size, self.flags = struct.unpack(">xxQH", info)
        return self

    def export_name(self, name: str = "", *, zeroes: bool = False) -> Self:
        """Enter the transmission phase by NBD_OPT_EXPORT_NAME."""
        self.send_option(NBD_OPT_EXPORT_NAME, name.encode())
        self.size, self.flags = struct.unpack(">QH", self.receive(10))
        if zeroes:
            assert self.receive(124) == bytes(124)
        return self

    def abort(self) -> None:
        """Leave politely during the handshake."""
        assert self.option(NBD_OPT_ABORT) == [(NBD_REP_ACK, b"")]
        assert self.at_end()

    def request(self, command: int, offset: int = 0, length: int = 0, *, flags: int = 0, payload: bytes = b"") -> int:
        """Send a request; returns its cookie."""
        self._cookie += 1
        self.post([(self._cookie, command, flags, offset, length, payload)])
        return self._cookie

    def post(self, requests: list[tuple[int, int, int, int, int, bytes]]) -> None:
        """Send (cookie, command, flags, offset, length, payload) requests in one piece."""
        data = b""
        for cookie, command, flags, offset, length, payload in requests:
            self._cookie = max(self._cookie, cookie)
            self._pending[cookie] = (command, offset, length)
            data += struct.pack(">IHHQQI", NBD_REQUEST_MAGIC, flags, command, cookie, offset, length) + payload
        self.socket.sendall(data)

    def reply(self) -> tuple[int, Reply]:
        """The next request's reply that is complete, by cookie."""
        while True:
            magic = struct.unpack(">I", self.receive(4))[0]
            if magic == NBD_SIMPLE_REPLY_MAGIC:
                return self._simple()
            assert magic == NBD_STRUCTURED_REPLY_MAGIC
            assert self.structured
            cookie, done = self._chunk()
            if done:
                return cookie, self._close(cookie)

    def _simple(self) -> tuple[int, Reply]:
        error, cookie = struct.unpack(">IQ", self.receive(12))
        command, _, length = self._pending.pop(cookie)
        assert not (self.structured and command == NBD_CMD_READ), "structured replies are a must for reads"
        reply = Reply(error)
        if command == NBD_CMD_READ and not error:
            reply.data += self.receive(length)
        return cookie, reply

    def _close(self, cookie: int) -> Reply:
        command, _, length = self._pending.pop(cookie)
        reply = self._partial.pop(cookie)
        if command == NBD_CMD_READ and not reply.error:
            assert len(reply.data) == length
        return reply

    def _chunk(self) -> tuple[int, bool]:
        flags, kind, cookie, length = struct.unpack(">HHQI", self.receive(16))
        payload = self.receive(length)
        command, offset, asked = self._pending[cookie]
        reply = self._partial.setdefault(cookie, Reply())
        reply.chunks.append(kind)
        if kind == 0:
            assert length == 0 and flags == 1
        elif kind == 1:
            (at,) = struct.unpack(">Q", payload[:8])
            assert command == NBD_CMD_READ and length > 8
            assert at == offset + len(reply.data) and at + length - 8 <= offset + asked
            reply.data += payload[8:]
        elif kind == 5:
            assert struct.unpack(">I", payload[:4])[0] == 1 and length > 4 and (length - 4) % 8 == 0
            reply.extents = [struct.unpack_from(">II", payload, at) for at in range(4, length, 8)]
        else:
            assert kind >> 15, f"unknown chunk {kind}"
            reply.error, text = struct.unpack(">IH", payload[:6])
            assert reply.error
            reply.message = payload[6 : 6 + text].decode()
            if kind & 0x7FFF == 2:
                (reply.error_offset,) = struct.unpack(">Q", payload[6 + text :])
        return cookie, bool(flags & 1)

    def call(self, command: int, offset: int = 0, length: int = 0, *, flags: int = 0, payload: bytes = b"") -> Reply:
        """A request and its reply, with nothing else in flight."""
        cookie = self.request(command, offset, length, flags=flags, payload=payload)
        answered, reply = self.reply()
        assert answered == cookie
        return reply

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the export."""
        reply = self.call(NBD_CMD_READ, offset, length)
        assert reply.error == 0, reply
        return bytes(reply.data)

    def write(self, offset: int, data: bytes, flags: int = 0) -> int:
        """The error of a write, 0 for success."""
        return self.call(NBD_CMD_WRITE, offset, len(data), flags=flags, payload=data).error

    def disconnect(self) -> None:
        """Leave politely; the server closes the connection."""
        self.request(NBD_CMD_DISC)
        assert self.at_end()

    def many(self, requests: list[tuple[int, int, int, int, int, bytes]], depth: int) -> dict[int, Reply]:
        """Requests with up to ``depth`` in flight; the replies by cookie."""
        waiting = deque(requests)
        replies: dict[int, Reply] = {}
        while waiting or self._pending:
            room = depth - len(self._pending)
            if waiting and room > 0:
                self.post([waiting.popleft() for _ in range(min(room, len(waiting)))])
            cookie, reply = self.reply()
            replies[cookie] = reply
        return replies


def export_query(name: str, *requests: int) -> bytes:
    """The data of INFO and GO."""
    encoded = name.encode()
    return struct.pack(">I", len(encoded)) + encoded + struct.pack(f">H{len(requests)}H", len(requests), *requests)


def meta_query(name: str, *queries: str) -> bytes:
    """The data of the metadata context options."""
    encoded = name.encode()
    data = struct.pack(">I", len(encoded)) + encoded + struct.pack(">I", len(queries))
    for query in queries:
        data += struct.pack(">I", len(query.encode())) + query.encode()
    return data
