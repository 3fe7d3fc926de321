"""How often the headers of an input are looked at: once for its content, and as few times as can be to tell what it is."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import pytest

from dsec_layers.builders.pack.output import SegmentBuffer
from dsec_layers.builders.pack.sink import PackSink
from dsec_layers.builders.sources import header, oci
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.detect import detect
from dsec_layers.builders.sources.header import is_header
from dsec_layers.errors import CorruptError, LimitError
from dsec_layers.progress import SILENT
from tests.kit.oracle import MemorySink
from tests.kit.tars import file, make_tar, node

FILES = make_tar(*(file(f"f{number}") for number in range(50)))
LAYER = make_tar(*(file(f"f{number}") for number in range(20)))


class Headers:
    """Counts the headers that tar readers look at; the zeros at the end of an archive are one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = 0
        monkeypatch.setattr(header, "is_header", self._is_header)

    def _is_header(self, buffer: bytes, at: int) -> bool:
        self.seen += 1
        return is_header(buffer, at)

    def during(self, step: Callable[[], object]) -> int:
        """How many one step looks at."""
        before = self.seen
        step()
        return self.seen - before


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> Headers:
    return Headers(monkeypatch)


def docker_archive(*layers: bytes) -> bytes:
    """What ``docker save`` writes, with as many files as layers and two more."""
    diff_ids = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": diff_ids}}).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    names = [f"{number:064x}.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": name, "Layers": names, "RepoTags": None}]).encode()
    return make_tar(
        file(name, config),
        *(file(name, layer) for name, layer in zip(names, layers, strict=True)),
        file("manifest.json", manifest),
    )


def ingest(place: Path | BinaryIO, kind: str) -> None:
    source = detect(place)
    source.ingest(MemorySink())
    assert source.kind == kind


def test_headers_of_files_are_walked_once(tmp_path: Path, headers: Headers) -> None:
    path = tmp_path / "files.tar"
    path.write_bytes(FILES)
    places: list[Callable[[], Path | BinaryIO]] = [
        lambda: path, lambda: io.BytesIO(FILES), lambda: io.BytesIO(gzip.compress(FILES)),
    ]  # fmt: skip
    for place in places:
        assert headers.during(partial(detect, place())) == 1  # its name is none that images have
        assert headers.during(partial(ingest, place(), "tar")) == 1 + 50 + 1


def test_headers_of_an_image_are_walked_once(tmp_path: Path, headers: Headers) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(docker_archive(LAYER))
    assert headers.during(lambda: detect(path)) == 3 + 1
    assert headers.during(lambda: ingest(path, "docker")) == 3 + 1 + 20 + 1
    # Whether to spool it is told by the first 64 KiB, which are all of it here.
    assert headers.during(lambda: detect(io.BytesIO(path.read_bytes()))) == 2 * (3 + 1)


def test_more_names_like_an_image_s_than_any_image_has_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "MAX_MEMBERS", 10)
    path = tmp_path / "files.tar"
    path.write_bytes(make_tar(*(file(f"{number:064x}") for number in range(11))))
    ingest(path, "tar")
    with pytest.raises(LimitError, match="no image is like that"):
        detect(path, kind="docker")


def test_a_layer_is_verified_whole_once_and_its_stored_bytes_each_time(tmp_path: Path) -> None:
    """Packing again, when a segment of another layer is gone, ingests an image again."""
    path = tmp_path / "image.tar"
    path.write_bytes(docker_archive(make_tar(node("null", b"3")), make_tar(file("data", b"good content"))))
    progress = Mock(wraps=SILENT)
    source = detect(path)
    trees = [[name for name, _ in source.ingest(MemorySink(), progress).walk()] for _ in range(2)]
    assert trees[0] == trees[1] == [b"", b"data", b"null"]
    assert progress.warning.call_count == 1  # of the device 0/0
    path.write_bytes(path.read_bytes().replace(b"good", b"evil"))
    with pytest.raises(CorruptError, match="layer 2 of 2 does not match its digest"):
        source.ingest(MemorySink())


def test_numbers_that_are_alike_are_one_object() -> None:
    """An int costs 32 bytes, as much as an inode of the image."""

    class Output:
        def acquire(self, capacity: int) -> SegmentBuffer:
            return SegmentBuffer(capacity)

        def submit(self, buffer: SegmentBuffer, size: int) -> None:
            pass

    entries = [file(name, name.encode() * 1000, mode=0o4755, uid=100_000, gid=100_001, mtime=1_700_000_000) for name in ("a", "b")]
    tree = TarSource(io.BytesIO(make_tar(*entries))).ingest(PackSink(Output()))
    assert tree.root.children is not None
    one, other = tree.root.children.values()
    assert (one.mode, one.size) == (stat.S_IFREG | 0o4755, 1000)
    for name in ("mode", "uid", "gid", "mtime", "size"):
        assert getattr(one, name) is getattr(other, name), name
