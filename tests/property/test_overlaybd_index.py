"""Mappings against the plainest model: one owner for each sector."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsec_layers.overlaybd.lsmt import decode_entries, encode_entries
from dsec_layers.overlaybd.packing import _packed_index
from dsec_layers.overlaybd.segments import Segments, concatenate, no_segments, overlay, paint, resolve, stack
from dsec_layers.overlaybd.upper_index import UpperIndex, dead_blocks

SECTORS = 64
relaxed = settings(deadline=None)  # the machine may be busy
Row = tuple[int, int, int, bool]

rows = st.tuples(st.integers(0, SECTORS - 1), st.integers(1, 24), st.integers(8, 500), st.booleans())
logs = st.lists(rows, max_size=24)


def segments(log: list[Row], source: int = 0) -> Segments:
    table = np.array([(lba, min(lba + length, SECTORS), moffset, zeroed) for lba, length, moffset, zeroed in log], np.int64).reshape(-1, 4)
    return Segments(table[:, 0], table[:, 1], table[:, 2], np.full(len(table), source, np.int16), table[:, 3].astype(np.bool_))


def model(log: Segments) -> list[tuple[int, int, bool] | None]:
    """(source, sector of the source or place of the zeros, zeroed) for each sector."""
    disk: list[tuple[int, int, bool] | None] = [None] * SECTORS
    for lba, end, moffset, source, zeroed in zip(
        log.lba.tolist(), log.end.tolist(), log.moffset.tolist(), log.source.tolist(), log.zeroed.tolist(), strict=True
    ):
        for sector in range(lba, end):
            disk[sector] = (source, moffset if zeroed else moffset + sector - lba, zeroed)
    return disk


def check(mapping: Segments, want: list[tuple[int, int, bool] | None]) -> None:
    assert bool(np.all(mapping.lba < mapping.end)) and bool(np.all(mapping.end[:-1] <= mapping.lba[1:]))
    assert model(mapping) == want


@relaxed
@given(logs)
def test_a_log_resolves_to_what_was_written_last(log: list[Row]) -> None:
    check(resolve(segments(log)), model(segments(log)))


@relaxed
@given(st.lists(logs, max_size=6))
def test_a_stack_shows_the_topmost_layer(layers: list[list[Row]]) -> None:
    mappings = [resolve(segments(log, source)) for source, log in enumerate(layers)]
    check(stack(mappings), model(concatenate([no_segments(), *mappings])))


@relaxed
@given(logs, logs)
def test_overlay_is_a_stack_of_two(lower: list[Row], upper: list[Row]) -> None:
    below, above = resolve(segments(lower)), resolve(segments(upper, 1))
    got, want = overlay(below, above), stack([below, above])
    for name in ("lba", "end", "moffset", "source", "zeroed"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist()


@relaxed
@example([(0, 2, 8, False)], 1, 0)
@given(logs, st.integers(0, SECTORS), st.integers(0, SECTORS))
def test_pieces_cut_the_mapping(log: list[Row], first: int, length: int) -> None:
    mapping, end = resolve(segments(log)), min(first + length, SECTORS)
    cut = model(mapping)
    got: list[tuple[int, int, bool] | None] = [None] * SECTORS
    for lba, stop, moffset, source, zeroed in mapping.pieces(first, end):
        assert first <= lba < stop <= end
        for sector in range(lba, stop):
            got[sector] = (source, moffset if zeroed else moffset + sector - lba, zeroed)
    assert got[first:end] == cut[first:end]


@relaxed
@given(logs, st.integers(0, SECTORS), st.integers(1, SECTORS), st.lists(st.integers(0, 23), max_size=3))
def test_upper_index_is_the_resolved_log(log: list[Row], first: int, length: int, settle_at: list[int]) -> None:
    index = UpperIndex()
    for number, (lba, size, moffset, zeroed) in enumerate(log):
        index.insert(lba, min(lba + size, SECTORS), moffset, zeroed)
        if number in settle_at:
            index.settle()
    want = resolve(segments(log))
    end = min(first + length, SECTORS)
    assert [(*piece[:3], piece[3]) for piece in index.pieces(first, end)] == [
        (lba, stop, at, zero) for lba, stop, at, _, zero in want.pieces(first, end)
    ]
    settled = index.settle()
    for name in ("lba", "end", "moffset", "zeroed"):
        assert getattr(settled, name).tolist() == getattr(want, name).tolist()


@relaxed
@given(logs)
def test_entries_survive_their_stored_form(log: list[Row]) -> None:
    want = segments(log, 3)
    got, place = decode_entries(encode_entries(want))
    assert place.tolist() == list(range(len(want)))
    for name in ("lba", "end", "moffset", "source", "zeroed"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist()


@relaxed
@given(logs, st.sets(st.integers(2, 70)))
def test_dead_blocks_are_whole_and_reached_by_nothing(log: list[Row], freed_blocks: set[int]) -> None:
    mapping = resolve(segments(log))
    freed = np.array([(block * 8, block * 8 + 8) for block in sorted(freed_blocks)], np.int64).reshape(-1, 2)
    live = {
        sector for lba, end, moffset, _, zero in mapping.pieces(0, SECTORS) if not zero for sector in range(moffset, moffset + end - lba)
    }
    gone = {sector for first, end in freed.tolist() for sector in range(first, end)}
    want = {
        block
        for block in range(1, 66)
        if not live & set(range(block * 8, block * 8 + 8)) and not gone & set(range(block * 8, block * 8 + 8))
    }
    got = [block for first, end in dead_blocks(mapping, freed, 8, 66 * 8, 8).tolist() for block in range(first // 8, end // 8)]
    assert got == sorted(want)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 3000), st.sampled_from([1, 40, 4000, 1 << 20]))
def test_paint_of_many(seed: int, count: int, longest: int) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 5000, count)
    end = start + rng.integers(1, longest + 1, count)
    lba, stop, owner = paint(start, end)
    seen = np.full(int(end.max()) + 1, -1)
    for i in range(count):
        seen[start[i] : end[i]] = i
    got = np.full(len(seen), -1)
    for first, behind, which in zip(lba.tolist(), stop.tolist(), owner.tolist(), strict=True):
        got[first:behind] = which
    assert bool(np.all(seen == got)) and bool(np.all(stop[:-1] <= lba[1:]))


def joined_naively(mapping: Segments) -> list[tuple[int, int, int, int, bool]]:
    """The index of a packed layer as the official tool makes it, one piece after the other: (lba, end, moffset, tag, zeroed)."""
    pieces: list[tuple[int, int, int, int, bool]] = []
    at = 8
    for lba, end, _, source, zeroed in mapping.pieces(0, 1 << 50):
        step = 16383 if zeroed else 64
        for start in range(lba, end, step):
            stop = min(start + step, end)
            pieces.append((start, stop, at, source, zeroed))
            at += 0 if zeroed else stop - start
    done: list[tuple[int, int, int, int, bool]] = []
    for piece in pieces:
        lba, end, moffset, source, zeroed = piece
        if done:
            first, stop, place, tag, empty = done[-1]
            reached = place if empty else place + stop - first
            if stop == lba and reached == moffset and empty == zeroed and tag == source and end - first < 16383:
                done[-1] = (first, end, place, tag, empty)
                continue
        done.append(piece)
    return done


@relaxed
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 9]), st.sampled_from([1, 63, 64, 65, 5000, 16382, 16383]), st.integers(0, 1), st.booleans()),
        max_size=30,
    )
)
def test_neighbours_are_joined_as_the_official_tool_does(rows: list[tuple[int, int, int, bool]]) -> None:
    table, lba = [], 0
    for gap, length, source, zeroed in rows:
        table.append((lba + gap, lba + gap + length, 8, source, zeroed))
        lba += gap + length
    array = np.array(table, np.int64).reshape(-1, 5)
    mapping = Segments(array[:, 0], array[:, 1], array[:, 2], array[:, 3].astype(np.int16), array[:, 4].astype(np.bool_))
    packed = _packed_index(mapping)
    got = zip(
        packed.lba.tolist(), packed.end.tolist(), packed.moffset.tolist(), packed.source.tolist(), packed.zeroed.tolist(), strict=True
    )
    assert list(got) == joined_naively(mapping)
