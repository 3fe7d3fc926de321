"""Writes an OCI image layout: blobs by digest, one image, its index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.oci import IMAGE_CONFIG, INDEX, MANIFEST, REF_NAME, Descriptor, canonical_json, descriptor_json

__all__ = ["LayoutWriter"]


class LayoutWriter:
    """One image in the directory ``root``, which is there and empty. Layers first, from bottom to top, then ``finish``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._blobs = root / "blobs/sha256"
        self._blobs.mkdir(parents=True)
        self._layers: list[Descriptor] = []
        self._diff_ids: list[Digest] = []

    def spare(self, number: int) -> Path:
        """A place for a layer's bytes while they have no name yet, on the file system of the blobs."""
        return self._root / f"layer-{number}"

    def layer(self, path: Path, descriptor: Descriptor, diff_id: Digest) -> None:
        """Move the file ``path`` among the blobs as the image's next layer. ``diff_id``: the digest of its bytes uncompressed."""
        path.rename(self._blobs / descriptor.digest.removeprefix("sha256:"))
        self._layers.append(descriptor)
        self._diff_ids.append(diff_id)

    def finish(self, image: dict[str, Any], *, name: str = "") -> Descriptor:
        """Write what names the layers; ``image`` is the image's config document without ``rootfs``, ``name`` what the index calls the image. Gives the manifest's descriptor."""
        whole = {"architecture": "amd64", "os": "linux", "config": {}, **image, "rootfs": {"type": "layers", "diff_ids": self._diff_ids}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor_json(self._put(canonical_json(whole), IMAGE_CONFIG)),
            "layers": [descriptor_json(item) for item in self._layers],
        }
        found = self._put(canonical_json(manifest), MANIFEST, {REF_NAME: name} if name else {})
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [descriptor_json(found)]}
        (self._root / "index.json").write_bytes(canonical_json(index))
        (self._root / "oci-layout").write_bytes(canonical_json({"imageLayoutVersion": "1.0.0"}))
        return found

    @property
    def layers(self) -> Sequence[Descriptor]:
        """The layers so far."""
        return tuple(self._layers)

    def _put(self, data: bytes, media_type: str, annotations: dict[str, str] | None = None) -> Descriptor:
        digest = sha256_digest(data)
        (self._blobs / digest.removeprefix("sha256:")).write_bytes(data)
        return Descriptor(media_type, digest, len(data), annotations or {})
