"""Verbs that only look: ``ls``, ``inspect``, ``diff``."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsec_layers.api.session import Session
from dsec_layers.digest import Digest, is_digest
from dsec_layers.errors import CorruptError, ImageError, InputError, LimitError, NotFound
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.disk import DiskImage
from dsec_layers.layers.image import compose_image
from dsec_layers.layers.manifest import Environment, Layer, Object
from dsec_layers.registry.compare import Change, compare
from dsec_layers.registry.objects import load_config, load_disk_config, load_layer, load_object, members_of, resolve_any
from dsec_layers.registry.view import Entry, open_view, walk
from dsec_layers.sandbox.variables import merge_variables

__all__ = ["BlobUse", "Change", "Difference", "Inspection", "LayerSummary", "Listed", "TreeEntry", "diff", "inspect", "ls", "names"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A ref as ``ls`` shows it: what it names, how large its image and its stored blobs are (bytes)."""

    name: str
    kind: str
    digest: Digest
    image_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class BlobUse:
    """One blob of a layer; ``foreign`` when another layer owns it."""

    role: str
    digest: Digest
    size: int
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One path of a tree listing; ``bytes`` is the file's own size or, for a directory, the sum of all below it."""

    path: str
    type: str
    mode: str
    uid: int
    gid: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """A layer: its config and its blobs. ``image``: what it says of how it is run and made, an OCI image config without its layers."""

    digest: Digest
    kind: str
    name: str
    layout: str
    prefix: str
    parent: Digest | None
    env: Mapping[str, str]
    counts: Mapping[str, int]
    recipe: Mapping[str, Any]
    builder: str
    blobs: tuple[BlobUse, ...]
    image: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What ``inspect`` knows of an object. ``config``: what its layers say together, as the config of an OCI image."""

    ref: str
    type: str
    digest: Digest
    image_bytes: int
    stored_bytes: int
    layers: tuple[LayerSummary, ...]
    tree: tuple[TreeEntry, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """What ``diff`` found. ``bytes_added``/``bytes_removed`` count file content that only one side has."""

    left: str
    right: str
    changes: tuple[Change, ...]
    bytes_added: int = 0
    bytes_removed: int = 0
    files: Mapping[str, int] = field(default_factory=dict)


def ls(session: Session, prefix: str = "") -> list[Listed]:
    """Every ref whose name begins with ``prefix``. One whose object cannot be read is of kind ``damaged``, and a warning says why."""
    rows: list[Listed] = []
    for ref in session.store.list_refs(prefix):
        try:
            found = load_object(session.store, ref.digest)
            summary, size = _summaries(session, ref.digest, found)
            rows.append(Listed(ref.name, _kind(found), ref.digest, size, _stored(summary)))
        except (CorruptError, ImageError, LimitError, NotFound) as error:
            session.progress.warning(f"{ref.name}: {error.message}")
            rows.append(Listed(ref.name, "damaged", ref.digest, 0, 0))
    return rows


def names(session: Session, prefix: str = "") -> list[str]:
    """The names of the refs that begin with ``prefix``, whether what they name can be read or not."""
    return [ref.name for ref in session.store.list_refs(prefix)]


def inspect(session: Session, text: str, *, tree: bool = False, depth: int = 2) -> Inspection:
    """A layer, environment or disk by name or digest; with ``tree`` the paths down to ``depth`` and their sizes (UsageError for a disk).

    The digest of any other blob gives its size, its role, and the layers that use it, as far as refs reach them.
    """
    try:
        digest, found = resolve_any(session.store, text)
    except (InputError, LimitError):
        if not is_digest(text) or tree:
            raise
        return _inspect_blob(session, text)
    summary, size = _summaries(session, digest, found)
    entries = _tree(open_view(session.store, text), depth) if tree else ()
    kind = f"layer ({found.kind})" if isinstance(found, Layer) else _kind(found)
    config = {} if isinstance(found, DiskImage) else _config(session, digest, found)
    return Inspection(text, kind, digest, size, _stored(summary), summary, entries, config)


def _inspect_blob(session: Session, digest: Digest) -> Inspection:
    """A blob that is no manifest."""
    size = session.store.stat(digest).size
    users: dict[Digest, LayerSummary] = {}
    for ref in session.store.list_refs():
        try:
            summaries, _ = _summaries(session, *resolve_any(session.store, ref.name))
        except (InputError, LimitError, CorruptError, NotFound):
            continue  # what is damaged is verify's affair
        users |= {layer.digest: layer for layer in summaries if any(blob.digest == digest for blob in layer.blobs)}
    roles = sorted({blob.role for layer in users.values() for blob in layer.blobs if blob.digest == digest})
    return Inspection(digest, f"blob ({', '.join(roles) or 'nothing refers to it'})", digest, 0, size, tuple(users.values()))


def diff(session: Session, left: str, right: str) -> Difference:
    """Compare two layers or environments as they would show when mounted. Content is fetched only where its chunks are not the same stored bytes."""
    changes = list(compare(open_view(session.store, left), open_view(session.store, right)))
    added = sum(change.after for change in changes if change.change in ("added", "content", "type"))
    removed = sum(change.before for change in changes if change.change in ("removed", "content", "type"))
    counts: dict[str, int] = {}
    for change in changes:
        counts[change.change] = counts.get(change.change, 0) + 1
    return Difference(left, right, tuple(changes), added, removed, counts)


def _kind(found: Object) -> str:
    if isinstance(found, DiskImage):
        return "disk"
    return str(found.kind) if isinstance(found, Layer) else "environment"


def _summaries(session: Session, digest: Digest, found: Object) -> tuple[tuple[LayerSummary, ...], int]:
    """What an object consists of, and the bytes of its content."""
    if isinstance(found, DiskImage):
        return _disk_summary(session, digest, found)
    summary = tuple(_summary(session, item, load_layer(session.store, item)) for item in members_of(digest, found))
    return summary, sum(item.counts.get("bytes", 0) for item in summary)


def _disk_summary(session: Session, digest: Digest, disk: DiskImage) -> tuple[tuple[LayerSummary, ...], int]:
    """A disk as one layer whose blobs are, from bottom to top, its layers with their pieces lists."""
    config = load_disk_config(session.store, disk)
    blobs = [BlobUse("config", disk.config.digest, disk.config.size)]
    for layer in disk.layers:
        blobs += [BlobUse("layer", layer.blob.digest, layer.blob.size), BlobUse("pieces", layer.pieces.digest, layer.pieces.size)]
    counts = {"layers": len(disk.layers), "bytes": config.virtual_size}
    summary = LayerSummary(
        digest, "disk", config.name, "overlaybd", "", None, {}, counts, config.recipe or {}, config.builder, tuple(blobs)
    )  # fmt: skip
    return (summary,), config.virtual_size


def _config(session: Session, digest: Digest, found: Layer | Environment) -> dict[str, Any]:
    configs = [load_config(session.store, load_layer(session.store, member)) for member in members_of(digest, found)]
    return compose_image(configs, merge_variables(config.env or {} for config in configs))


def _summary(session: Session, digest: Digest, layer: Layer) -> LayerSummary:
    config = load_config(session.store, layer)
    blobs = [BlobUse("config", layer.config.digest, layer.config.size), BlobUse("metadata", layer.metadata.digest, layer.metadata.size)]
    if layer.chunks:
        blobs.append(BlobUse("chunks", layer.chunks.digest, layer.chunks.size))
    blobs += [BlobUse("segments", item.digest, item.size, bool(item.annotations)) for item in layer.segments]
    return LayerSummary(
        digest, str(Kind(layer.kind)), config.name, config.layout, config.prefix, config.parent, config.env or {}, config.counts or {},
        config.recipe or {}, config.builder, tuple(blobs), config.image or {},
    )  # fmt: skip


def _stored(layers: tuple[LayerSummary, ...] | list[LayerSummary]) -> int:
    return sum({blob.digest: blob.size for layer in layers for blob in layer.blobs}.values())


def _tree(root: Entry, depth: int) -> tuple[TreeEntry, ...]:
    sums: dict[bytes, int] = {}
    paths: dict[bytes, Entry] = dict(walk(root))
    for path in reversed(paths):
        size = paths[path].inode.size if paths[path].children is None else sums.get(path, 0)
        sums[path] = size
        if path:
            parent = path.rpartition(b"/")[0]
            sums[parent] = sums.get(parent, 0) + size
    return tuple(
        TreeEntry(
            "/" + _text(path),
            _type(entry.inode.mode),
            f"{stat.S_IMODE(entry.inode.mode):04o}",
            entry.inode.uid,
            entry.inode.gid,
            sums[path],
        )
        for path, entry in paths.items()
        if (path.count(b"/") + 1 if path else 0) <= depth
    )


def _type(mode: int) -> str:
    kinds = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "dir",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
        stat.S_IFBLK: "block",
    }
    return kinds.get(stat.S_IFMT(mode), "char")


def _text(path: bytes) -> str:
    return path.decode(errors="backslashreplace")
