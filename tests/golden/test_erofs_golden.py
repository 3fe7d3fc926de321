"""The layout, pinned: readable dumps of small images, and the digest of every sample's bytes.

After an intended change of layout: ``python -m tests.golden.test_erofs_golden`` writes the dumps and prints the digests; read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.erofs.dump import dump
from dsec_layers.erofs.writer import render
from tests.kit.erofs_samples import SAMPLES

HERE = Path(__file__).parent / "erofs"
DUMPED = ("empty", "everything", "same_time")
DIGESTS = {
    "empty": "sha256:520b42b9c16bdaddab77f0a1b95bed435e4c83a69b3452dbfdf6f897ba472f7d",
    "everything": "sha256:5b536bf37fe5e3c85f4f8099d5cfbcffa452abaf3e075f55fa5f27d663f23133",
    "attributes": "sha256:6f1d81191e449a55f6daf39bd1908adf4fddc2a868422d05740778999371bd40",
    "blocks": "sha256:c59b6fde6f995bb885503c5934e7b24bd137898e3bca98d6939b4c56d0e9237f",
    "same_time": "sha256:b94a3dc0c6703843e6cd90a526aa27cfadc7aa377308a0ab95d1c03b681a83a9",
}


@pytest.mark.parametrize("name", DUMPED)
def test_the_dump_is_the_golden_one(name: str) -> None:
    lines = list(dump(render(*SAMPLES[name]())))
    golden = (HERE / f"{name}.txt").read_text().splitlines()
    assert lines == golden, "if this is intended, write the dumps anew (see the module's docstring)"


@pytest.mark.parametrize("name", SAMPLES)
def test_the_bytes_are_pinned(name: str) -> None:
    assert sha256_digest(render(*SAMPLES[name]())) == DIGESTS[name], "if this is intended, update the pinned value"


if __name__ == "__main__":
    for sample, make in SAMPLES.items():
        image = render(*make())
        print(f'    "{sample}": "{sha256_digest(image)}",')
        if sample in DUMPED:
            (HERE / f"{sample}.txt").write_text("".join(line + "\n" for line in dump(image)))
