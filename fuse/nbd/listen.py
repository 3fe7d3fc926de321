"""Listening sockets: a Unix socket that only its owner may use, or a TCP port that does not leave the machine by accident."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path

from dsec_layers.errors import Conflict, HostError, UsageError
from dsec_layers.linux import unixsocket
from dsec_layers.linux.unixsocket import remove_socket, socket_identity

__all__ = ["listen_tcp", "listen_unix", "remove_socket", "socket_identity"]

_BACKLOG = 128
_MAX_PATH = 107


def listen_unix(path: Path) -> socket.socket:
    """A listening socket at ``path``, as linux/unixsocket.py makes them. UsageError for a path that NBD's clients could not name."""
    if len(os.fsencode(path)) > _MAX_PATH:
        raise UsageError(
            f"the path of a Unix socket has at most {_MAX_PATH} bytes: {path}", hint="choose a shorter one: clients have no way around it"
        )
    return unixsocket.listen_unix(path)


def listen_tcp(host: str, port: int, *, anywhere: bool) -> socket.socket:
    """A listening TCP socket. An address that other machines can reach raises UsageError unless ``anywhere``."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host!r}, port {port}: {error}") from error
    if not anywhere and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise UsageError(
            f"{host} can be reached from other machines, and NBD without TLS has neither secrecy nor a password",
            hint="require TLS, or listen on 127.0.0.1 or a Unix socket",
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"another server listens on {host}, port {port}") from error
        raise HostError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return sock
