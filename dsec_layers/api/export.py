"""``export``: a layer or environment as a tar, a flat EROFS image or an OCI layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dsec_layers.api.session import Session
from dsec_layers.builders.output.oci import write_image
from dsec_layers.builders.output.tar import write_tar
from dsec_layers.errors import Conflict, NotFound, UsageError
from dsec_layers.fsio import map_os_error, publish, publish_directory
from dsec_layers.registry.flat import write_flat

__all__ = ["FORMATS", "Exported", "export"]

FORMATS = ("tar", "erofs", "oci")
_STREAMS = {"tar": write_tar, "erofs": write_flat}


@dataclass(frozen=True, slots=True)
class Exported:
    """What ``export`` wrote, in bytes."""

    ref: str
    format: str
    output: str
    size: int


def export(session: Session, text: str, output: Path | BinaryIO, *, format: str = "tar") -> Exported:
    """Write the object ``text`` names to ``output``: a path that must not exist, or for tar and erofs a binary stream.

    ``tar`` and ``erofs`` are the merged view; ``oci`` is an image layout directory with one tar layer for each layer, whiteouts in OCI form.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown export format {format!r}", hint=f"one of {', '.join(FORMATS)}")
    if not isinstance(output, Path):
        if format == "oci":
            raise UsageError("an OCI layout is a directory: give a path")
        return Exported(text, format, "-", _STREAMS[format](session.store, text, output, session.progress))
    if os.path.lexists(output):
        raise Conflict(f"{output} exists already", hint="remove it or choose another name")
    if not output.parent.is_dir():
        raise NotFound(f"{output.parent} is no directory that {output.name} could be written to", hint=f"mkdir -p {output.parent}")
    try:
        if format == "oci":
            with publish_directory(output) as work:
                size = write_image(session.store, text, work, session.progress)
        else:
            with publish(output, replace=False) as stream:
                size = _STREAMS[format](session.store, text, stream, session.progress)
    except OSError as error:
        raise map_os_error(error, f"writing {output}") from error
    return Exported(text, format, str(output), size)
