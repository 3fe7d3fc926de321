"""NBD front end: block sources for QEMU, nbd-client, libnbd and everything else that speaks NBD.

Face::

    protocol  NBD_STATE_HOLE, NBD_STATE_ZERO
"""

from __future__ import annotations

from dsec_layers.fuse.nbd.captive import run_captive
from dsec_layers.fuse.nbd.exports import Export, ExtentSource, Piece, PrefetchSource, Sendable
from dsec_layers.fuse.nbd.files import LocalDisk, LocalFile
from dsec_layers.fuse.nbd.negotiation import TlsMode
from dsec_layers.fuse.nbd.server import Server, serve
from dsec_layers.fuse.nbd.tls import Tls
from dsec_layers.fuse.nbd.transmission import Limits

__all__ = [
    "Export",
    "ExtentSource",
    "Limits",
    "LocalDisk",
    "LocalFile",
    "Piece",
    "PrefetchSource",
    "Sendable",
    "Server",
    "Tls",
    "TlsMode",
    "run_captive",
    "serve",
]
