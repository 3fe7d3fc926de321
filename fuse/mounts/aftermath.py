"""After keeper and worker died together: the group is gone, layers are still mounted, and nobody held their readers back.

Where an absent segment is an empty file, such a reader got EIO, and nothing wrong is in any page cache: the mounts are served again, and whoever asks is told.
Where it is a hole (kernels that take a short read for success, cache/segments.py), a reader may have got zeros that are cached now: those mounts are
*poisoned*. Their absent files are put aside into poisoned/, from which every further read is refused; new mounts of the same layers begin anew; and the
user is told what to unmount.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any, Final

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.linux.mountinfo import read_mounts

__all__ = ["look_for_orphans", "poisoned_folders", "put_aside", "remember_holes", "warnings_of"]

_log = logging.getLogger(__name__)
_HOLES: Final = "holes"


def look_for_orphans(cache: Path) -> list[str]:
    """Mount points of this cache's layers. With no daemon and no group, they are what a dead daemon left."""
    return sorted(mount.target for mount in read_mounts() if mount.kind == "erofs" and mount.target.startswith(f"{cache / 'layers'}/"))


def remember_holes(directory: CacheDirectory, holes: bool) -> None:
    """Note in which form absent segments are made, for the next daemon."""
    marker = directory.state / _HOLES
    if holes:
        marker.touch()
    else:
        marker.unlink(missing_ok=True)


def put_aside(directory: CacheDirectory) -> bool:
    """Move the absent segments that mounts without a group have open out of the way, if they are holes; whether they are."""
    if not (directory.state / _HOLES).exists():
        return False
    folder = directory.root / "poisoned" / os.urandom(4).hex()
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    directory.absent.rename(folder)
    directory.absent.mkdir(mode=0o700)
    directory.reopen()
    return True


def poisoned_folders(directory: CacheDirectory) -> list[Path]:
    """Where absent segments of poisoned mounts are: to be watched, so that readers can be refused. Those of an earlier boot are removed."""
    place = directory.root / "poisoned"
    marker = place / "boot"
    if not place.is_dir():
        return []
    if not marker.exists():
        marker.write_text(directory.boot)
    elif marker.read_text() != directory.boot:
        shutil.rmtree(place)
        return []
    return sorted(path for path in place.iterdir() if path.is_dir())


def warnings_of(aftermath: dict[str, Any], standing: set[str], poisoned: list[str]) -> list[str]:
    """What users must know, as long as it matters. ``aftermath``: ``orphans`` (mount points) and ``holes``; ``standing``: targets mounted now;
    ``poisoned``: mounts made of poisoned layers.
    """
    warnings = []
    left = [target for target in aftermath.get("orphans", ()) if target in standing]
    if left and not aftermath["holes"]:
        warnings.append(
            "the mount daemon and its keeper died together; until they were started again, readers of segments that were not here got I/O errors. "
            f"The mounts are served again: {', '.join(left)}"
        )
    if poisoned:
        warnings.append(
            "the mount daemon and its keeper died together; these mounts may have read zeros since, and are not served any more. "
            f"Unmount them (umount -l TARGET) and mount anew: {', '.join(poisoned)}"
        )
    return warnings
