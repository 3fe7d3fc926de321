"""Certificates and keys for tests, made by the openssl command and laid out as GnuTLS users lay them out."""

from __future__ import annotations

from pathlib import Path

from dsec_layers.proc import run

__all__ = ["make_certificates"]

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def make_certificates(folder: Path) -> None:
    """ca-cert.pem; server-cert.pem and server-key.pem for localhost; client-cert.pem and client-key.pem, all signed by that CA."""
    _make(folder, "ca", "keyUsage=critical,keyCertSign,cRLSign")
    signed = ("-CA", str(folder / "ca-cert.pem"), "-CAkey", str(folder / "ca-key.pem"), "-addext", "basicConstraints=critical,CA:FALSE")
    _make(folder, "server", "subjectAltName=DNS:localhost,IP:127.0.0.1", *signed)
    _make(folder, "client", "extendedKeyUsage=clientAuth", *signed)


def _make(folder: Path, name: str, extension: str, *more: str) -> None:
    files = ("-keyout", str(folder / f"{name}-key.pem"), "-out", str(folder / f"{name}-cert.pem"))
    run(["openssl", "req", "-x509", *_CURVE, "-subj", f"/CN=test {name}", "-addext", extension, *more, *files])
