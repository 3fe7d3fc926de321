"""Copy objects between stores: push and pull.

Only blobs that the target lacks move. Each is verified on its way and becomes visible whole; blobs come before the manifest that names them, manifests before
the environment, and a ref last: whatever moment it is stopped at, the target holds nothing that is not complete, and the next copy goes on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dsec_layers.digest import Buffer, Digest
from dsec_layers.errors import CorruptError, Interrupted, NotFound
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.manifest import MAX_JSON, Environment
from dsec_layers.progress import SILENT, Progress, Task
from dsec_layers.registry.objects import hold, reach, set_tag
from dsec_layers.store.base import Store
from dsec_layers.store.transfer import put_bytes, put_stream, read_ahead, read_blob

__all__ = ["Copied", "copy_object"]


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did: the object, blobs and bytes that moved, blobs and bytes that were there."""

    digest: Digest
    copied: int
    copied_bytes: int
    present: int
    present_bytes: int


def copy_object(
    source: Store, target: Store, digest: Digest, *, name: str | None = None, jobs: int | None = None, progress: Progress = SILENT
) -> Copied:
    """Copy an object and everything below it, and point ``name`` in the target at it. ``jobs``: blobs that move at once.

    Errors of either store pass through; what was copied by then stays.
    """
    objects = list(reach(source, digest))
    blobs = {item.digest: item for _, value in objects if not isinstance(value, Environment) for item in value.blobs()}
    total = sum(item.size for item in blobs.values())
    with progress.task(f"Copying {digest[7:19]}", total=total) as task:
        moved = _move_all(_Mover(source, target, task), list(blobs.values()), jobs)
    for member, value in objects:
        hold(target, value)
        put_bytes(target, read_blob(source, member, limit=MAX_JSON))
    if name is not None:
        set_tag(target, name, digest)
    moved_bytes = sum(item.size for item in moved)
    return Copied(digest, len(moved), moved_bytes, len(blobs) - len(moved), total - moved_bytes)


def _move_all(mover: _Mover, items: list[Descriptor], jobs: int | None) -> list[Descriptor]:
    limit = jobs or min(4, mover.target.capabilities.connections, mover.source.capabilities.connections)
    with ThreadPoolExecutor(limit, thread_name_prefix="copy") as pool:
        try:
            return [item for item, moved in zip(items, pool.map(mover.move, items), strict=True) if moved]
        except BaseException:
            mover.stopping.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Mover:
    """Moves single blobs, in any number of threads, until ``stopping`` is set."""

    def __init__(self, source: Store, target: Store, task: Task) -> None:
        self.source = source
        self.target = target
        self.stopping = threading.Event()
        self._task = task

    def move(self, item: Descriptor) -> bool:
        """Make sure that the target has a blob. Whether it had to be moved."""
        try:
            if self.target.touch(item.digest).size == item.size:
                self._task.advance(item.size)
                return False
        except NotFound:
            pass
        try:
            put_stream(self.target, self._pieces(item), item.digest)
        except CorruptError:
            self.source.suspect(item.digest)  # once more, from another connection or replica
            put_stream(self.target, self._pieces(item), item.digest)
        return True

    def _pieces(self, item: Descriptor) -> Iterator[Buffer]:
        for piece in read_ahead(self.source, item.digest, item.size):
            if self.stopping.is_set():
                raise Interrupted("the copy was stopped")
            yield piece
            self._task.advance(len(piece))
