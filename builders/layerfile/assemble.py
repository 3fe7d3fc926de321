"""The inputs of a layer file as trees and content: files copied from the host, and the writable layers that steps left, stacked and cleaned."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.excludes import Excludes
from dsec_layers.builders.layerfile.recipe import Copy
from dsec_layers.builders.layerfile.scrub import Removed, Rule, scrub_tree
from dsec_layers.builders.names import Overrides, apply_overrides
from dsec_layers.builders.overlay.stack import overlay_xattr, stack_uppers
from dsec_layers.builders.overlay.trees import Lookup, cut_to_prefix, directory_like, drop_marks, drop_origins, exclude, leading, rooted
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.builders.sources.scan import Directory
from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError, NotFound, UsageError
from dsec_layers.progress import SILENT, Progress

__all__ = ["Finish", "HashSink", "ingest_copies", "ingest_layers", "input_key", "resolve_input"]

_PIECE: Final = 1 << 20


def resolve_input(directory: Path, text: str) -> Path:
    """The host path that a layer file in ``directory`` means. A relative one stays inside that directory, links followed; an absolute one is taken at its word.

    Raises NotFound, UsageError.
    """
    try:
        found = (directory / text).resolve(strict=True)
    except FileNotFoundError as error:
        raise NotFound(f"no input {text!r} beside the layer file") from error
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the input {text!r} cannot be reached: {error}") from error
    if not text.startswith("/") and not found.is_relative_to(directory.resolve()):
        raise UsageError(f"the input {text!r} leads out of the layer file's directory", hint="an absolute path says that this is meant")
    return found


def ingest_copies(copies: Sequence[Copy], directory: Path, below: Lookup, sink: ContentSink, progress: Progress = SILENT) -> Tree:
    """Read what a layer file copies into one tree; a later copy lies over an earlier one."""
    trees = []
    for copy in copies:
        path = resolve_input(directory, copy.source)
        overrides = Overrides(*copy.owner)
        if path.is_dir():
            tree = DirectorySource(path, excludes=copy.excludes, overrides=overrides).ingest(sink, progress)
            if copy.mode is not None:
                _set_mode(tree, copy.mode)
            trees.append(rooted(tree, copy.to, below))
        else:
            trees.append(_one_file(path, copy, below, sink))
            apply_overrides(Tree(_last(trees[-1], copy.to)), overrides)
    return stack_uppers(trees) if trees else Tree()


@dataclass(frozen=True, slots=True)
class Finish:
    """What is done to the stacked layers before they are packed.

    ``rules``, ``keep``: see ``scrub_tree``. ``excludes``: patterns of paths. ``flatten``: there is nothing below, so whiteouts mean nothing. ``prefix``: of a toolkit,
    all that is kept.
    """

    rules: tuple[Rule, ...] = ()
    keep: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    flatten: bool = False
    prefix: str = ""


def ingest_layers(
    ground: Path | None,
    uppers: Sequence[Path],
    finish: Finish,
    below: Lookup,
    sink: ContentSink,
    progress: Progress = SILENT,
    *,
    report: Callable[[list[Removed], list[str]], None] = lambda removed, outside: None,
) -> Tree:
    """Stack writable layers (lowest first), scrub them, put them on the written-out source ``ground``, and read what is left.

    ``report`` is told what was scrubbed, and what changed outside a toolkit's prefix.
    """
    with ExitStack() as stack:

        def opened(path: Path) -> Directory:
            return stack.enter_context(Directory(path, overlay_xattr, whiteouts=True))

        directories = [opened(path) for path in (*([ground] if ground else []), *uppers)]
        scans = [directory.scan() for directory in directories]
        written = [scan.tree for scan in scans[1 if ground else 0 :]]
        tree = stack_uppers(written)
        drop_origins(tree)
        removed = scrub_tree(tree, finish.rules, keep=finish.keep, below=below)
        tree = stack_uppers([*([scans[0].tree] if ground else []), *([tree] if written else [])])
        if finish.excludes:
            exclude(tree, Excludes(finish.excludes))
        report(removed, cut_to_prefix(tree, finish.prefix) if finish.prefix else [])
        if finish.flatten:
            drop_marks(tree)
        alive = {inode for _, inode in tree.walk()}
        due = [(directory, file) for directory, scan in zip(directories, scans, strict=True) for file in scan.files if file.inode in alive]
        with progress.task("layer", total=sum(file.inode.size for _, file in due)) as task:
            for directory, file in due:
                directory.feed(file, sink)
                task.advance(file.inode.size)
    return tree


class HashSink:
    """A content sink that keeps nothing but a digest of each file."""

    def __init__(self) -> None:
        self.digests: dict[Inode, bytes] = {}

    def whole(self, inode: Inode, data: Buffer) -> None:
        """Hash a file."""
        inode.size = len(data)
        self.digests[inode] = blake3(data).digest()

    def stream(self, inode: Inode, size: int, pieces: Iterable[Buffer | int]) -> None:
        """Hash a file in pieces; a hole counts as the zeros it reads as."""
        digest = blake3()
        for piece in pieces:
            if isinstance(piece, int):
                _hash_zeros(digest, piece)
            else:
                digest.update(piece)
        inode.size = size
        self.digests[inode] = digest.digest()


def input_key(ingest: Callable[[ContentSink, Progress], Tree], epoch: int | None, progress: Progress = SILENT) -> str:
    """A hex digest of everything of an input that gets into a layer: names, attributes, times (none later than ``epoch``), content."""
    sink = HashSink()
    tree = ingest(sink, progress)
    numbers: dict[Inode, int] = {}
    digest = blake3()
    for path, inode in tree.walk():
        number = numbers.setdefault(inode, len(numbers))
        time = (inode.mtime, inode.mtime_ns) if epoch is None else min((inode.mtime, inode.mtime_ns), (epoch, 0))
        link = inode.data if stat.S_ISLNK(inode.mode) else None
        fields = (path, number, inode.mode, inode.uid, inode.gid, time, inode.rdev, inode.xattrs, link, inode.size, sink.digests.get(inode))
        digest.update(repr(fields).encode())
    return digest.hexdigest()


def _hash_zeros(digest: blake3, count: int) -> None:
    zeros = bytes(min(count, _PIECE))
    while count:
        part = min(count, len(zeros))
        digest.update(zeros[:part])
        count -= part


def _one_file(path: Path, copy: Copy, below: Lookup, sink: ContentSink) -> Tree:
    """The tree of a single copied file."""
    head, _, name = os.fsencode(copy.to).strip(b"/").rpartition(b"/")
    if not name:
        raise UsageError(f"the file {copy.source!r} cannot be copied to /")
    result = Tree(directory_like(below(b"")))
    holder = leading(result.root, head, below)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise InputError(f"{copy.source!r} is neither a file nor a directory")
        mode = before.st_mode if copy.mode is None else stat.S_IFREG | copy.mode
        inode = Inode(mode, before.st_uid, before.st_gid, *divmod(before.st_mtime_ns, 1_000_000_000))
        sink.stream(inode, before.st_size, _pieces(fd, before.st_size, copy.source))
    finally:
        os.close(fd)
    assert holder.children is not None
    holder.children[name] = inode
    return result


def _pieces(fd: int, size: int, what: str) -> Iterator[Buffer | int]:
    at = 0
    while at < size:
        data = os.pread(fd, min(_PIECE, size - at), at)
        if not data:
            raise InputError(f"{what!r} changed while it was read")
        at += len(data)
        yield data


def _last(tree: Tree, place: str) -> Inode:
    inode = tree.root
    for part in os.fsencode(place).strip(b"/").split(b"/"):
        assert inode.children is not None
        inode = inode.children[part]
    return inode


def _set_mode(tree: Tree, mode: int) -> None:
    for _, inode in tree.walk():
        if stat.S_ISREG(inode.mode):
            inode.mode = stat.S_IFREG | mode
