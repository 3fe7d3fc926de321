"""TLS settings of a server: X.509 certificates on every Python, pre-shared keys from Python 3.13 on.

The files are those of GnuTLS's tools, which QEMU, libnbd and nbdkit use as well: ca-cert.pem, server-cert.pem and server-key.pem in a directory,
and key files with one ``user:hex`` a line.
"""

from __future__ import annotations

import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from dsec_layers.errors import HostError, UsageError
from dsec_layers.fuse.nbd.negotiation import TlsMode

__all__ = ["Tls", "read_keys"]

_MIN_KEY = 16


@dataclass(frozen=True, slots=True)
class Tls:
    """How a server uses TLS.

    ``mode`` on: clients may; require: clients must. ``certificate`` and ``key`` are PEM files; with ``client_ca`` clients have to show a certificate
    that it signed. ``keys``, instead of certificates, is a file of pre-shared keys and needs Python 3.13.
    """

    mode: TlsMode = TlsMode.REQUIRE
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    keys: Path | None = None

    @classmethod
    def from_directory(cls, directory: Path, *, mode: TlsMode = TlsMode.REQUIRE, verify_peer: bool = False) -> Tls:
        """The settings for a directory laid out as GnuTLS users lay it out."""
        ca = directory / "ca-cert.pem" if verify_peer else None
        return cls(mode, directory / "server-cert.pem", directory / "server-key.pem", ca)

    def context(self) -> ssl.SSLContext:
        """The context for connections. Raises UsageError for files that do not fit, HostError where this Python cannot do it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        if (self.certificate is None) == (self.keys is None):
            raise UsageError("TLS needs either a certificate or a file of pre-shared keys")
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise UsageError(f"TLS: {self.certificate}, {self.key}, {self.client_ca}: {error}") from error
        if self.keys is not None:
            _use_keys(context, read_keys(self.keys))
        return context


def read_keys(path: Path) -> dict[str, bytes]:
    """The keys by user from a file of ``user:hex`` lines. Raises UsageError for a malformed line or a key of less than 16 bytes."""
    keys = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"pre-shared keys {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        user, separator, digits = line.strip().rpartition(":")
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if not separator or not user or len(key) < _MIN_KEY:
            raise UsageError(f"pre-shared keys {path}, line {number}: expected user:hex with at least {_MIN_KEY} bytes")
        keys[user] = key
    if not keys:
        raise UsageError(f"pre-shared keys {path}: there is none")
    return keys


def _use_keys(context: ssl.SSLContext, keys: dict[str, bytes]) -> None:
    if sys.version_info < (3, 13):
        raise HostError(
            f"TLS with pre-shared keys needs Python 3.13 or later, this is {sys.version_info.major}.{sys.version_info.minor}",
            hint="use certificates, or run on Python 3.13",
        )
    else:
        if not ssl.HAS_PSK:
            raise HostError("TLS with pre-shared keys: this Python's OpenSSL was built without them")
        context.set_psk_server_callback(lambda user: keys.get(user or "", b""))
        context.set_ciphers("kECDHEPSK+CHACHA20:kECDHEPSK+AES")  # for TLS 1.2; with forward secrecy, as 1.3 always has it
