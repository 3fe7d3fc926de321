"""Manifests, configs and tables as blobs of a store: publish, load, find by name or digest.

Everything that is read here is checked against its digest and bounded in size. Everything published is complete: the blobs it refers to are
there, of the right size, and touched, so that a collector running beside leaves them alone (``registry/collect.py``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeVar

import numpy as np

from dsec_layers.digest import Buffer, Digest, is_digest
from dsec_layers.errors import Conflict, CorruptError, ImageError, InputError, NotFound, UsageError
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.disk import DiskConfig, DiskImage
from dsec_layers.layers.frames import CHUNKS_BOUND, MAX_METADATA, unpack
from dsec_layers.layers.manifest import (
    MAX_JSON,
    Environment,
    Layer,
    LayerConfig,
    Object,
    parse_config,
    parse_disk,
    parse_layer,
    parse_object,
)
from dsec_layers.layers.metadata import open_metadata
from dsec_layers.layers.tables import CHUNK, MAX_CHUNKS_BYTES, Table, parse_chunks
from dsec_layers.store.base import BlobInfo, Store, check_ref
from dsec_layers.store.transfer import put_bytes, read_blob

__all__ = [
    "children",
    "find_objects",
    "hold",
    "load_chunks",
    "load_config",
    "load_disk",
    "load_disk_config",
    "load_layer",
    "load_metadata",
    "load_object",
    "members_of",
    "peek",
    "publish_object",
    "put_blob",
    "reach",
    "resolve",
    "resolve_any",
    "set_tag",
]

_PREFIX: Final = re.compile(r"(?:sha256:)?([0-9a-f]{6,63})\Z")
_T = TypeVar("_T")
_ATTEMPTS: Final = 16


def put_blob(store: Store, media_type: str, data: Buffer) -> Descriptor:
    """Store ``data`` and describe it."""
    info = put_bytes(store, data)
    return Descriptor(media_type, info.digest, info.size)


def publish_object(store: Store, value: Object) -> Digest:
    """Store a manifest after everything it refers to was found complete and touched. NotFound or CorruptError if something is not there whole."""
    hold(store, value)
    return put_bytes(store, value.to_json()).digest


def set_tag(store: Store, name: str, digest: Digest) -> Digest | None:
    """Point ``name`` at an object of the store, whatever it was before; returns that. The object and all below it is touched first.

    Among several that do this at once the last wins. Conflict only if somebody else wins every time.
    """
    name = check_ref(name)
    hold(store, load_object(store, digest))
    store.touch(digest)
    for _ in range(_ATTEMPTS):
        try:
            before: Digest | None = store.get_ref(name).digest
        except NotFound:
            before = None
        if before == digest:
            return before
        try:
            store.set_ref(name, digest, expected=before)
        except Conflict:
            continue
        return before
    raise Conflict(f"{name} is being changed all the time by somebody else", hint="try again")


def hold(store: Store, value: Object) -> None:
    """Touch all blobs that an object refers to, directly or not, and check their sizes. NotFound, CorruptError."""
    wanted = {item.digest: item.size for item in children(value)}
    if isinstance(value, Environment):
        for _, item in value.layers:
            wanted |= {blob.digest: blob.size for blob in load_layer(store, item.digest).blobs()}
    with ThreadPoolExecutor(max(1, min(store.capabilities.connections, len(wanted)))) as pool:
        for info in pool.map(store.touch, wanted):
            if info.size != wanted[info.digest]:
                raise CorruptError(f"{info.digest} in {store.url} has {info.size} bytes, its descriptor says {wanted[info.digest]}")


def children(value: Object) -> tuple[Descriptor, ...]:
    """The descriptors in a manifest."""
    return tuple(item for _, item in value.layers) if isinstance(value, Environment) else value.blobs()


def reach(store: Store, digest: Digest) -> Iterator[tuple[Digest, Object]]:
    """An object and the objects below it, each once, from the bottom to the top: layers before their environment."""
    value = load_object(store, digest)
    if isinstance(value, Environment):
        for member in dict.fromkeys(item.digest for _, item in value.layers):
            yield member, load_layer(store, member)
    yield digest, value


def load_object(store: Store, digest: Digest) -> Object:
    """The layer, environment or disk that a manifest digest names."""
    return _parsed(digest, parse_object, read_blob(store, digest, limit=MAX_JSON))


def load_layer(store: Store, digest: Digest) -> Layer:
    """The layer that a manifest digest names."""
    return _parsed(digest, parse_layer, read_blob(store, digest, limit=MAX_JSON))


def load_disk(store: Store, digest: Digest) -> DiskImage:
    """The disk that a manifest digest names."""
    return _parsed(digest, parse_disk, read_blob(store, digest, limit=MAX_JSON))


def load_config(store: Store, layer: Layer) -> LayerConfig:
    """A layer's config. CorruptError if it is of another kind than the manifest says."""
    digest = layer.config.digest
    config = _parsed(digest, parse_config, read_blob(store, digest, limit=MAX_JSON, size=layer.config.size))
    if config.kind is not layer.kind:
        raise CorruptError(f"{digest} says {config.kind}, the manifest {layer.kind}")
    return config


def load_disk_config(store: Store, disk: DiskImage) -> DiskConfig:
    """A disk's config."""
    item = disk.config
    return _parsed(item.digest, DiskConfig.parse, read_blob(store, item.digest, limit=MAX_JSON, size=item.size))


def load_metadata(store: Store, layer: Layer) -> tuple[bytes, Table]:
    """(EROFS metadata image, segment table) of a layer of the ``segments`` layout."""
    item = layer.metadata
    blob = read_blob(store, item.digest, limit=MAX_METADATA, size=item.size)
    return _parsed(item.digest, lambda data: open_metadata(data, layer), blob)


def load_chunks(store: Store, layer: Layer, segments: Table) -> Table:
    """A layer's chunk table, checked against its segment table; empty if the layer has none."""
    item = layer.chunks
    if item is None:
        return np.zeros(0, CHUNK)
    blob = read_blob(store, item.digest, limit=MAX_CHUNKS_BYTES, size=item.size)
    return _parsed(item.digest, lambda data: parse_chunks(unpack(data, MAX_CHUNKS_BYTES, CHUNKS_BOUND), segments), blob)


def resolve(store: Store, text: str) -> tuple[Digest, Layer | Environment]:
    """The layer or environment that ``text`` names, as ``resolve_any``. UsageError for a disk."""
    digest, found = resolve_any(store, text)
    if isinstance(found, DiskImage):
        raise UsageError(f"{text} is a disk, not a layer or environment", hint="dsec-layers disk and nbd take disks")
    return digest, found


def members_of(digest: Digest, found: Layer | Environment) -> list[Digest]:
    """The layers of an object from bottom to top: a layer is its own only one."""
    return [digest] if isinstance(found, Layer) else [item.digest for _, item in found.layers]


def resolve_any(store: Store, text: str) -> tuple[Digest, Object]:
    """The object that ``text`` names: ``name:tag`` (the tag is ``latest`` when left out), a digest, or the first 6 or more hex digits of one.

    NotFound with the names that come near, UsageError for digits that begin more than one object's digest.
    """
    if is_digest(text):
        return text, load_object(store, text)
    found = _PREFIX.match(text)
    if text.startswith("sha256:"):
        if not found:
            raise UsageError(
                f"not a digest: {text[:100]!r}", hint="a digest is sha256: and 64 lower-case hex digits, or the first 6 or more"
            )
        return _by_prefix(store, found[1])
    name = check_ref(text)
    try:
        digest = store.get_ref(name).digest
    except NotFound:
        if found:
            return _by_prefix(store, found[1])
        raise NotFound(f"no {name} in {store.url}", hint=_near(store, name)) from None
    return digest, load_object(store, digest)


def find_objects(store: Store, prefix: str = "") -> Iterator[tuple[BlobInfo, Object]]:
    """Every manifest in the store, referred to or not, whose digest begins with ``prefix``. Reads the first bytes of each small blob."""
    with ThreadPoolExecutor(store.capabilities.connections) as pool:
        for batch in _batches(store.list(prefix), 1024):
            yield from (
                (info, value)
                for info, value in zip(batch, pool.map(lambda info: peek(store, info), batch), strict=True)
                if value is not None
            )


def peek(store: Store, info: BlobInfo) -> Object | None:
    """The manifest that a blob is; None if it is something else, damaged, or gone. Reads the first byte, and the rest of what may be one."""
    try:
        if not 2 <= info.size <= MAX_JSON or store.read(info.digest, 0, 1) != b"{":
            return None
        return parse_object(read_blob(store, info.digest, limit=MAX_JSON, size=info.size))
    except (InputError, CorruptError, NotFound):
        return None


def _by_prefix(store: Store, digits: str) -> tuple[Digest, Object]:
    found = list(find_objects(store, f"sha256:{digits}"))
    if not found:
        raise NotFound(f"no object in {store.url} has a digest that begins with {digits}", hint="dsec-layers ls shows what there is")
    if len(found) > 1:
        names = ", ".join(sorted(info.digest[7:19] for info, _ in found)[:5])
        raise UsageError(f"{digits} begins {len(found)} digests: {names}", hint="give more digits")
    return found[0][0].digest, found[0][1]


def _near(store: Store, name: str) -> str:
    names = [ref.name for ref in store.list_refs()]
    plain = name.rpartition(":")[0]
    near = [other for other in names if other.rpartition(":")[0] == plain] or difflib.get_close_matches(name, names, n=5)
    return f"there is {', '.join(near[-5:])}" if near else f"dsec-layers ls shows what there is ({len(names)} names)"


def _parsed(digest: Digest, parse: Callable[[bytes], _T], data: bytes) -> _T:
    """Parse; an ImageError says which blob it is about."""
    try:
        return parse(data)
    except ImageError as error:
        raise error.located(digest) from error


def _batches(items: Iterator[BlobInfo], size: int) -> Iterator[list[BlobInfo]]:
    while batch := list(islice(items, size)):
        yield batch
