"""A directory as a source: a plain tree, or the upper directories of overlayfs mounts stacked into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.excludes import Excludes
from dsec_layers.builders.names import Limits, Overrides, apply_overrides, keeps_xattr
from dsec_layers.builders.overlay.stack import overlay_xattr, stack_uppers
from dsec_layers.builders.sources.archive import warn_of_oddities
from dsec_layers.builders.sources.base import ImageConfig
from dsec_layers.builders.sources.scan import Directory, FileAt
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.progress import SILENT, Progress

__all__ = ["DirectorySource", "OverlaySource"]


class DirectorySource:
    """A directory tree. ``excludes``: patterns (see ``Excludes``); ``one_filesystem``: mount points are taken as empty directories."""

    kind: Final = "directory"

    def __init__(
        self,
        path: Path,
        *,
        excludes: Iterable[str] = (),
        one_filesystem: bool = False,
        overrides: Overrides | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._path = path
        self._excludes = Excludes(excludes)
        self._one_filesystem = one_filesystem
        self._overrides, self._limits = overrides or Overrides(), limits or Limits()

    @property
    def image_config(self) -> ImageConfig | None:
        """A directory has none."""
        return None

    def ingest(self, sink: ContentSink, progress: Progress = SILENT) -> Tree:
        """Read the tree: content goes to ``sink``. Raises InputError for what cannot be read or changes meanwhile, LimitError."""
        dropped: set[bytes] = set()

        def keep(path: bytes, is_dir: bool, name: bytes, value: bytes) -> bytes | None:
            if keeps_xattr(name):
                return name
            dropped.add(name)
            return None

        directory = Directory(
            self._path, keep, excludes=self._excludes, one_filesystem=self._one_filesystem, limits=self._limits
        )  # fmt: skip
        with directory:
            scan = directory.scan()
            _feed_all(directory, scan.files, sink, progress, str(self._path))
        warn_of_oddities(progress, str(self._path), dropped, directory.whiteouts)
        apply_overrides(scan.tree, self._overrides)
        return scan.tree

    def describe(self) -> dict[str, Any]:
        """Kind and name; nothing short of reading it tells what a directory holds."""
        return {"kind": self.kind, "name": str(self._path)}


class OverlaySource:
    """Upper directories of overlayfs mounts, lowest first, as one tree that keeps whiteouts and opaque directories for the layer below.

    A whiteout is a character device 0/0, an opaque directory has ``trusted.overlay.opaque`` = ``y``, a directory with whiteouts ``trusted.overlay.origin``, empty.
    What else overlayfs notes down for itself is left out.
    """

    kind: Final = "overlay"

    def __init__(
        self, uppers: Sequence[Path], *, excludes: Iterable[str] = (), overrides: Overrides | None = None, limits: Limits | None = None
    ) -> None:
        self._uppers = tuple(uppers)
        self._excludes = Excludes(excludes)
        self._overrides, self._limits = overrides or Overrides(), limits or Limits()

    @property
    def image_config(self) -> ImageConfig | None:
        """An upper has none."""
        return None

    def ingest(self, sink: ContentSink, progress: Progress = SILENT) -> Tree:
        """Stack the uppers and read what is left of each: content goes to ``sink``. Raises InputError, LimitError."""
        with ExitStack() as stack:
            directories = [
                stack.enter_context(Directory(path, overlay_xattr, excludes=self._excludes, whiteouts=True, limits=self._limits))
                for path in self._uppers
            ]
            scans = [directory.scan() for directory in directories]
            tree = stack_uppers([scan.tree for scan in scans])
            alive = _inodes(tree)
            for path, directory, scan in zip(self._uppers, directories, scans, strict=True):
                _feed_all(directory, [file for file in scan.files if file.inode in alive], sink, progress, str(path))
        apply_overrides(tree, self._overrides)
        return tree

    def describe(self) -> dict[str, Any]:
        """Kind and names."""
        return {"kind": self.kind, "name": ", ".join(map(str, self._uppers))}


def _inodes(tree: Tree) -> set[Inode]:
    return {inode for _, inode in tree.walk()}


def _feed_all(directory: Directory, files: Sequence[FileAt], sink: ContentSink, progress: Progress, name: str) -> None:
    with progress.task(name, total=sum(file.inode.size for file in files)) as task:
        for file in files:
            directory.feed(file, sink)
            task.advance(file.inode.size)
