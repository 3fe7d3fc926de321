"""Disks and the store: commit, branch, merge, convert; pieces verified; the store away; manifests that are hostile."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsec_layers.api.diskconvert import convert, merge, seal
from dsec_layers.api.disks import branch, commit, create, info, resize, snapshot, verify
from dsec_layers.api.environment import gc, pull, push, rm
from dsec_layers.api.environment import verify as verify_refs
from dsec_layers.api.look import inspect, ls
from dsec_layers.api.session import Session
from dsec_layers.cache.fetch import FetchLimits
from dsec_layers.cache.flat import FlatImage, PieceSource
from dsec_layers.descriptors import Descriptors
from dsec_layers.digest import content_digest
from dsec_layers.disks.opener import private_pieces
from dsec_layers.disks.place import find_disk, opened
from dsec_layers.disks.state import Parent, read_state
from dsec_layers.errors import Conflict, CorruptError, DsecError, ImageError, StoreError, UsageError
from dsec_layers.layers.disk import DISK, PIECE_SIZE, DiskConfig, DiskImage, pack_pieces, parse_pieces
from dsec_layers.layers.manifest import parse_disk, parse_object
from dsec_layers.registry.objects import load_disk, resolve, resolve_any
from dsec_layers.segment import Segment
from dsec_layers.store.open import open_store
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes
from tests.kit.disks_kit import MIB, content, noise, quiet_session, sealed_content
from tests.kit.store_faulty import Fault, FaultyStore

QUICK = FetchLimits(fetches=4, deadline=0.5, pause=0.01, longest_pause=0.05, bad_answers=2)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with quiet_session(tmp_path, monkeypatch) as made:
        yield made


def write(session: Session, path: Path, *parts: tuple[int, bytes]) -> None:
    with opened(session, path) as disk:
        for offset, data in parts:
            disk.disk.pwrite(offset, data)


def read(session: Session, path: Path) -> bytes:
    with opened(session, path) as disk:
        return content(disk.disk)


@pytest.mark.parametrize("format", ["zfile", "zfile-zstd", "lsmt"])
def test_commit_branch_and_commit_again(session: Session, tmp_path: Path, format: str) -> None:
    one, model = tmp_path / "one", bytearray(2 * MIB)
    create(session, one, size=2 * MIB)
    parts = [(0, noise(1, 600_064)), (MIB, b"text" * 4096)]
    write(session, one, *parts)
    for offset, data in parts:
        model[offset : offset + len(data)] = data
    first = commit(session, one, "d:1", format=format)
    assert (first.layers, first.virtual_size, info(one).parent) == (1, 2 * MIB, first.digest)
    assert sealed_content(session, "d:1") == model == read(session, one)
    assert commit(session, one, "d:same").digest != first.digest  # the name is part of it
    assert find_disk(session.store, "d:same")[1].layers == find_disk(session.store, "d:1")[1].layers
    paths = [tmp_path / "a", tmp_path / "b"]
    branch(session, "d:1", paths)
    for number, path in enumerate(paths):
        write(session, path, (4096, noise(10 + number, 512)))
    write(session, paths[1], (MIB, bytes(4096)))
    assert read(session, paths[0])[4096:4608] == noise(10, 512) and read(session, one) == model
    second = commit(session, paths[1], "d:2", format=format)
    model[4096:4608] = noise(11, 512)
    model[MIB : MIB + 4096] = bytes(4096)
    assert second.layers == 2 and second.stored_bytes < first.stored_bytes
    assert sealed_content(session, "d:2") == model == read(session, paths[1])
    uuids = [layer.uuid for layer in find_disk(session.store, "d:2")[1].layers]
    assert len(set(uuids)) == 2


def test_snapshot_then_commit_makes_one_layer(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    for number in range(3):
        write(session, tmp_path / "d", (number * 512, noise(number, 1024)))
        assert len(snapshot(tmp_path / "d").frozen) == number + 1
    assert commit(session, tmp_path / "d", "d:1").layers == 1
    assert read_state(tmp_path / "d").frozen == ()
    want = noise(0, 512) + noise(1, 512) + noise(2, 1024)
    assert sealed_content(session, "d:1")[:2048] == want == read(session, tmp_path / "d")[:2048]


def test_an_empty_disk_can_be_committed(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    commit(session, tmp_path / "d", "d:1")
    assert sealed_content(session, "d:1") == bytes(MIB)


def test_a_larger_disk_on_a_sealed_one(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    write(session, tmp_path / "d", (0, noise(1, MIB)))
    commit(session, tmp_path / "d", "d:1")
    assert resize(tmp_path / "d", 2 * MIB).virtual_size == 2 * MIB
    assert resize(tmp_path / "d", 2 * MIB).virtual_size == 2 * MIB
    for size in (MIB, 3 * MIB + 1):
        with pytest.raises(UsageError):
            resize(tmp_path / "d", size)
    commit(session, tmp_path / "d", "d:2")
    create(session, tmp_path / "e", parent="d:1", size=2 * MIB)
    commit(session, tmp_path / "e", "e:1")
    for name in ("d:2", "e:1"):
        assert sealed_content(session, name) == noise(1, MIB) + bytes(MIB)
    with pytest.raises(UsageError):
        create(session, tmp_path / "f", parent="d:2", size=MIB)


def test_merge_reads_the_same(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    for number in range(4):
        write(session, tmp_path / "d", (number * 100 * 512, noise(number, 70_144)))
        with opened(session, tmp_path / "d") as disk:
            disk.disk.trim(number * 4096, 1024)
        commit(session, tmp_path / "d", f"d:{number}")
    want = sealed_content(session, "d:3")
    for keep, layers in ((0, 1), (1, 2), (3, 4)):
        assert merge(session, "d:3", f"m:{keep}", keep=keep).layers == layers
        assert sealed_content(session, f"m:{keep}") == want
    for keep in (4, -1):
        with pytest.raises(UsageError):
            merge(session, "d:3", "m:x", keep=keep)


@pytest.mark.parametrize("to", ["raw", "overlaybd", "oci"])
def test_convert_out_and_in_again(session: Session, tmp_path: Path, to: str) -> None:
    create(session, tmp_path / "d", size=MIB)
    for number in range(2):
        write(session, tmp_path / "d", (number * 8192, noise(number, 12_288)))
        commit(session, tmp_path / "d", f"d:{number}")
    write(session, tmp_path / "d", (500 * 1024, b"local" * 1024))
    want = read(session, tmp_path / "d")
    out = tmp_path / "out"
    done = convert(session, str(tmp_path / "d"), out, to=to)
    assert done.virtual_size == MIB
    if to == "raw":
        assert out.read_bytes() == want
    made = seal(session, str(out / "config.v1.json" if to == "overlaybd" else out), "back:1")
    assert sealed_content(session, "back:1") == want and made.layers == (1 if to == "raw" else 3)
    if to != "raw":  # the very same blobs
        assert load_disk(session.store, made.digest).layers[:2] == find_disk(session.store, "d:1")[1].layers
    with pytest.raises(Conflict):
        convert(session, "d:1", out, to=to)


def test_the_same_raw_file_gives_the_same_disk(session: Session, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(noise(1, 300_032) + bytes(300_032) + noise(2, 512))
    digests = {find_disk(session.store, seal(session, str(raw), f"r:{n}").name)[1].layers for n in range(2)}
    assert len(digests) == 1 and sealed_content(session, "r:0") == raw.read_bytes()


def test_a_raw_file_of_odd_size_is_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"x" * 100)
    with pytest.raises(DsecError, match="sectors"):
        seal(session, str(tmp_path / "raw"), "r:1")


def test_an_oci_blob_that_is_not_what_the_manifest_says_is_refused(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    write(session, tmp_path / "d", (0, noise(1, 4096)))
    out = tmp_path / "oci"
    convert(session, str(tmp_path / "d"), out, to="oci")
    blob = max((out / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[1536 + 600] ^= 1  # in the first block of the ZFile
    blob.write_bytes(data)
    with pytest.raises(DsecError):
        seal(session, str(out), "bad:1")
    with pytest.raises(DsecError):
        find_disk(session.store, "bad:1")


def test_push_pull_verify_and_collection_know_disks(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    write(session, tmp_path / "d", (0, noise(1, 700_416)))
    digest = commit(session, tmp_path / "d", "d:1").digest
    other = str(tmp_path / "other")
    assert push(session, "d:1", other).copied == 3 and push(session, "d:1", other).copied == 0
    assert pull(session, "d:1", other, name="e:1").digest == digest
    assert [(row.name, row.kind) for row in ls(session)] == [("d:1", "disk"), ("e:1", "disk")]
    assert inspect(session, "d:1").layers[0].counts == {"layers": 1, "bytes": MIB}
    assert [report.problems for report in verify_refs(session, deep=True)] == [(), ()]
    for call in (lambda: resolve(session.store, "d:1"), lambda: inspect(session, "d:1", tree=True)):
        with pytest.raises(UsageError, match="is a disk"):
            call()
    gc(session, grace=0, force=True)
    assert sealed_content(session, "d:1")[:700_416] == noise(1, 700_416)
    for name in ("d:1", "e:1"):
        rm(session, name)
    assert len(gc(session, grace=0, force=True).deleted) == 4


def test_a_disk_moves_to_another_store_with_its_next_commit(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(session, tmp_path / "d", size=MIB)
    write(session, tmp_path / "d", (0, noise(1, 4096)))
    commit(session, tmp_path / "d", "d:1")
    write(session, tmp_path / "d", (4096, noise(2, 4096)))
    with Session(tmp_path / "other", tmp_path / "cache2") as other:
        assert commit(other, tmp_path / "d", "d:2").layers == 2
        assert sealed_content(other, "d:2")[:8192] == noise(1, 4096) + noise(2, 4096)
    assert read_state(tmp_path / "d").parent == Parent(
        open_store(str(tmp_path / "other")).url, resolve_any(open_store(str(tmp_path / "other")), "d:2")[0]
    )


def test_deep_verify_finds_a_flipped_bit_and_a_wrong_list(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    write(session, tmp_path / "d", (0, noise(1, 700_416)))
    commit(session, tmp_path / "d", "d:1", format="lsmt")
    assert verify(session, tmp_path / "d").problems == ()
    store, layer = session.store, find_disk(session.store, "d:1")[1].layers[0]
    assert isinstance(store, PosixStore)
    path = store.local_path(layer.blob.digest)
    path.chmod(0o644)
    with open(path, "r+b") as stream:
        stream.seek(400_000)
        byte = stream.read(1)
        stream.seek(400_000)
        stream.write(bytes([byte[0] ^ 1]))
    assert verify_refs(session, ["d:1"])[0].problems == ()
    assert "do not match" in verify_refs(session, ["d:1"], deep=True)[0].problems[0]
    assert verify(session, tmp_path / "d").problems
    with pytest.raises(CorruptError):
        sealed_content(session, "d:1")


def test_a_wrong_byte_from_the_store_never_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads wait for a good answer; when there is none within the deadline they fail; writes go on all the while."""
    faulty = FaultyStore(open_store(str(tmp_path / "store")))
    with quiet_session(tmp_path, monkeypatch, lambda url: faulty, QUICK) as session:
        create(session, tmp_path / "d", size=4 * MIB)
        write(session, tmp_path / "d", (0, noise(1, 2 * MIB)))
        commit(session, tmp_path / "d", "d:1", format="lsmt")
        with opened(session, tmp_path / "d") as disk:
            faulty.add(Fault("read", error=StoreError("away"), times=3))
            assert disk.disk.pread(0, 4096) == noise(1, 2 * MIB)[:4096]  # after three attempts
            fault = faulty.add(Fault("read", error=StoreError("away")))
            outcome: list[DsecError] = []

            def reader() -> None:
                try:
                    disk.disk.pread(MIB, 4096)
                except DsecError as error:
                    outcome.append(error)

            thread = threading.Thread(target=reader)
            thread.start()
            disk.disk.pwrite(MIB, noise(2, 4096))
            disk.disk.flush()
            disk.disk.write_zeroes(MIB + 8192, 4096)
            assert disk.disk.pread(MIB, 4096) == noise(2, 4096)
            thread.join()
            assert all("away" in error.message for error in outcome)  # it read before the write, or after it
            with pytest.raises(StoreError):
                disk.disk.pread(MIB + PIECE_SIZE, 4096)
            disk.snapshot()
            faulty.clear()
            assert fault is not None
            assert disk.disk.pread(MIB + PIECE_SIZE, 4096) == noise(1, 2 * MIB)[MIB + PIECE_SIZE :][:4096]


def test_pieces_lists() -> None:
    digests = [bytes([number]) * 32 for number in range(3)]
    size = 2 * PIECE_SIZE + 1
    data = pack_pieces(size, digests)
    assert parse_pieces(data, size) == digests
    for bad, of in (
        (data, size + PIECE_SIZE),
        (data, size - 1),
        (data[:-1], size),
        (data + b"x", size),
        (b"", size),
        (b"X" + data[1:], size),
    ):
        with pytest.raises(ImageError):
            parse_pieces(bad, of)


def test_hostile_manifests(session: Session, tmp_path: Path) -> None:
    create(session, tmp_path / "d", size=MIB)
    digest = commit(session, tmp_path / "d", "d:1").digest
    good = json.loads(load_disk(session.store, digest).to_json())
    assert isinstance(parse_object(json.dumps(good).encode()), DiskImage) and good["artifactType"] == DISK
    layers = good["layers"]
    changes: list[dict[str, object]] = [
        {"layers": []}, {"layers": layers[:1]}, {"layers": layers[::-1]}, {"layers": layers * 300}, {"layers": 3}, {"config": layers[0]}, {"schemaVersion": 1},
        {"layers": [layers[0], {**layers[1], "size": 7}]}, {"layers": [{**layers[0], "size": -1}, layers[1]]}, {"layers": [{**layers[0], "digest": "x"}, layers[1]]},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ImageError):
            parse_disk(json.dumps(good | change).encode())


@pytest.mark.parametrize(
    "value", [{}, [], {"format": 2, "virtual_size": 512}, {"format": 1}, {"format": 1, "virtual_size": 100}, {"format": 1, "virtual_size": "512"},
              {"format": 1, "virtual_size": True}, {"format": 1, "virtual_size": 512, "name": 3}, {"format": 1, "virtual_size": 512, "recipe": []}],
)  # fmt: skip
def test_hostile_configs(value: object) -> None:
    with pytest.raises(ImageError):
        DiskConfig.parse(json.dumps(value).encode())


def test_piece_sources_read_like_their_bytes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    sizes = [PIECE_SIZE, 4096, 1, 70_000, PIECE_SIZE]
    data = noise(1, sum(sizes))
    info_, pieces, at = put_bytes(store, data), [], 0
    for size in sizes:
        pieces.append(Segment(content_digest(data[at : at + size]), size, store.url, info_.digest, at, size, "raw"))
        at += size
    image = noise(2, 5000)
    with private_pieces(tmp_path / "cache", lambda url: store) as opener:
        kept = Descriptors[bytes](2)
        source, flat = PieceSource(pieces, opener, kept), FlatImage.spooled(image, pieces, opener, tmp_path)
        assert flat.size % 512 == 0
        whole = (image + data).ljust(flat.size, b"\0")
        random = np.random.default_rng(1)
        for _ in range(300):
            begin, end = sorted(random.integers(0, len(data) + 1, 2).tolist())
            assert source.pread(begin, end - begin) == data[begin:end]
            begin, end = sorted(random.integers(0, len(whole) + 1, 2).tolist())
            assert flat.pread(begin, end - begin) == whole[begin:end]
            sent = flat.sendable(begin, end - begin)
            if sent is not None:
                assert b"".join(os.pread(fd.__index__(), count, at) for fd, at, count in sent) == whole[begin:end]
        for begin, count in ((-1, 2), (0, len(data) + 1), (len(data), 1)):
            with pytest.raises(UsageError):
                source.pread(begin, count)
        flat.close()
        kept.close()


def test_private_caches_do_not_meet(tmp_path: Path) -> None:
    with private_pieces(tmp_path) as one, private_pieces(tmp_path) as two:
        assert one.directory.root != two.directory.root
