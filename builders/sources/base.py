"""What every source offers, and the settings of an imported image that outlive the import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsec_layers.builders.content import ContentSink
from dsec_layers.erofs.tree import Tree
from dsec_layers.progress import SILENT, Progress

__all__ = ["ImageConfig", "Source"]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An OCI image's config. ``document``: all it says, but for ``rootfs``. The rest is what commands run on the image need: ``Env`` in its order, ``WorkingDir``,
    ``User``, platform.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    architecture: str = ""
    os: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """An input of a build."""

    @property
    def kind(self) -> str:
        """``tar``, ``directory``, ``overlay``, ``oci`` or ``docker``."""

    @property
    def image_config(self) -> ImageConfig | None:
        """The config of an image; None for other inputs."""

    def ingest(self, sink: ContentSink, progress: Progress = SILENT) -> Tree:
        """Read it all: content goes to ``sink``, the tree is returned. A stream can be ingested once.

        Raises InputError for malformed or hostile input, LimitError for what no layer can hold; the sink's content is then void.
        """

    def describe(self) -> dict[str, Any]:
        """What it is, as JSON values. ``digest`` (of the image manifest or config) is there if that names the content, ``stat`` (size, times, inode) if a file does."""
