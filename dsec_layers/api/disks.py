"""Verbs on disks: ``disk create``, ``attach``, ``detach``, ``snapshot``, ``commit``, ``branch``, ``info``, ``resize``, and ``verify`` of one that is here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_layers.api.results import Verified
from dsec_layers.api.session import Session
from dsec_layers.builders.unpacked import unpacked
from dsec_layers.digest import Digest
from dsec_layers.disks.attach import Attached, attach
from dsec_layers.disks.background import start_server
from dsec_layers.disks.ext4 import make_ext4, size_for
from dsec_layers.disks.files import DiskFiles, GenerationReader, check_size, create_files
from dsec_layers.disks.owner import owner_of, served
from dsec_layers.disks.place import below, find_disk, opened, store_of
from dsec_layers.disks.sealing import FORMATS, Sealed, check_format, pack_frozen, publish_as
from dsec_layers.disks.state import Parent, read_state
from dsec_layers.errors import Conflict, DsecError, NotFound, UsageError
from dsec_layers.layers.disk import DiskLayer
from dsec_layers.registry.objects import load_disk_config
from dsec_layers.registry.verify import verify as verify_object
from dsec_layers.store.base import check_ref

__all__ = [
    "FORMATS",
    "Attached",
    "Branched",
    "DiskInfo",
    "Sealed",
    "Snapshot",
    "attach",
    "attach_detached",
    "branch",
    "commit",
    "create",
    "detach",
    "info",
    "opened",
    "resize",
    "snapshot",
    "verify",
]

FILE_SYSTEMS: Final = ("none", "ext4")


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
class Snapshot:
    """What ``snapshot`` froze: generations that are local still, from bottom to top."""

    path: str
    frozen: tuple[int, ...]


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
        content = unpacked(session.store, source, path, session.mounted, session.progress) if source is not None else nullcontext()
        with content as directory:
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


def attach_detached(
    session: Session, path: str | Path, *, unix: Path | None = None, port: int | None = None, read_only: bool = False
) -> Attached:
    """Serve a disk as ``attach`` does, in a process of its own that stays. Raises what ``attach`` raises."""
    return start_server(session.store_url, session.cache, Path(path), unix=unix, port=port, read_only=read_only)


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
    check_format(format)
    path = Path(path)
    with owner_of(path) as owner:
        state = owner.snapshot()
        layers, size = below(session, state.parent)
        new: tuple[DiskLayer, ...] = ()
        if state.frozen or size != state.virtual_size:
            new = (pack_frozen(session, path, state, layers, format, fs_type),)
            layers = (*layers, *new)
        made = publish_as(session, name, layers, state.virtual_size, {"format": format}, new)
        owner.rebase(state.parent, Parent(session.store.url, made.digest), state.frozen)
    return made


def resize(path: str | Path, size: int) -> DiskInfo:
    """Give a disk that nobody has open a larger size; what is beyond the old end reads as zeros. UsageError for a smaller one."""
    path = Path(path)
    check_size(size)
    with DiskFiles(path) as files:
        if size < files.state.virtual_size:
            raise UsageError(f"{path} has {files.state.virtual_size} bytes and cannot shrink to {size}", hint="copy it to a smaller one")
        if size > files.state.virtual_size:
            files.begin(virtual_size=size).close()
    return info(path)


def verify(session: Session, path: str | Path) -> Verified:
    """Check a writable disk: its local generations, and every byte of the sealed disk below it."""
    path = Path(path)
    state = read_state(path)
    problems: list[str] = []
    report = None
    try:
        numbers = (*state.frozen, state.upper)
        try:
            with DiskFiles(path) as files:
                for number in numbers:
                    files.open(number).close()  # cuts off what a crash tore, as every opening does
        except Conflict:
            numbers = state.frozen  # it is attached: the upper is its server's affair
        with GenerationReader(path, numbers):
            pass
    except DsecError as error:
        problems.append(error.message)
    if state.parent is not None:
        report = verify_object(store_of(session, state.parent), state.parent.digest, deep=True, progress=session.progress)
        problems += [str(finding) for finding in report.findings]
    digest = state.parent.digest if state.parent else ""
    return Verified(str(path), digest, report.blobs if report else 0, report.bytes if report else 0, tuple(problems))
