"""Packing files into a layer: what comes out is what went in, and is what the format says."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.pack import layer as pack_module
from dsec_layers.builders.pack.chunker import CHUNK
from dsec_layers.builders.pack.sink import INLINE
from dsec_layers.digest import Buffer, content_digest
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import ImageError, InputError, LimitError, NoSpace
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.frames import Bound
from dsec_layers.layers.tables import BLOCK
from dsec_layers.progress import Progress
from dsec_layers.registry.content import open_layer
from dsec_layers.registry.objects import load_chunks, load_config, load_layer, load_metadata, resolve
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from tests.kit.pack_inputs import Files, Pieces, contents, noise, pack, text
from tests.kit.store_faulty import Fault, FaultyStore

MIB = 1 << 20

SOME: dict[str, bytes | Pieces] = {
    "empty": b"",
    "one": b"1",
    "inline": b"i" * INLINE,
    "not-inline": b"n" * (INLINE + 1),
    "block": noise(1, BLOCK),
    "chunk": noise(2, CHUNK),
    "chunk-and-a-bit": noise(2, CHUNK) + b"bit",
    "zeros": bytes(3 * CHUNK + 5),
    "dir/text": text(3, 300_000),
    "dir/again": text(3, 300_000),
    "dir/large": noise(4, 5 * MIB + 77),
    "dir/streamed": Pieces((noise(5, MIB), 10, noise(6, 70_000), 4 * CHUNK, noise(7, 3 * MIB))),
    "dir/streamed-empty": Pieces(()),
    "dir/streamed-inline": Pieces((b"ab", 5, b"c")),
}


def test_the_layer_holds_what_was_packed() -> None:
    store, files = MemoryStore(), Files(SOME)
    result = pack(store, files)
    assert contents(store, result.digest) == files.sha256()
    sizes = sum(content.size if isinstance(content, Pieces) else len(content) for content in files.files.values())
    assert result.content == sizes == result.inline + result.holes + result.within + result.against + result.unique
    assert result.against == 0 and result.within == CHUNK + 300_000 and result.holes >= 3 * CHUNK + 5 + 3 * CHUNK
    assert result.inodes == len(files.files) + 2


def test_the_tables_say_where_each_chunk_is() -> None:
    store = MemoryStore()
    result = pack(store, SOME)
    layer = load_layer(store, result.digest)
    _, segments = load_metadata(store, layer)
    chunks = load_chunks(store, layer, segments)
    opened = open_layer(store, result.digest)
    assert len(chunks) > 100
    covered = np.zeros(len(segments), np.int64)
    for record in chunks:
        segment, start, size = int(record["segment"]), int(record["block"]) * BLOCK, int(record["size"])
        data = opened.segment(segment)
        assert content_digest(data[start : start + size]) == record["digest"].tobytes()
        assert not any(data[start + size : start + int(record["blocks"]) * BLOCK])
        covered[segment] += int(record["blocks"]) * BLOCK
    assert (covered == segments["size"]).all()


def test_the_manifest_and_config_say_what_it_is() -> None:
    store = MemoryStore()
    result = pack(
        store, SOME, kind=Kind.TOOLKIT, name="tool:1", env={"A": "b"}, workdir="/w", prefix="/opt/tool", parent=f"sha256:{'a' * 64}",
        recipe=lambda: {"import": {"type": "test"}},
    )  # fmt: skip
    digest, layer = resolve(store, result.digest)
    assert digest == result.digest and layer == result.layer
    config = load_config(store, result.layer)
    assert (config.kind, config.name, config.prefix, config.workdir) == (Kind.TOOLKIT, "tool:1", "/opt/tool", "/w")
    assert config.env == {"A": "b"} and config.recipe == {"import": {"type": "test"}} and config.parent == f"sha256:{'a' * 64}"
    assert config.counts == {"inodes": result.inodes, "bytes": result.content}
    assert result.stored == sum(info.size for info in store.list() if info.digest != digest)
    assert list(store.list_refs()) == []


def segment_digests(files: dict[str, bytes]) -> set[bytes]:
    store = MemoryStore()
    return set(load_metadata(store, pack(store, files).layer)[1]["digest"].tolist())


def test_a_large_file_has_segments_of_its_own() -> None:
    large = noise(9, 6 * MIB)
    alone = segment_digests({"large": large})
    assert len(alone) > 3
    assert alone < segment_digests({"a": noise(1, 100_000), "large": large, "z": noise(2, 100_000)})


@pytest.mark.parametrize("files", [{}, {"d/e/f": b""}, {"zeros": bytes(MIB)}, {"inline": b"x"}])
def test_b9_layers_without_segments(files: dict[str, bytes]) -> None:
    store = MemoryStore()
    result = pack(store, files)
    assert contents(store, result.digest) == Files(files).sha256()
    assert result.layer.segments == () and result.layer.chunks is None and result.segments == 0
    assert {info.digest for info in store.list()} == {result.digest, result.layer.config.digest, result.layer.metadata.digest}


def test_b8_sparse_files_over_4_gib() -> None:
    store = MemoryStore()
    gib4 = 4 << 30
    probes = [0, gib4 - 1, gib4, (5 << 30) + 12345]
    parts: list[bytes | int] = []
    at = 0
    for nth, offset in enumerate(probes):
        if offset > at:
            parts.append(offset - at)
        parts.append(bytes([nth + 1]))
        at = offset + 1
    result = pack(store, {"sparse": Pieces(tuple(parts))})
    layer = open_layer(store, result.digest)
    inode = layer.tree.root.children[b"sparse"] if layer.tree.root.children else None
    assert inode is not None and inode.size == at
    offset = 0
    for piece in layer.pieces(inode):
        if not isinstance(piece, int):
            for nth, probe in enumerate(probes):
                if offset <= probe < offset + len(piece):
                    assert piece[probe - offset] == nth + 1
                    probes[nth] = -1
        offset += piece if isinstance(piece, int) else len(piece)
    assert probes == [-1] * 4
    assert result.stored < 20_000


def test_a_huge_sparse_file_has_larger_chunks_and_few_extents() -> None:
    store = MemoryStore()
    result = pack(store, {"huge": Pieces((noise(1, 10), 5 << 40, noise(2, 10)))})
    layer = open_layer(store, result.digest)
    inode = (layer.tree.root.children or {})[b"huge"]
    assert inode.chunk_bits == 23 and inode.extent_count == (inode.size - 1 >> 23) + 1
    regions = layer.regions(inode)
    assert sum(length for _, length in regions) <= 2 << 23 and result.stored < MIB


def test_an_impossible_file_is_refused_with_the_number() -> None:
    store = MemoryStore()
    with pytest.raises(LimitError, match=str((64 << 40) + 1)):
        pack(store, {"x": Pieces(((64 << 40) + 1,))})
    assert list(store.list()) == []


class Wrong(Files):
    """A source whose stream ends early."""

    def pieces(self, parts: Iterable[bytes | int]) -> Iterable[Buffer | int]:
        return list(parts)[:-1]


def test_b1_metadata_that_no_reader_would_take_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(pack_module, "METADATA_BOUND", Bound(4 << 30, 1000, 1))
    with pytest.raises(LimitError, match="a reader takes"):
        pack(store, {f"{number:04}": b"" for number in range(1000)})
    assert list(store.list()) == []


def test_a_source_that_breaks_off_publishes_nothing() -> None:
    store = MemoryStore()
    with pytest.raises(InputError):
        pack(store, Wrong({"a": noise(1, 4 * MIB), "b": Pieces((noise(2, 4 * MIB), noise(3, 1)))}))
    assert list(store.list()) == []


def test_a_metadata_image_that_reads_back_otherwise_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def wrong(tree: Tree, devices: list[int]) -> bytes:
        (tree.root.children or {})[b"a"].mode ^= 0o111
        image = render(tree, devices)
        (tree.root.children or {})[b"a"].mode ^= 0o111
        return image

    monkeypatch.setattr(pack_module, "render", wrong)
    with pytest.raises(ImageError, match=r"/a: .*mode"):
        pack(store, {"a": noise(1, 2 * MIB)})
    kinds = {store.read(info.digest, 0, 1) for info in store.list()}
    assert b"{" not in kinds  # neither config nor manifest


@pytest.mark.parametrize(
    ("operation", "skip"),
    [(operation, skip) for operation, calls in (("write", 6), ("commit", 5), ("touch", 4)) for skip in range(calls)],
)
def test_a_full_disk_at_any_step_publishes_nothing(operation: str, skip: int) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.add(Fault(operation, error=NoSpace("full"), skip=skip))
    files = {f"f{nth}": noise(nth, 400_000) for nth in range(20)}
    with pytest.raises(NoSpace):
        pack(store, files)
    manifests = [info for info in inner.list() if b"artifactType" in inner.read(info.digest, 0, min(info.size, 100))]
    assert not manifests
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pack-")]
    store.clear()
    assert pack(store, files).digest == pack(MemoryStore(), files).digest


class Interrupted(Files):
    """A source in which the user presses Ctrl-C."""

    def ingest(self, sink: ContentSink, progress: Progress) -> Tree:
        sink.whole(Inode(0o100644), noise(1, 5 * MIB))
        raise KeyboardInterrupt


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(PosixStore(tmp_path), Interrupted({}))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "dsec-store.json"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pack-")]


def test_epoch_bounds_modification_times() -> None:
    store = MemoryStore()
    tree = open_layer(store, pack(store, {"a": b"x"}, epoch=1000).digest).tree
    assert {inode.mtime for _, inode in tree.walk()} == {0, 1000}


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_b11_the_number_of_workers_changes_nothing(workers: int) -> None:
    assert pack(MemoryStore(), SOME, workers=workers).digest == pack(MemoryStore(), SOME).digest


def stream_of(data: bytes, step: int) -> Iterator[bytes]:
    return (data[at : at + step] for at in range(0, len(data), step))


@pytest.mark.parametrize("step", [4096, 99_991, 1 << 20])
def test_b11_how_a_source_cuts_its_pieces_changes_nothing(step: int) -> None:
    data = noise(1, 3 * MIB + 5)
    streamed: dict[str, bytes | Pieces] = {"a": Pieces(tuple(stream_of(data, step))), "b": text(1, 1000)}
    assert pack(MemoryStore(), streamed).digest == pack(MemoryStore(), {"a": data, "b": text(1, 1000)}).digest


def test_segments_are_listed_under_their_media_type() -> None:
    result = pack(MemoryStore(), SOME)
    assert [item.media_type for item in result.layer.segments] == [d.SEGMENTS]
    assert not result.layer.segments[0].annotations
