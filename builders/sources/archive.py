"""A tar archive, plain or compressed, as a source: a file, or any stream that is read once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.names import Limits, Overrides, apply_overrides, shown
from dsec_layers.builders.sources.base import ImageConfig
from dsec_layers.builders.sources.inputs import Where, opened, tar_reader
from dsec_layers.builders.sources.merge import merge_tar
from dsec_layers.descriptors import OpenFile
from dsec_layers.erofs.tree import Tree
from dsec_layers.errors import InputError
from dsec_layers.progress import SILENT, Progress

__all__ = ["TarSource", "file_stat", "warn_of_oddities"]


class TarSource:
    """One tar archive. Whiteouts in it have nothing to delete and are left out."""

    kind: Final = "tar"

    def __init__(self, where: Where, name: str = "", *, overrides: Overrides | None = None, limits: Limits | None = None) -> None:
        self._where = where
        self._name = name or (str(where) if isinstance(where, Path) else "the tar stream")
        self._overrides = overrides or Overrides()
        self._limits = limits or Limits()
        self._used = False

    @property
    def image_config(self) -> ImageConfig | None:
        """A tar has none."""
        return None

    def ingest(self, sink: ContentSink, progress: Progress = SILENT) -> Tree:
        """Read the archive: content goes to ``sink``, the tree is returned. Raises InputError or LimitError."""
        if self._used:
            raise InputError(f"{self._name} was read already and cannot be read again")
        with opened(self._where, self._name) as source, progress.task(self._name, total=source.size) as task:
            self._used = source.size is None
            with tar_reader(source, self._name, limits=self._limits, advance=task.advance) as reader:
                tree = merge_tar(reader, sink, self._limits)
            warn_of_oddities(progress, self._name, reader.dropped, reader.whiteouts)
        apply_overrides(tree, self._overrides)
        return tree

    def describe(self) -> dict[str, Any]:
        """Kind, name and, for a file, size, time and inode."""
        about = {"kind": self.kind, "name": self._name}
        if isinstance(self._where, Path | OpenFile):
            about["stat"] = file_stat(self._where)
        return about


def warn_of_oddities(progress: Progress, name: str, dropped: set[bytes], whiteouts: int) -> None:
    """Say which extended attributes were left out, and that there are devices which overlayfs takes for whiteouts."""
    if whiteouts:
        progress.warning(
            f"{name}: {whiteouts} character device(s) 0/0 were taken as they are; a mounted environment hides them, as overlayfs does with whiteouts"
        )
    if dropped:
        listed = ", ".join(shown(item) for item in sorted(dropped)[:5]) + (", …" if len(dropped) > 5 else "")
        progress.warning(f"{name}: attributes that no layer can carry were left out: {listed}")


def file_stat(file: Path | OpenFile) -> str:
    """Size, times and inode of a file in one string that changes when the file does, as far as stat(2) tells. Raises InputError."""
    try:
        info = os.fstat(file.fd) if isinstance(file, OpenFile) else file.stat()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    return f"{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}:{info.st_dev}:{info.st_ino}"
