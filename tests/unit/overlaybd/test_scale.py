"""Size and speed that the design promises, with a wide margin: bounds, not measurements (those are benchmarks/overlaybd.py)."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dsec_layers.blocksource import BytesSource
from dsec_layers.overlaybd import Disk, LsmtLayer, commit, open_layer
from dsec_layers.overlaybd.lsmt import Flags, Header
from dsec_layers.overlaybd.segments import Segments, resolve
from dsec_layers.overlaybd.upper_index import UpperIndex


@pytest.mark.slow
def test_fifty_layers_with_a_million_segments_open_within_a_second() -> None:
    rng = np.random.default_rng(1)
    blobs = []
    for _ in range(50):
        lba = np.unique(rng.integers(0, 1 << 24, 20_300))[:20_000] * 8
        mapping = Segments(lba, lba + 8, np.full(len(lba), 8), np.zeros(len(lba), np.int16), np.ones(len(lba), np.bool_))
        layer = LsmtLayer(Header(Flags.UPPER_DATA, virtual_size=64 << 30), mapping, (BytesSource(b""),))
        blobs.append(b"".join(data for _, data in commit(layer)))
    times = []
    for _ in range(3):
        start = time.process_time()
        disk = Disk([open_layer(BytesSource(blob)) for blob in blobs])
        times.append(time.process_time() - start)
    assert min(times) < 1
    mapping = disk._state.mapping
    assert len(mapping) > 900_000
    assert mapping.nbytes / len(mapping) < 40


@pytest.mark.slow
def test_hostile_overlap_costs_no_more_than_honest_writes() -> None:
    count = 300_000
    start = np.arange(count)  # every write covers all that follow: n² sectors in sum
    log = Segments(start, np.full(count, count), np.full(count, 8), np.zeros(count, np.int16), np.zeros(count, np.bool_))
    began = time.process_time()
    assert len(resolve(log)) == count
    assert time.process_time() - began < 5


@pytest.mark.slow
def test_writes_stay_cheap_with_many_segments() -> None:
    lba = np.arange(1_000_000) * 8
    index = UpperIndex(Segments(lba, lba + 8, lba + 8, np.zeros(len(lba), np.int16), np.zeros(len(lba), np.bool_)))
    places = np.random.default_rng(3).integers(0, 1_000_000, 50_000) * 8
    began = time.process_time()
    for number, place in enumerate(places.tolist()):
        index.insert(place, place + 8, 8_000_008 + 8 * number, False)
    assert time.process_time() - began < 5
    assert len(index.settle()) == 1_000_000
