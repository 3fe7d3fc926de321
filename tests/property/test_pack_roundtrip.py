"""Random files, packed beside random other layers with tiny limits, read back from the store."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_layers.builders.pack import chunker
from dsec_layers.builders.pack import foreign as pack_foreign
from dsec_layers.builders.pack import sink as pack_sink
from dsec_layers.builders.pack.index import ChunkIndex
from dsec_layers.registry.catalog import Catalog
from dsec_layers.store.memory import MemoryStore
from tests.kit.pack_inputs import Files, Pieces, contents, noise, pack

PIECES = [noise(seed, size) for seed, size in enumerate((1, 511, 513, 4095, 4096, 4097, 30_000, 65_535, 65_536, 65_537, 200_000))]
PIECES += [bytes(10), bytes(65_536), bytes(70_000), noise(1, 100_000) + bytes(100_000)]

# A file is drawn as indexes into PIECES and hole sizes, so that a failing example is short: (streamed, parts).
parts = st.lists(st.sampled_from(range(-len(PIECES), 0)) | st.integers(1, 300_000), max_size=5)
trees = st.dictionaries(
    st.sampled_from([f"{d}{n}" for d in ("", "dir/", "sub/dir/") for n in "abcdefgh"]), st.tuples(st.booleans(), parts), max_size=12
)


def files_of(tree: dict[str, tuple[bool, list[int]]]) -> Files:
    """The files that were drawn: streamed, or whole with holes left out."""
    files: dict[str, bytes | Pieces] = {}
    for path, (streamed, drawn) in tree.items():
        content = tuple(PIECES[part] if part < 0 else part for part in drawn)
        files[path] = Pieces(content) if streamed else b"".join(part for part in content if isinstance(part, bytes))
    return Files(files)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(layers=st.lists(trees, min_size=1, max_size=4), with_previous=st.booleans())
def test_layers_hold_what_was_packed_whatever_they_share(layers: list[dict[str, tuple[bool, list[int]]]], with_previous: bool) -> None:
    store = MemoryStore()
    small_index = functools.partial(ChunkIndex, 5)
    with (
        tempfile.TemporaryDirectory() as directory,
        Catalog(Path(directory) / "catalog.sqlite") as catalog,
        mock.patch.object(pack_sink, "ChunkIndex", small_index),
        mock.patch.object(pack_sink, "WINDOW", 50_000),
        mock.patch.object(pack_sink, "LOOKUP_WINDOW", 100_000),
        mock.patch.object(pack_foreign, "HELD", 150_000),
        mock.patch.object(pack_foreign, "REPAID", 20_000),
        mock.patch.object(chunker, "SEGMENT", 1 << 17),
    ):
        previous = None
        for tree in layers:
            files = files_of(tree)
            result = pack(store, files, catalog=catalog, previous=previous)
            assert contents(store, result.digest) == files.sha256()
            assert result.content == result.inline + result.holes + result.within + result.against + result.unique
            assert pack(store, files, catalog=catalog, previous=previous).digest == result.digest
            previous = result.digest if with_previous else None
