"""Whole blobs in and out of a store, verified."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from dsec_layers.digest import Buffer, Digest, sha256_digest
from dsec_layers.errors import CorruptError, LimitError
from dsec_layers.store.base import BlobInfo, Store

__all__ = ["PIECE", "put_bytes", "put_stream", "read_ahead", "read_blob", "read_pieces"]

PIECE: Final = 4 << 20
"""Bytes asked for at once when a whole blob is streamed."""


def put_bytes(store: Store, data: Buffer) -> BlobInfo:
    """Store ``data`` as a blob."""
    with store.writer() as writer:
        writer.write(data)
        return writer.commit()


def put_stream(store: Store, pieces: Iterable[Buffer], expected: Digest | None = None) -> BlobInfo:
    """Store pieces, in order, as one blob. CorruptError, and nothing stored, if its digest is not ``expected``."""
    with store.writer() as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.commit(expected)


def read_blob(store: Store, digest: Digest, *, limit: int, size: int | None = None) -> bytes:
    """A whole blob, its digest checked. LimitError beyond ``limit`` bytes, CorruptError if it has not ``size`` bytes or other bytes than its digest says."""
    if size is None:
        size = store.stat(digest).size
    elif PIECE < size <= limit and (found := store.stat(digest).size) != size:
        # A read makes room for all it asks for: no memory is taken for bytes that are not there.
        raise CorruptError(f"{digest} in {store.url} has {found} bytes, not {size}")
    if size > limit:
        raise LimitError(f"{digest} has {size} bytes, at most {limit} are read here")
    data = store.read(digest, 0, size)
    if sha256_digest(data) != digest:
        store.suspect(digest)
        raise CorruptError(f"{digest} in {store.url}: the bytes do not match the digest")
    return data


def read_pieces(store: Store, digest: Digest, size: int, piece: int = PIECE) -> Iterator[bytes]:
    """A blob of ``size`` bytes in pieces. CorruptError after the last if the whole did not match its digest."""
    state = hashlib.sha256()
    for offset in range(0, size, piece):
        data = store.read(digest, offset, min(piece, size - offset))
        state.update(data)
        yield data
    if f"sha256:{state.hexdigest()}" != digest:
        store.suspect(digest)
        raise CorruptError(f"{digest} in {store.url}: the bytes do not match the digest")


def read_ahead(store: Store, digest: Digest, size: int, piece: int = PIECE, ahead: int = 3) -> Iterator[bytes]:
    """As ``read_pieces``, with ``ahead`` more pieces on their way; unverified, for a writer that is told which digest to expect."""
    ranges = ((offset, min(piece, size - offset)) for offset in range(0, size, piece))
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(ahead, thread_name_prefix="read-ahead") as pool:
        try:
            for offset, length in ranges:
                waiting.append(pool.submit(store.read, digest, offset, length))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
