"""Whatever the bytes are, reading them gives a value or ImageError, soon and in little memory; errors are fine, anything else is a bug."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.dump import dump
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.writer import render
from dsec_layers.errors import ImageError
from tests.kit.erofs_samples import SAMPLES, patched

IMAGES = {name: render(*make()) for name, make in SAMPLES.items()}
SECONDS = 2.0  # of processor time for one image; the largest sample takes a hundredth of it


def read_all(image: bytes) -> None:
    """Everything that can be asked of an image."""

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except ImageError:
            pass

    began = time.process_time()
    attempt(lambda: Image(image).tree())
    attempt(lambda: Image(image).tree(metadata_only=True))
    attempt(lambda: list(dump(image)))
    attempt(lambda: _ask_single(Image(image), attempt))
    assert time.process_time() - began < SECONDS


def _ask_single(image: Image, attempt: Callable[[Callable[[], object]], None]) -> None:
    for nid in (image.superblock.root_nid, 40, 50, 1 << 40, (1 << 64) - 1):
        for ask in (image.inode, image.xattrs, image.directory, image.extents):
            attempt(lambda ask=ask, nid=nid: ask(nid))  # type: ignore[misc]
        attempt(lambda nid=nid: image.read(nid, 0, 100_000))  # type: ignore[misc]
    attempt(lambda: image.lookup(b"sub/again"))


def _spoil(image: bytes, rng: random.Random) -> bytes:
    """A few changes, where they hurt: in the first blocks, in whole fields, to extreme values."""
    used = len(image.rstrip(b"\0"))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 30))):
        at = rng.choice((fmt.SUPER_OFFSET + rng.randrange(256), rng.randrange(min(used, 3 * 4096)), rng.randrange(used)))
        width = rng.choice((1, 1, 2, 4, 8))
        at = min(at & -width, len(image) - width)
        extremes = (
            0,
            (1 << 8 * width) - 1,
            1 << 8 * width - 1,
            rng.getrandbits(8 * width),
            rng.randrange(256),
            len(image) % (1 << 8 * width),
        )
        old = int.from_bytes(image[at : at + width], "little")
        new = rng.choice((*extremes, old ^ 1 << rng.randrange(8 * width)))
        image = patched(image, at, new.to_bytes(width, "little"))
    return image if rng.random() < 0.95 else image[: rng.randrange(len(image))]


@pytest.mark.parametrize("name", IMAGES)
def test_spoiled_images_never_crash_the_reader(name: str) -> None:
    rng = random.Random(name)
    end = time.monotonic() + 2
    count = 0
    while time.monotonic() < end or count < 20:
        read_all(_spoil(IMAGES[name], rng))
        count += 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(IMAGES)),
    st.lists(st.tuples(st.integers(fmt.SUPER_OFFSET, 3 * 4096), st.binary(min_size=1, max_size=12)), max_size=6),
)
def test_generated_changes_never_crash_the_reader(name: str, changes: list[tuple[int, bytes]]) -> None:
    image = IMAGES[name]
    for at, data in changes:
        image = patched(image, min(at, len(image) - len(data)), data)
    read_all(image)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_after_a_superblock_never_crash_the_reader(data: bytes) -> None:
    read_all(data)
    read_all(patched(IMAGES["empty"], fmt.SUPER_OFFSET + 128, data))


@pytest.mark.parametrize("name", ["empty", "everything", "attributes"])
def test_no_byte_of_an_image_can_change_unseen(name: str) -> None:
    """The dump is injective: another byte is another dump, or no image at all."""
    image = IMAGES[name]
    before = list(dump(patched(image, 0, b"")))
    used = len(image.rstrip(b"\0"))
    for at in range(0, used + 64, max(1, used // 300)):
        if at == fmt.SUPER_OFFSET + 8:
            continue
        changed = patched(image, at, bytes([image[at] ^ 0x10]))
        try:
            assert list(dump(changed)) != before, hex(at)
        except ImageError:
            pass
