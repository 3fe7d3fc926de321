"""The daemon's control protocol: messages over a Unix socket in the cache directory.

A message is a 4-byte big-endian length and a JSON object; descriptors may come along with the length. The daemon speaks first:
``{"version": 1, "pid": …, "warnings": […]}``. Then requests ``{"op": NAME, …}`` and, for each, ``{"ok": …}`` or ``{"error": {"type", "message", "hint"}}``,
``type`` being a class of dsec_layers.errors. The socket is only for the user the daemon runs as (mode 0600, and the peer's uid is checked).
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from dsec_layers import errors
from dsec_layers.errors import DsecError, HostError
from dsec_layers.linux.unixsocket import connect_unix, listen_unix

__all__ = ["SOCKET", "VERSION", "Message", "close_all", "connect", "error_from", "error_message", "listen", "peer_uid", "receive", "send"]

Message: TypeAlias = dict[str, Any]

VERSION: Final = 1
SOCKET: Final = "control"
_LENGTH: Final = struct.Struct(">I")
_LONGEST: Final = 64 << 20
_MOST_FDS: Final = 16
_FD: Final = struct.Struct("=i")
_PEER: Final = struct.Struct("=iII")


def listen(root: Path) -> socket.socket:
    """A listening socket in the cache directory. Only for who holds the cache's lock: an old socket there is replaced."""
    return listen_unix(root / SOCKET, owned=True)


def connect(root: Path, timeout: float | None = None) -> socket.socket | None:
    """A connection to the daemon of the cache ``root``; None if there is none."""
    try:
        return connect_unix(root / SOCKET, timeout)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return None
    except PermissionError as error:
        raise HostError(f"the daemon of cache {root} belongs to another user", hint="run as root, or use another cache") from error
    except OSError as error:
        raise HostError(f"cannot reach the daemon of cache {root}: {error.strerror or error}") from error


def peer_uid(channel: socket.socket) -> int:
    """The user at the other end."""
    uid: int = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    return uid


def send(channel: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError."""
    data = json.dumps(message, separators=(",", ":")).encode()
    head = _LENGTH.pack(len(data))
    if fds:
        sent = socket.send_fds(channel, [head], list(fds))
        head = head[sent:]
    channel.sendall(head + data)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """One message and the descriptors that came with it, which the caller closes (``close_all``); None when the other side has closed.

    Raises OSError, ValueError for what is no message; nothing is open then that came along.
    """
    # Not socket.recv_fds: it takes flags and ignores them (CPython 3.11).
    head, rows, flags, _ = channel.recvmsg(_LENGTH.size, socket.CMSG_LEN(_MOST_FDS * _FD.size), socket.MSG_CMSG_CLOEXEC)
    rights = (data for level, kind, data in rows if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS))
    fds = [fd for data in rights for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])]
    try:
        if flags & socket.MSG_CTRUNC:
            raise ValueError(f"more than {_MOST_FDS} descriptors with a message, or none free here")
        if not head:
            close_all(fds)
            return None
        head += _exactly(channel, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > _LONGEST:
            raise ValueError(f"message of {length} bytes")
        try:
            value = json.loads(_exactly(channel, length))
        except RecursionError:
            raise ValueError("message is nested too deep") from None
        if not isinstance(value, dict):
            raise ValueError("message is no object")  # noqa: TRY004 - what came is wrong, not a caller
    except BaseException:
        close_all(fds)
        raise
    return value, fds


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that came with a message and are not wanted."""
    for fd in fds:
        os.close(fd)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = channel.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionResetError("the other side closed in the middle of a message")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def error_message(error: DsecError) -> Message:
    """The message that carries ``error``."""
    value = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": value | ({"code": error.code} if isinstance(error, errors.ImageError) else {})}


def error_from(value: Message) -> DsecError:
    """The error that a message carries."""
    kind = getattr(errors, str(value.get("type")), DsecError)
    if not (isinstance(kind, type) and issubclass(kind, DsecError)):
        kind = DsecError
    hint = value.get("hint")
    found = kind(str(value.get("message")), hint=str(hint) if hint else None)
    if isinstance(found, errors.ImageError) and value.get("code") in tuple(errors.ImageCode):
        found.code = errors.ImageCode(value["code"])
    return found
