"""What fsck.erofs is given: images in pieces, whatever their size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dsec_layers.digest import Digest
from dsec_layers.errors import LimitError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.manifest import Layer, LayerConfig
from dsec_layers.proc import Completed
from dsec_layers.progress import SILENT
from dsec_layers.registry import fsck as judge_module
from dsec_layers.registry.fsck import judge
from dsec_layers.registry.objects import publish_object, put_blob
from dsec_layers.store.memory import MemoryStore
from tests.kit.store_samples import publish_config


class Counting(MemoryStore):
    """Notes the longest read."""

    longest = 0

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        self.longest = max(self.longest, length)
        return super().read(digest, offset, length)


def test_b1_a_compressed_image_is_judged_without_being_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    image = bytes(range(256)) * (40 << 12)
    layer = Layer(Kind.BASE, publish_config(store, LayerConfig(Kind.BASE, "x:1")), put_blob(store, d.EROFS, image))
    digest = publish_object(store, layer)
    seen: list[bytes] = []

    def check(fsck: str, work: Path, parts: Iterable[bytes], sizes: list[int]) -> Completed:
        seen.extend(parts)
        return Completed((fsck,), 0, b"", b"")

    monkeypatch.setattr(judge_module, "find_tool", lambda name: name)
    monkeypatch.setattr(judge_module, "_check", check)
    assert judge(store, digest, SILENT) is None
    assert b"".join(seen) == image and store.longest <= 4 << 20


def test_b1_an_image_over_the_limit_of_the_format_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(Kind.BASE, Descriptor(d.CONFIG, "sha256:" + "0" * 64, 2), Descriptor(d.EROFS, "sha256:" + "1" * 64, (4 << 30) + 1))
    monkeypatch.setattr(judge_module, "find_tool", lambda name: name)
    monkeypatch.setattr(judge_module, "load_layer", lambda store, digest: layer)
    with pytest.raises(LimitError, match=str((4 << 30) + 1)):
        judge(MemoryStore(), "sha256:" + "2" * 64, SILENT)
