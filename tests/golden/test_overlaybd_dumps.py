"""Dumps of the OverlayBD vectors: readable, complete, and the same every time.

After an intended change: ``python -m tests.golden.test_overlaybd_dumps`` writes them; read the difference before you commit it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsec_layers.blocksource import BytesSource
from dsec_layers.errors import ImageError
from dsec_layers.overlaybd.dump import dump
from tests.kit.overlaybd_vectors import STEMS, vector

HERE = Path(__file__).parent / "overlaybd" / "dumps"
DUMPED = (
    "blk-64m-layer2.lsmt", "blk-64m-layer3.zfile-lz4-4k.tar", "blk-64m-layer3.zfile-zstd-4k", "blk-64m-layer3.rw.index", "blk-64m-layer3.rw.data",
    "plain.zstd-64k.zfile", "peerbug-lz4-64k-incompressible.zfile",
)  # fmt: skip


def lines(name: str) -> list[str]:
    return list(dump(BytesSource(vector(name))))


@pytest.mark.parametrize("name", DUMPED)
def test_the_dump_is_the_golden_one(name: str) -> None:
    golden = (HERE / f"{name}.txt").read_text().splitlines()
    assert lines(name) == golden, "if this is intended, write the dumps anew (see the module's docstring)"


@pytest.mark.parametrize("stem", STEMS)
def test_a_plain_file_is_accounted_for_byte_by_byte(stem: str) -> None:
    """No gap and no overlap between one line and the next, from the first byte to the last."""
    for suffix in (".lsmt", ".rw.index", ".rw.data"):
        at = 0
        for line in lines(stem + suffix):
            if not line.startswith("#"):
                place, size = re.match(r"([0-9a-f]{8,})\+(\d+) ", line).groups()  # type: ignore[union-attr]
                assert int(place, 16) == at, line
                at += int(size)
        assert at == len(vector(stem + suffix))


@pytest.mark.parametrize("stem", STEMS)
def test_the_index_is_the_one_the_official_tool_shows(stem: str) -> None:
    found = [
        "off {} len {} moff {} zeroed {} tag {}".format(*re.findall(r" (\d+)", line.partition("lba")[2]))
        for line in lines(stem + ".lsmt")
        if "lba" in line
    ]
    assert found == vector(stem + ".index.txt").decode().splitlines()[1:]


def test_a_dump_says_which_fact_differs() -> None:
    name = "blk-64m-layer3.zfile-lz4-4k"
    data = bytearray(vector(name))
    data[700] ^= 1  # in a block
    seen: list[str] = []
    with pytest.raises(ImageError, match="checksum mismatch"):
        seen.extend(dump(BytesSource(bytes(data))))
    other = [line for line in seen if line not in lines(name)]
    assert len(other) == 2
    assert "data" in other[0] and "WRONG, computed" in other[1]


def test_a_dump_of_old_blobs_without_digests() -> None:
    head = [line for line, _ in zip(dump(BytesSource(vector("ext4_64"))), range(60), strict=False)]
    assert "# ZFile header checksum is not used" in head


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for vector_name in DUMPED:
        (HERE / f"{vector_name}.txt").write_text("".join(line + "\n" for line in lines(vector_name)))
