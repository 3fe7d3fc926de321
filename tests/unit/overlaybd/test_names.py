"""The JSON and OCI side of OverlayBD, and the block sources it stands on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsec_layers.blocksource import BytesSource, FileSource, MemoryDisk, SliceSource
from dsec_layers.errors import CorruptError, ImageError, StoreError, UsageError
from dsec_layers.oci import Descriptor, descriptor_json
from dsec_layers.overlaybd.config import ImageConfig, LowerConfig, UpperConfig, blob_url, lower_paths, parse_config, render_config
from dsec_layers.overlaybd.oci import BlobInfo, blob_info, chain_uuid, layer_descriptor

DIGEST = "sha256:" + "c3" * 32

SNAPSHOTTER: dict[str, Any] = {
    "repoBlobUrl": "https://registry.test/v2/app/blobs",
    "lowers": [
        {"file": "/opt/overlaybd/baselayers/.commit", "dir": ""},
        {"digest": DIGEST, "size": 4737695, "dir": "/var/lib/overlaybd/snapshots/7/block"},
        {"file": "/f/ext4.fs.meta", "targetFile": "/f/layer.tar", "targetDigest": DIGEST, "gzipIndex": "/f/gzip.meta"},
    ],
    "upper": {"index": "/s/writable_index", "data": "/s/writable_data", "vsize": 64},
    "resultFile": "/s/init-debug.log",
    "download": {"enable": True, "delay": 600, "maxMBps": 100},
    "accelerationLayer": True,
    "recordTracePath": "/s/trace",
}


def test_configuration_of_the_snapshotter() -> None:
    config = parse_config(json.dumps(SNAPSHOTTER).encode())
    assert config.lowers[1] == LowerConfig(digest=DIGEST, size=4737695, dir="/var/lib/overlaybd/snapshots/7/block")
    assert config.lowers[2].gzip_index == "/f/gzip.meta"
    assert config.upper == UpperConfig(index="/s/writable_index", data="/s/writable_data", vsize=64)
    assert (config.result_file, config.acceleration_layer, config.record_trace_path) == ("/s/init-debug.log", True, "/s/trace")
    assert config.download["delay"] == 600
    again = json.loads(render_config(config))
    assert again == {**SNAPSHOTTER, "lowers": [{"file": "/opt/overlaybd/baselayers/.commit"}, *SNAPSHOTTER["lowers"][1:]]}


def test_configuration_of_agentenv_and_unknown_keys() -> None:
    given = {
        "lowers": [
            {
                "digest": DIGEST,
                "size": 1,
                "uuid": "c02fb491-b4d4-4904-8684-a014d032af78",
                "repoBlobUrl": "https://other.test/blobs/",
                "new": [1],
            }
        ],
        "upper": {"data": "/d", "mode": "sparse", "future": {"x": None}},
        "download": {"concurrency": 8},
        "somethingElse": 1.5,
    }
    config = parse_config(json.dumps(given).encode())
    assert config.upper is not None and config.upper.mode == "sparse"
    assert (config.extra, config.upper.extra, config.lowers[0].extra) == ({"somethingElse": 1.5}, {"future": {"x": None}}, {"new": [1]})
    assert blob_url(config, config.lowers[0]) == "https://other.test/blobs/" + DIGEST
    assert json.loads(render_config(config)) == {**given, "repoBlobUrl": "", "resultFile": ""}


def test_go_writes_an_empty_upper_for_none() -> None:
    config = parse_config(b'{"repoBlobUrl":"","lowers":null,"upper":{},"resultFile":""}')
    assert config == ImageConfig()
    assert json.loads(render_config(config)) == {"repoBlobUrl": "", "lowers": [], "resultFile": ""}


def test_where_a_lower_is_looked_for() -> None:
    assert lower_paths(LowerConfig(file="/a", dir="/b")) == ("/a",)
    assert lower_paths(LowerConfig(dir="/b")) == ("/b/overlaybd.commit", "/b/.commit", "/b/overlaybd.sealed")
    assert lower_paths(LowerConfig(digest=DIGEST)) == ()
    assert blob_url(ImageConfig(repo_blob_url="https://r.test/blobs"), LowerConfig(digest=DIGEST)) == "https://r.test/blobs/" + DIGEST
    assert blob_url(ImageConfig(), LowerConfig(digest=DIGEST)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"lowers": [{"size": -1}]},
        {"lowers": [{"size": True}]},
        {"lowers": [{"file": 1}]},
        {"lowers": [{}] * 256},
        {"accelerationLayer": "yes"},
        {"download": []},
    ],
)
def test_values_of_a_wrong_kind(change: dict[str, Any]) -> None:
    with pytest.raises(ImageError):
        parse_config(json.dumps({**SNAPSHOTTER, **change}).encode())


# OCI


def test_descriptor_of_the_base_layer() -> None:
    blob = BlobInfo("sha256:c3a417552a6cf9ffa959b541850bab7d7f08f4255425bf8b48c85f7b36b378d9", 4737695)
    descriptor = layer_descriptor(blob)
    assert descriptor_json(descriptor) == {
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": blob.digest,
        "size": 4737695,
        "annotations": {
            "containerd.io/snapshot/overlaybd/blob-digest": blob.digest,
            "containerd.io/snapshot/overlaybd/blob-size": "4737695",
            "containerd.io/snapshot/overlaybd/version": "0.1.0",
        },
    }
    assert blob_info(descriptor) == blob
    assert not blob.is_turbo


def test_turbo_descriptors_old_and_new() -> None:
    blob = BlobInfo(DIGEST, 5, "0.1.0-turbo.ociv1", "ext4", 64, True, DIGEST, "application/vnd.oci.image.layer.v1.tar+gzip")
    descriptor = layer_descriptor(blob)
    assert blob_info(descriptor) == blob
    assert blob.is_turbo
    old = {key.replace("turbo-oci/", "fastoci/"): value for key, value in descriptor.annotations.items()}
    old["containerd.io/snapshot/overlaybd/version"] = "0.1.0-fastoci"
    found = blob_info(replace(descriptor, annotations=old))
    assert found == replace(blob, version="0.1.0-fastoci")


def test_other_layers_are_no_overlaybd() -> None:
    assert blob_info(Descriptor("", DIGEST, 5)) is None
    assert blob_info(Descriptor("", DIGEST, 5, {"org.example": "x"})) is None


@pytest.mark.parametrize("change", [{"digest": "sha256:" + "0" * 64}, {"size": 6}])
def test_descriptors_that_contradict_themselves(change: dict[str, Any]) -> None:
    with pytest.raises(ImageError):
        blob_info(replace(layer_descriptor(BlobInfo(DIGEST, 5)), **change))


def test_descriptor_arguments() -> None:
    with pytest.raises(UsageError):
        layer_descriptor(BlobInfo("md5:x", 5))
    with pytest.raises(UsageError):
        layer_descriptor(BlobInfo(DIGEST, -5))


def test_chain_uuid() -> None:
    assert chain_uuid("sha256:0123456789abcdef0123456789abcdef" + "f" * 32) == "01234567-89ab-cdef-0123-456789abcdef"
    with pytest.raises(UsageError):
        chain_uuid("0123")


# block sources


def test_sources_keep_to_their_range(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    with path.open("rb") as stream:
        file = FileSource(stream.fileno())
        for source in (file, BytesSource(bytes(range(100))), SliceSource(BytesSource(bytes(10) + bytes(range(100)) + bytes(5)), 10, 100)):
            assert source.size == 100
            assert source.pread(90, 10) == bytes(range(90, 100))
            assert source.pread(100, 0) == b""
            for offset, length in ((-1, 1), (0, -1), (91, 10), (101, 0)):
                with pytest.raises(UsageError):
                    source.pread(offset, length)
        os.truncate(path, 50)
        with pytest.raises(CorruptError, match="become shorter"):
            file.pread(0, 100)
    with pytest.raises(StoreError):
        file.pread(0, 10)  # the descriptor is closed
    with pytest.raises(UsageError):
        SliceSource(BytesSource(b"abc"), 1, 3)


def test_memory_disk() -> None:
    disk = MemoryDisk(10)
    disk.pwrite(2, b"abcdef")
    disk.write_zeroes(3, 2)
    disk.trim(6, 1)
    disk.flush()
    assert disk.pread(0, 10) == b"\0\0a\0\0d\0f\0\0"
    with pytest.raises(UsageError):
        disk.pwrite(9, b"xx")
