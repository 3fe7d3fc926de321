"""The NBD protocol as values and bytes: constants under the names of the protocol document, parsing, formatting. No I/O.

Source: NetworkBlockDevice/nbd, doc/proto.md (fixed newstyle negotiation, structured replies, metadata contexts). All numbers are big-endian.
Everything parsed here comes from a peer that may be hostile: each length is checked against what is there before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

NBD_MAGIC: Final = 0x4E42444D41474943
NBD_OPTION_MAGIC: Final = 0x49484156454F5054
NBD_REPLY_MAGIC: Final = 0x3E889045565A9
NBD_REQUEST_MAGIC: Final = 0x25609513
NBD_SIMPLE_REPLY_MAGIC: Final = 0x67446698
NBD_STRUCTURED_REPLY_MAGIC: Final = 0x668E33EF

NBD_FLAG_FIXED_NEWSTYLE: Final = 1 << 0
NBD_FLAG_NO_ZEROES: Final = 1 << 1
NBD_FLAG_C_FIXED_NEWSTYLE: Final = 1 << 0
NBD_FLAG_C_NO_ZEROES: Final = 1 << 1

NBD_FLAG_HAS_FLAGS: Final = 1 << 0
NBD_FLAG_READ_ONLY: Final = 1 << 1
NBD_FLAG_SEND_FLUSH: Final = 1 << 2
NBD_FLAG_SEND_FUA: Final = 1 << 3
NBD_FLAG_SEND_TRIM: Final = 1 << 5
NBD_FLAG_SEND_WRITE_ZEROES: Final = 1 << 6
NBD_FLAG_SEND_DF: Final = 1 << 7
NBD_FLAG_CAN_MULTI_CONN: Final = 1 << 8
NBD_FLAG_SEND_CACHE: Final = 1 << 10
NBD_FLAG_SEND_FAST_ZERO: Final = 1 << 11

NBD_OPT_EXPORT_NAME: Final = 1
NBD_OPT_ABORT: Final = 2
NBD_OPT_LIST: Final = 3
NBD_OPT_STARTTLS: Final = 5
NBD_OPT_INFO: Final = 6
NBD_OPT_GO: Final = 7
NBD_OPT_STRUCTURED_REPLY: Final = 8
NBD_OPT_LIST_META_CONTEXT: Final = 9
NBD_OPT_SET_META_CONTEXT: Final = 10

NBD_REP_ACK: Final = 1
NBD_REP_SERVER: Final = 2
NBD_REP_INFO: Final = 3
NBD_REP_META_CONTEXT: Final = 4
NBD_REP_ERR_UNSUP: Final = (1 << 31) + 1
NBD_REP_ERR_POLICY: Final = (1 << 31) + 2
NBD_REP_ERR_INVALID: Final = (1 << 31) + 3
NBD_REP_ERR_TLS_REQD: Final = (1 << 31) + 5
NBD_REP_ERR_UNKNOWN: Final = (1 << 31) + 6
NBD_REP_ERR_SHUTDOWN: Final = (1 << 31) + 7
NBD_REP_ERR_TOO_BIG: Final = (1 << 31) + 9

NBD_INFO_EXPORT: Final = 0
NBD_INFO_NAME: Final = 1
NBD_INFO_DESCRIPTION: Final = 2
NBD_INFO_BLOCK_SIZE: Final = 3

NBD_CMD_READ: Final = 0
NBD_CMD_WRITE: Final = 1
NBD_CMD_DISC: Final = 2
NBD_CMD_FLUSH: Final = 3
NBD_CMD_TRIM: Final = 4
NBD_CMD_CACHE: Final = 5
NBD_CMD_WRITE_ZEROES: Final = 6
NBD_CMD_BLOCK_STATUS: Final = 7

NBD_CMD_FLAG_FUA: Final = 1 << 0
NBD_CMD_FLAG_NO_HOLE: Final = 1 << 1
NBD_CMD_FLAG_DF: Final = 1 << 2
NBD_CMD_FLAG_REQ_ONE: Final = 1 << 3
NBD_CMD_FLAG_FAST_ZERO: Final = 1 << 4

NBD_REPLY_FLAG_DONE: Final = 1 << 0
NBD_REPLY_TYPE_NONE: Final = 0
NBD_REPLY_TYPE_OFFSET_DATA: Final = 1
NBD_REPLY_TYPE_BLOCK_STATUS: Final = 5
NBD_REPLY_TYPE_ERROR: Final = (1 << 15) + 1
NBD_REPLY_TYPE_ERROR_OFFSET: Final = (1 << 15) + 2

NBD_STATE_HOLE: Final = 1 << 0
NBD_STATE_ZERO: Final = 1 << 1

NBD_EPERM: Final = 1
NBD_EIO: Final = 5
NBD_ENOMEM: Final = 12
NBD_EINVAL: Final = 22
NBD_ENOSPC: Final = 28
NBD_EOVERFLOW: Final = 75
NBD_ENOTSUP: Final = 95
NBD_ESHUTDOWN: Final = 108

ALLOCATION_CONTEXT: Final = "base:allocation"
ALLOCATION_ID: Final = 1
"""The context id of ``base:allocation`` on every connection; any value would do, clients treat it as opaque."""

MAX_STRING: Final = 4096
"""No name or query may be longer ("Conventions")."""

MAX_OPTION: Final = 1 << 16
"""Longer option data is skipped and answered with NBD_REP_ERR_TOO_BIG: room for a name and a dozen queries of the longest kind."""

MAX_PAYLOAD: Final = 1 << 25
"""The advertised maximum payload, 32 MiB: the length every server should accept ("Size constraints")."""

MAX_EXTENTS: Final = 1 << 16
"""Descriptors in one block status reply. The document allows 2^20; a client asks again where a reply ends, and this bounds the reply to 512 KiB."""

OPTION: Final = struct.Struct(">QII")
OPTION_REPLY: Final = struct.Struct(">QIII")
REQUEST: Final = struct.Struct(">IHHQQI")
SIMPLE_REPLY: Final = struct.Struct(">IIQ")
CHUNK: Final = struct.Struct(">IHHQI")
DATA_CHUNK: Final = struct.Struct(">IHHQIQ")
_ERROR: Final = struct.Struct(">IH")


class ProtocolError(Exception):
    """The peer broke the protocol in a way that leaves no way to go on: the connection ends, nothing else does."""


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """The data of NBD_OPT_INFO and NBD_OPT_GO."""

    name: str
    requests: frozenset[int]


@dataclass(frozen=True, slots=True)
class MetaQuery:
    """The data of NBD_OPT_LIST_META_CONTEXT and NBD_OPT_SET_META_CONTEXT."""

    name: str
    queries: tuple[str, ...]


def greeting() -> bytes:
    """What the server says first."""
    return struct.pack(">QQH", NBD_MAGIC, NBD_OPTION_MAGIC, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES)


def parse_client_flags(data: bytes) -> tuple[bool, bool]:
    """(fixed newstyle, no zeroes) from the client's four bytes. An unknown flag must end the connection."""
    flags: int = struct.unpack(">I", data)[0]
    if flags & ~(NBD_FLAG_C_FIXED_NEWSTYLE | NBD_FLAG_C_NO_ZEROES):
        raise ProtocolError(f"unknown client flags {flags:#x}")
    return bool(flags & NBD_FLAG_C_FIXED_NEWSTYLE), bool(flags & NBD_FLAG_C_NO_ZEROES)


def parse_option(data: bytes) -> tuple[int, int]:
    """(option, length of its data) from a 16-byte option header."""
    magic, option, length = OPTION.unpack(data)
    if magic != NBD_OPTION_MAGIC:
        raise ProtocolError(f"bad option magic {magic:#x}")
    return option, length


def option_reply(option: int, kind: int, data: bytes = b"") -> bytes:
    """One reply to an option. For an error ``data`` is text for a human."""
    return OPTION_REPLY.pack(NBD_REPLY_MAGIC, option, kind, len(data)) + data


def parse_name(data: bytes) -> str:
    """A string under the document's rules: UTF-8, no NUL, at most 4096 bytes. Raises ValueError."""
    if len(data) > MAX_STRING:
        raise ValueError(f"a string of {len(data)} bytes is longer than {MAX_STRING}")
    text = data.decode("utf-8")
    if "\0" in text:
        raise ValueError("a string holds a NUL")
    return text


class _Cursor:
    """Reads fields from option data and never past its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def bytes(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError("option data ends early")
        self._at += length
        return self._data[self._at - length : self._at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.bytes(width), "big")

    def string(self) -> str:
        return parse_name(self.bytes(self.number(4)))

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("option data goes on past its fields")


def parse_export_query(data: bytes) -> ExportQuery:
    """The data of NBD_OPT_INFO or NBD_OPT_GO. Raises ValueError when it is malformed."""
    cursor = _Cursor(data)
    name = cursor.string()
    requests = frozenset(cursor.number(2) for _ in range(cursor.number(2)))
    cursor.end()
    return ExportQuery(name, requests)


def parse_meta_query(data: bytes) -> MetaQuery:
    """The data of the two metadata context options. Raises ValueError when it is malformed, or a query has no namespace."""
    cursor = _Cursor(data)
    name = cursor.string()
    queries = []
    for _ in range(cursor.number(4)):
        query = cursor.string()
        if query.partition(":")[1] == "" or query.startswith(":"):
            raise ValueError("a metadata query has no namespace")
        queries.append(query)
    cursor.end()
    return MetaQuery(name, tuple(queries))


def export_name_reply(size: int, flags: int, *, zeroes: bool) -> bytes:
    """The answer to NBD_OPT_EXPORT_NAME, which has no reply header."""
    return struct.pack(">QH", size, flags) + (bytes(124) if zeroes else b"")


def info_export(size: int, flags: int) -> bytes:
    """NBD_INFO_EXPORT: size in bytes and transmission flags."""
    return struct.pack(">HQH", NBD_INFO_EXPORT, size, flags)


def info_text(kind: int, text: str) -> bytes:
    """NBD_INFO_NAME or NBD_INFO_DESCRIPTION."""
    return struct.pack(">H", kind) + text.encode()


def info_block_size(minimum: int, preferred: int, maximum: int) -> bytes:
    """NBD_INFO_BLOCK_SIZE, in bytes."""
    return struct.pack(">HIII", NBD_INFO_BLOCK_SIZE, minimum, preferred, maximum)


def server_entry(name: str, description: str) -> bytes:
    """The data of NBD_REP_SERVER."""
    encoded = name.encode()
    return struct.pack(">I", len(encoded)) + encoded + description.encode()


def meta_context(identifier: int, name: str) -> bytes:
    """The data of NBD_REP_META_CONTEXT."""
    return struct.pack(">I", identifier) + name.encode()


def success_reply(cookie: int) -> bytes:
    """Success of a command without data, in the short form that is valid whatever was negotiated."""
    return SIMPLE_REPLY.pack(NBD_SIMPLE_REPLY_MAGIC, 0, cookie)


def error_reply(cookie: int, error: int, message: str, *, structured: bool) -> bytes:
    """Failure of any command. ``error`` is an NBD error value; ``message`` is shown to humans where the reply form has room for it."""
    if not structured:
        return SIMPLE_REPLY.pack(NBD_SIMPLE_REPLY_MAGIC, error, cookie)
    text = message.encode(errors="replace")[:MAX_STRING]
    payload = _ERROR.pack(error, len(text)) + text
    return CHUNK.pack(NBD_STRUCTURED_REPLY_MAGIC, NBD_REPLY_FLAG_DONE, NBD_REPLY_TYPE_ERROR, cookie, len(payload)) + payload


def error_offset_chunk(cookie: int, error: int, offset: int) -> bytes:
    """The final chunk of a read whose data chunk went wrong at ``offset``, an offset in the export."""
    payload = _ERROR.pack(error, 0) + struct.pack(">Q", offset)
    return CHUNK.pack(NBD_STRUCTURED_REPLY_MAGIC, NBD_REPLY_FLAG_DONE, NBD_REPLY_TYPE_ERROR_OFFSET, cookie, len(payload)) + payload


def done_chunk(cookie: int) -> bytes:
    """The final chunk of a reply whose data chunk could not be marked as final."""
    return CHUNK.pack(NBD_STRUCTURED_REPLY_MAGIC, NBD_REPLY_FLAG_DONE, NBD_REPLY_TYPE_NONE, cookie, 0)


def data_header(cookie: int, offset: int, length: int, *, structured: bool, done: bool = True) -> bytes:
    """What precedes the ``length`` bytes of a successful read of at least one byte."""
    if not structured:
        return SIMPLE_REPLY.pack(NBD_SIMPLE_REPLY_MAGIC, 0, cookie)
    flags = NBD_REPLY_FLAG_DONE if done else 0
    return DATA_CHUNK.pack(NBD_STRUCTURED_REPLY_MAGIC, flags, NBD_REPLY_TYPE_OFFSET_DATA, cookie, length + 8, offset)


def block_status_chunk(cookie: int, extents: Iterable[tuple[int, int]]) -> bytes:
    """The whole answer to NBD_CMD_BLOCK_STATUS: (length, flags) pairs, at least one, each length from 1 to 2^32 - 1."""
    payload = struct.pack(">I", ALLOCATION_ID) + b"".join(struct.pack(">II", length, flags) for length, flags in extents)
    return CHUNK.pack(NBD_STRUCTURED_REPLY_MAGIC, NBD_REPLY_FLAG_DONE, NBD_REPLY_TYPE_BLOCK_STATUS, cookie, len(payload)) + payload
