"""OCI descriptors: what is one, what is none, and layouts that hold none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.disks.inputs import oci_blobs
from dsec_layers.errors import ImageError
from dsec_layers.oci import MAX_SIZE, Descriptor, descriptor_json, parse_descriptor, parse_list
from dsec_layers.ocilayout import LayoutWriter
from dsec_layers.overlaybd.oci import BlobInfo, layer_descriptor

DIGEST = "sha256:" + "ab" * 32
GOOD: dict[str, Any] = {"mediaType": "a/b", "digest": DIGEST, "size": 5}


@pytest.mark.parametrize("more", [{}, {"annotations": {"a": "b"}}, {"annotations": None}, {"size": 0}, {"size": MAX_SIZE}, {"urls": []}])
def test_what_is_read_is_written_again(more: dict[str, Any]) -> None:
    found = parse_descriptor({**GOOD, **more}, "x")
    assert parse_descriptor(descriptor_json(found), "x") == found
    assert (found.digest, found.size) == (DIGEST, more.get("size", 5))


@pytest.mark.parametrize(
    "change",
    [
        {"digest": None}, {"digest": 5}, {"digest": "sha256:00"}, {"digest": "sha512:" + "0" * 128}, {"digest": DIGEST.upper()},
        {"digest": DIGEST + "\n"}, {"digest": "sha256:../../" + "0" * 58}, {"size": None}, {"size": True}, {"size": -1}, {"size": 1 << 63}, {"size": 1.0},
        {"size": "5"}, {"mediaType": 3}, {"annotations": "x"}, {"annotations": ""}, {"annotations": []}, {"annotations": [1]}, {"annotations": {"a": 1}},
    ],
)  # fmt: skip
def test_what_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match="the thing"):
        parse_descriptor({**GOOD, **change}, "the thing", typed=False)


def test_a_media_type_may_be_missing_only_where_that_is_said() -> None:
    value = {"digest": DIGEST, "size": 5}
    assert parse_descriptor(value, "x", typed=False).media_type == ""
    others: tuple[object, ...] = (value, None, [], "x", 5)
    for bad in others:
        with pytest.raises(ImageError):
            parse_descriptor(bad, "x")


def test_lists_are_bounded() -> None:
    assert parse_list([1, 2], "x", 2) == [1, 2]
    others: tuple[object, ...] = ([1, 2, 3], None, {}, "ab")
    for bad in others:
        with pytest.raises(ImageError, match="the thing"):
            parse_list(bad, "the thing", 2)


@pytest.mark.parametrize(
    "layers", [5, "x", {"a": 1}, [5], [None], [{"digest": "sha256:00", "size": 1}], [{**GOOD, "size": "5"}], [GOOD], []]
)
def test_a_layout_without_overlaybd_layers_is_refused(tmp_path: Path, layers: object) -> None:
    manifest = json.dumps({"schemaVersion": 2, "layers": layers}).encode()
    digest = sha256_digest(manifest)
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    (tmp_path / "blobs/sha256" / digest[7:]).write_bytes(manifest)
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [{"digest": digest, "size": len(manifest)}]}))
    with pytest.raises(ImageError):
        oci_blobs(tmp_path)


@pytest.mark.parametrize("manifests", [5, "x", {"a": 1}, [], [5], [{"digest": "sha256:../../x", "size": 1}], [{"digest": DIGEST}]])
def test_an_index_without_an_image_is_refused(tmp_path: Path, manifests: object) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"manifests": manifests}))
    with pytest.raises(ImageError):
        oci_blobs(tmp_path)


def test_what_the_writer_writes_is_read_again(tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path)
    digests = []
    for number, data in enumerate((b"lower", b"upper")):
        writer.spare(number).write_bytes(data)
        digests.append(sha256_digest(data))
        writer.layer(writer.spare(number), layer_descriptor(BlobInfo(digests[-1], len(data), fs_type="ext4")), digests[-1])
    made = writer.finish({}, name="image:1")
    assert [(item.path.read_bytes(), item.digest, item.fs_type) for item in oci_blobs(tmp_path)] == [
        (b"lower", digests[0], "ext4"),
        (b"upper", digests[1], "ext4"),
    ]
    for path in (tmp_path / "blobs/sha256").iterdir():
        assert sha256_digest(path.read_bytes()) == f"sha256:{path.name}"
    (listed,) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    assert parse_descriptor(listed, "index.json") == made == Descriptor(made.media_type, made.digest, made.size, made.annotations)
    assert made.annotations == {"org.opencontainers.image.ref.name": "image:1"}
    assert json.loads((tmp_path / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "index.json", "oci-layout"]
