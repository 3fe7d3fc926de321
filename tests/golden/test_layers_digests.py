"""Pinned bytes of format version 1. A change here is a change of the format: it needs a new version, not a new digest.

Source: docs/formats/layer.md; the bytes were checked by hand against it when they were pinned.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.frames import SeekTable, skippable
from dsec_layers.layers.manifest import FOREIGN, Environment, Layer, LayerConfig
from dsec_layers.layers.tables import CHUNK, SEGMENT, pack_chunks, pack_segments

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def test_segment_table_bytes() -> None:
    table = np.array([(bytes(range(32)), 8192, 1, 77, 999, 0)], SEGMENT)
    header = b"DSEG" + struct.pack("<HHIQ", 1, 56, 1, 0)
    assert pack_segments(table) == header + bytes(range(32)) + struct.pack("<IIQII", 8192, 1, 77, 999, 0)


def test_chunk_table_bytes() -> None:
    table = np.array([(b"\x02" * 32, 7, 16, 2, 4097), (b"\x01" * 32, 3, 0, 1, 1)], CHUNK)
    header = b"DCHK" + struct.pack("<HHIQ", 1, 48, 2, 0)
    assert pack_chunks(table) == header + b"\x01" * 32 + struct.pack("<IIII", 3, 0, 1, 1) + b"\x02" * 32 + struct.pack(
        "<IIII", 7, 16, 2, 4097
    )


def test_frame_bytes() -> None:
    assert skippable(b"abc") == bytes.fromhex("502a4d18 03000000") + b"abc"
    table = SeekTable()
    table.add_checksum(5, 6, 0x1234_5678_9ABC_DEF0)
    assert table.frame() == bytes.fromhex("5e2a4d18 15000000 05000000 06000000 f0debc9a 01000000 80 b1ea928f")


def test_manifest_digests() -> None:
    layer = Layer(
        Kind.BASE,
        Descriptor(d.CONFIG, A, 1),
        Descriptor(d.METADATA, B, 2),
        Descriptor(d.CHUNKS, A, 3),
        (Descriptor(d.SEGMENTS, B, 4), Descriptor(d.SEGMENTS, A, 5, {FOREIGN: "true"})),
    )
    environment = Environment(((Kind.BASE, Descriptor(d.MANIFEST, A, 6)), (Kind.TOOLKIT, Descriptor(d.MANIFEST, B, 7))))
    config = LayerConfig(Kind.BASE, "é", env={"B": "1", "A": "2"}, counts={"inodes": 3}, recipe={"z": [1], "a": None})
    assert layer.to_json() == (
        b'{"annotations":{"dev.dsec.kind":"base"},"artifactType":"application/vnd.dsec.layer.v1",'
        b'"config":{"digest":"' + A.encode() + b'","mediaType":"application/vnd.dsec.layer.config.v1+json","size":1},'
        b'"layers":[{"digest":"' + B.encode() + b'","mediaType":"application/vnd.dsec.layer.metadata.v1+zstd","size":2},'
        b'{"digest":"' + A.encode() + b'","mediaType":"application/vnd.dsec.layer.chunks.v1+zstd","size":3},'
        b'{"digest":"' + B.encode() + b'","mediaType":"application/vnd.dsec.layer.segments.v1+zstd","size":4},'
        b'{"annotations":{"dev.dsec.foreign":"true"},"digest":"'
        + A.encode()
        + b'","mediaType":"application/vnd.dsec.layer.segments.v1+zstd","size":5}],'
        b'"mediaType":"application/vnd.oci.image.manifest.v1+json","schemaVersion":2}'
    )
    digests = [hashlib.sha256(value.to_json()).hexdigest()[:16] for value in (layer, environment, config)]
    assert digests == ["e81e5e6348a8bf70", "a8ab877d5576b075", "6eedd503fb9f50b5"]
