"""What an upper has acknowledged but not flushed: a record an index entry, handed to the kernel before the write is acknowledged.

A client whose server was killed connects to the next one and goes on. To it the disk never stopped, so its next flush must cover what the killed server had
acknowledged too, although the index entries of that were in memory only. Here they are in the kernel's page cache, which outlives the process. It does not outlive the host: then data that an
unflushed record names may be lost, as with any disk's volatile cache, and so records of another boot count for nothing.

The file is a ring: entry *n* of the index is record *n* modulo RING, 32 bytes, so that no record crosses a page and none is half written.

====== ======================================================================
bytes  what
====== ======================================================================
0-8    the number of the entry in the index file
8-24   the entry as it will stand there
24-32  XXH3-64 of the bytes before, its seed made of the boot and the upper
====== ======================================================================
"""

from __future__ import annotations

import os
from typing import Final

import xxhash

from dsec_layers.fsio import pwrite_all
from dsec_layers.linux.process import boot_id
from dsec_layers.overlaybd.lsmt import encode_entry

__all__ = ["RING", "Journal"]

RING: Final = 1 << 18
"""Entries that can be unflushed at a time."""

_RECORD: Final = 32
_BODY: Final = 24


class Journal:
    """The journal of the upper ``uuid``, in a file that the caller opened for reading and writing. One thread at a time."""

    def __init__(self, fd: int, uuid: str) -> None:
        self._fd = fd
        self._seed = xxhash.xxh3_64_intdigest(f"{boot_id()} {uuid}".encode())

    def put(self, number: int, lba: int, end: int, moffset: int, zeroed: bool) -> None:
        """Record entry ``number``, in place of what was recorded under this number before. Survives this process when it returns."""
        body = number.to_bytes(8, "little") + encode_entry(lba, end, moffset, zeroed)
        check = xxhash.xxh3_64_intdigest(body, self._seed).to_bytes(8, "little")
        pwrite_all(self._fd, body + check, number % RING * _RECORD)

    def after(self, number: int) -> bytes:
        """The entries that were recorded in this boot from ``number`` on, up to the first that is not there, as they stand in an index file."""
        ring = os.pread(self._fd, RING * _RECORD, 0)
        found = bytearray()
        for wanted in range(number, number + RING):
            at = wanted % RING * _RECORD
            body, check = ring[at : at + _BODY], ring[at + _BODY : at + _RECORD]
            if body[:8] != wanted.to_bytes(8, "little") or check != xxhash.xxh3_64_intdigest(body, self._seed).to_bytes(8, "little"):
                break
            found += body[8:]
        return bytes(found)

    def forget(self) -> None:
        """Drop all records: what they name may not be there any more."""
        os.ftruncate(self._fd, 0)
