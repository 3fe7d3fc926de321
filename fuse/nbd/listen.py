"""Listening sockets: a Unix socket that only its owner may use, or a TCP port that does not leave the machine by accident."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from pathlib import Path

from dsec_layers.errors import Conflict, HostError, UsageError

__all__ = ["listen_tcp", "listen_unix", "remove_socket", "socket_identity"]

_BACKLOG = 128
_MAX_PATH = 107
_PROBE_SECONDS = 1.0


def listen_unix(path: Path) -> socket.socket:
    """A listening socket at ``path``, mode 0600. A socket that a dead server left there is replaced, a living one's raises Conflict."""
    if len(os.fsencode(path)) > _MAX_PATH:
        raise UsageError(f"the path of a Unix socket has at most {_MAX_PATH} bytes: {path}")
    _clear_way(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        path.chmod(0o600)  # before listen(): until then nobody can connect
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"{path} was taken by another server just now") from error
        raise HostError(f"cannot listen on {path}: {error.strerror}") from error
    return sock


def _clear_way(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing there, or nothing that can be looked at: bind() says what is wrong
    if not stat.S_ISSOCK(mode):
        raise Conflict(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise Conflict(f"{path} is in use: {error.strerror or error}") from error
    raise Conflict(f"another server listens on {path}")


def socket_identity(path: Path) -> tuple[int, int]:
    """What tells a socket from another one that was put in its place."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def remove_socket(path: Path, identity: tuple[int, int]) -> None:
    """Remove the name of a listening socket, unless another server has put its own there meanwhile."""
    try:
        if socket_identity(path) == identity:
            path.unlink()
    except OSError:
        pass


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
