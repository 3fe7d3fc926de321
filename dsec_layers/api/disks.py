"""Verbs on disks: ``disk create``, ``attach``, ``detach``, ``snapshot``, ``commit``, ``branch``, and ``nbd serve``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from dsec_layers.api.diskfrom import content
from dsec_layers.api.session import Session
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.digest import Digest
from dsec_layers.disks.attach import SOCKET, serve_disk
from dsec_layers.disks.ext4 import make_ext4, size_for
from dsec_layers.disks.files import GenerationReader, check_size, create_files
from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.opener import open_pieces
from dsec_layers.disks.owner import owner_of, served
from dsec_layers.disks.state import DiskState, Parent, read_state
from dsec_layers.disks.stored import StoredDisk, publish_disk, publish_layer
from dsec_layers.errors import Conflict, NotFound, UsageError
from dsec_layers.layers.disk import DiskConfig, DiskImage, DiskLayer
from dsec_layers.overlaybd import Algorithm, LsmtLayer, Packing, ZFileOptions, content_uuid, merge
from dsec_layers.overlaybd.lsmt import NIL_UUID, Flags, Header
from dsec_layers.overlaybd.segments import no_segments
from dsec_layers.registry.copy import copy_object
from dsec_layers.registry.objects import load_disk, load_disk_config, resolve_any, set_tag
from dsec_layers.store.base import Store, check_ref
from dsec_layers.store.open import open_store

__all__ = [
    "FORMATS",
    "Attached",
    "Branched",
    "DiskInfo",
    "Sealed",
    "Snapshot",
    "attach",
    "branch",
    "commit",
    "create",
    "detach",
    "info",
    "snapshot",
]

FILE_SYSTEMS: Final = ("none", "ext4")
FORMATS: Final = ("zfile", "zfile-zstd", "lsmt")
"""How a commit packs its layer: LZ4 blocks of 4 KiB, Zstandard blocks of 16 KiB, or plain."""

_BUILDER: Final = f"dsec-layers {version('dsec-layers')}"
PACKINGS: Final = {
    "zfile": ZFileOptions(),
    "zfile-zstd": ZFileOptions(Algorithm.ZSTD, 16384),
    "lsmt": None,
}


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """A writable disk: its size in bytes, the sealed disk below, frozen local generations, and the NBD URI where it is served (empty: nowhere)."""

    path: str
    virtual_size: int
    parent: Digest | None
    store: str
    generations: int
    local_bytes: int
    uri: str = ""


@dataclass(frozen=True, slots=True)
class Attached:
    """A disk that is served."""

    path: str
    uri: str
    recovered: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What ``snapshot`` froze: generations that are local still, from bottom to top."""

    path: str
    frozen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A disk in the store: its name, manifest, layers, size in bytes, and bytes that this commit added."""

    name: str
    digest: Digest
    layers: int
    virtual_size: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Branched:
    """New writable disks on one sealed disk."""

    ref: str
    digest: Digest
    paths: tuple[str, ...]


def create(
    session: Session,
    path: str | Path,
    *,
    size: int | None = None,
    parent: str | None = None,
    mkfs: str = "none",
    source: str | None = None,
    epoch: int = 0,
) -> DiskInfo:
    """Make a writable disk in the new directory ``path``.

    It is empty; or on the sealed disk ``parent``, whose size it then has unless ``size`` (bytes) is larger; or has a new file system ``mkfs`` (``ext4``), with the
    content of ``source`` if given: a directory, a tar, a layer or an environment (the last three need root). ``epoch``: when the file system says it was made.
    """
    if mkfs not in FILE_SYSTEMS or (parent is not None and mkfs != "none") or (source is not None and mkfs == "none"):
        raise UsageError("a disk has either a parent, or a new file system (ext4) with or without content", hint="see disk create --help")
    path = Path(path)
    if mkfs == "ext4":
        with content(session, source, path) as directory:
            wanted = size or (size_for(directory) if directory is not None else 0)
            _check_given(wanted)
            create_files(path, wanted, fill=lambda data, index: make_ext4(data, index, wanted, directory, epoch=epoch))
        return info(path)
    below, least = None, 0
    if parent is not None:
        digest, image = find_disk(session.store, parent)
        below, least = Parent(session.store.url, digest), load_disk_config(session.store, image).virtual_size
    wanted = size or least
    _check_given(wanted)
    if wanted < least:
        raise UsageError(f"{parent} has {least} bytes, a disk on it cannot have {wanted}")
    create_files(path, wanted, below)
    return info(path)


def _check_given(size: int) -> None:
    if not size:
        raise UsageError("how large?", hint="give --size")
    check_size(size)


def branch(session: Session, text: str, paths: Sequence[str | Path]) -> Branched:
    """Make writable disks on one sealed disk, one in each new directory. They share what is below and record only what changes."""
    digest, image = find_disk(session.store, text)
    size = load_disk_config(session.store, image).virtual_size
    for path in paths:
        create_files(Path(path), size, Parent(session.store.url, digest))
    return Branched(text, digest, tuple(str(path) for path in paths))


def info(path: str | Path) -> DiskInfo:
    """What a writable disk is, and whether somebody serves it."""
    path = Path(path)
    state = read_state(path)
    server = served(path)
    uri = ""
    if server is not None:
        try:
            uri = str(server.status()["uri"])
        finally:
            server.close()
    used = sum(item.stat().st_blocks * 512 for item in path.iterdir() if item.suffix in (".data", ".index"))
    parent = state.parent
    return DiskInfo(
        str(path), state.virtual_size, parent.digest if parent else None, parent.store if parent else "", len(state.frozen), used, uri
    )


def attach(
    session: Session,
    path: str | Path,
    *,
    unix: Path | None = None,
    port: int | None = None,
    read_only: bool = False,
    ready: Callable[[Attached], None] = lambda attached: None,
) -> None:
    """Serve a writable disk over NBD until SIGTERM, SIGINT or ``detach``; for a program's main thread. ``ready`` is told where, once clients can connect.

    Listens on ``unix`` (default: ``nbd.sock`` in the disk's directory), or on the loopback's ``port``.
    """
    path = Path(path).absolute()
    with opened(session, path) as disk:
        if disk.recovered:
            session.progress.warning(f"{path}: {disk.recovered}: cut off; nothing that was flushed is lost")
        chosen = unix if unix or port is not None else path / SOCKET
        serve_disk(
            disk, unix=chosen, port=port, read_only=read_only, progress=session.progress,
            ready=lambda uri: ready(Attached(str(path), uri, disk.recovered)),
        )  # fmt: skip


def detach(path: str | Path) -> DiskInfo:
    """End the server of a disk; everything that was written is durable then. NotFound if nobody serves it."""
    path = Path(path)
    read_state(path)
    server = served(path)
    if server is None:
        raise NotFound(f"nobody serves {path}")
    try:
        server.stop()
    finally:
        server.close()
    return info(path)


def snapshot(path: str | Path) -> Snapshot:
    """Freeze what was written to a disk so far, attached or not; it goes on in a new generation. Consistent as after a power loss at this moment."""
    with owner_of(Path(path)) as owner:
        state = owner.snapshot()
    return Snapshot(str(path), state.frozen)


def commit(session: Session, path: str | Path, name: str, *, format: str = "zfile", fs_type: str = "") -> Sealed:
    """Freeze a disk, attached or not, publish it as ``name``, and let it go on on top of that.

    What was written since the last commit becomes one layer. UsageError for an unknown format.
    """
    name = check_ref(name)
    if format not in FORMATS:
        raise UsageError(f"unknown layer format {format!r}", hint=f"one of {', '.join(FORMATS)}")
    path = Path(path)
    with owner_of(path) as owner:
        state = owner.snapshot()
        layers, size = below(session, state.parent)
        new: tuple[DiskLayer, ...] = ()
        if state.frozen or size != state.virtual_size:
            new = (_seal(session, path, state, layers, format, fs_type),)
            layers = (*layers, *new)
        made = publish_as(session, name, layers, state.virtual_size, {"format": format}, new)
        owner.rebase(state.parent, Parent(session.store.url, made.digest), state.frozen)
    return made


def publish_as(
    session: Session, name: str, layers: Sequence[DiskLayer], size: int, recipe: Mapping[str, Any], new: Sequence[DiskLayer]
) -> Sealed:
    """Publish a disk made of layers that are in the store, and name it. ``new``: those that were put there for it."""
    digest = publish_disk(session.store, layers, DiskConfig(size, name, recipe, _BUILDER))
    set_tag(session.store, name, digest)
    added = sum(layer.blob.size + layer.pieces.size for layer in new)
    return Sealed(name, digest, len(layers), size, added)


def find_disk(store: Store, text: str) -> tuple[Digest, DiskImage]:
    """The sealed disk that ``text`` names. UsageError if it names something else."""
    digest, found = resolve_any(store, text)
    if not isinstance(found, DiskImage):
        raise UsageError(f"{text} is no disk", hint="dsec-layers ls shows what is; disk create --from makes a disk of it")
    return digest, found


@contextmanager
def pieces(session: Session) -> Iterator[PieceOpener]:
    """Where this session's disks get their pieces."""
    with open_pieces(session.cache, session.progress) as opener:
        yield opener


@contextmanager
def opened(session: Session, path: Path) -> Iterator[LocalDisk]:
    """A writable disk, open."""
    parent = read_state(path).parent
    if parent is None:
        with LocalDisk(path, _no_parent) as disk:
            yield disk
        return
    with pieces(session) as opener, LocalDisk(path, lambda parent: _open_parent(session, parent, opener)) as disk:
        yield disk


def _no_parent(parent: Parent) -> StoredDisk:
    raise Conflict("the disk was committed just now", hint="try again")


def _open_parent(session: Session, parent: Parent, opener: PieceOpener) -> StoredDisk:
    store = store_of(session, parent)
    return StoredDisk(store, load_disk(store, parent.digest).layers, opener)


def store_of(session: Session, parent: Parent) -> Store:
    """The store that holds a sealed disk."""
    return session.store if parent.store == session.store.url else open_store(parent.store, create=False)


def below(session: Session, parent: Parent | None) -> tuple[tuple[DiskLayer, ...], int]:
    """The layers of the sealed disk below, which are in this session's store then, and its size in bytes; 0 for none."""
    if parent is None:
        return (), 0
    if parent.store != session.store.url:
        copy_object(store_of(session, parent), session.store, parent.digest, progress=session.progress)
    image = load_disk(session.store, parent.digest)
    return image.layers, load_disk_config(session.store, image).virtual_size


def _seal(session: Session, path: Path, state: DiskState, below: Sequence[DiskLayer], format: str, fs_type: str) -> DiskLayer:
    """One layer of a disk's frozen generations. The same input gives the same blob."""
    parent = below[-1].uuid if below else NIL_UUID
    with GenerationReader(path, state.frozen) as reader:
        layers = reader.layers or [LsmtLayer(Header(Flags.UPPER_DATA), no_segments(), ())]
        layers[-1] = replace(layers[-1], header=replace(layers[-1].header, virtual_size=state.virtual_size))
        uuid = content_uuid(layers, parent)
        writes = merge(layers, Packing(uuid, parent, zfile=PACKINGS[format], tar=True))
        return publish_layer(session.store, writes, spool=path, uuid=uuid, fs_type=fs_type, progress=session.progress)
