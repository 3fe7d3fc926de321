"""Write a ZFile from a stream of bytes. The result depends on the bytes and the options alone, not on how they arrive or on the number of workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import zstandard
from lz4.block import compress as lz4_compress

from dsec_layers.digest import Buffer
from dsec_layers.errors import LimitError, UsageError
from dsec_layers.overlaybd.stream import Write, batches
from dsec_layers.overlaybd.zfile_format import MAX_BLOCKS, SPACE, Algorithm, Flags, ZHeader, block_crc, raw_crc32c

__all__ = ["ZFileOptions", "zfile_writes"]

_BATCH = 1 << 20
_MAX_BLOCK = 32768
_ZSTD_LEVEL = 3  # what the official tools use


@dataclass(frozen=True, slots=True)
class ZFileOptions:
    """How to compress: the algorithm, bytes in a block (4, 8, 16 or 32 KiB), whether each block carries a checksum.

    ``rewrite_header`` ends with a write to the start, which saves the reader the trailer; without it the output is strictly sequential.
    ``workers`` threads compress (0: as many as there are processors, at most 4). Raises UsageError.
    """

    algorithm: Algorithm = Algorithm.LZ4
    block_size: int = 4096
    crc: bool = True
    rewrite_header: bool = True
    workers: int = 0

    def __post_init__(self) -> None:
        if self.block_size == 65536:
            # Proved with the official tools: overlaybd-zfile writes such a file and then cannot read it back.
            raise UsageError(
                "ZFile blocks of 64 KiB are not written: the official reader fails on incompressible ones", hint="use 32 KiB or less"
            )
        if self.block_size not in (4096, 8192, 16384, _MAX_BLOCK):
            raise UsageError(f"a ZFile block cannot have {self.block_size} bytes", hint="use 4, 8, 16 or 32 KiB")


def zfile_writes(chunks: Iterable[Buffer], options: ZFileOptions) -> Iterator[Write]:
    """The writes that make a ZFile of the concatenated ``chunks``. Memory use is a few megabytes and 4 bytes a block.

    Raises LimitError when there are more than MAX_BLOCKS blocks.
    """
    header = ZHeader(Flags.FIRST_HEADER, options.algorithm, options.block_size, options.crc)
    yield 0, header.render()
    at, size = SPACE, 0
    lengths: list[bytes] = []
    for content, compressed, table in _compressed(batches(chunks, _BATCH), options):
        size += content
        if -(-size // options.block_size) > MAX_BLOCKS:
            raise LimitError(f"more than {MAX_BLOCKS} blocks of {options.block_size} bytes", hint="use larger blocks")
        lengths.append(table)
        yield at, compressed
        at += len(compressed)
    table = b"".join(lengths)
    trailer = replace(
        header, flags=Flags.TRAILER, index_offset=at, blocks=len(table) // 4, size=size, index_crc=raw_crc32c(table)
    )  # fmt: skip
    yield at, table + trailer.render()
    if options.rewrite_header:
        yield 0, replace(trailer, flags=Flags.FINAL_HEADER).render()


def _compressed(contents: Iterator[bytes], options: ZFileOptions) -> Iterator[tuple[int, bytes, bytes]]:
    """(bytes of content, compressed blocks, their stored lengths as the jump table has them) for each batch, in order."""
    workers = options.workers or min(4, os.cpu_count() or 1)
    pending: deque[Future[tuple[int, bytes, bytes]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="zfile") as pool:
        for content in contents:
            pending.append(pool.submit(_compress, content, options))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _compress(content: bytes, options: ZFileOptions) -> tuple[int, bytes, bytes]:
    view = memoryview(content)
    parts: list[bytes | bytearray | memoryview] = [view[at : at + options.block_size] for at in range(0, len(content), options.block_size)]
    blocks: list[bytes]
    if options.algorithm is Algorithm.LZ4:
        blocks = [lz4_compress(part, store_size=False) for part in parts]
    else:
        # One call for the batch: the interpreter lock is free all the while.
        done = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).multi_compress_to_buffer(parts)
        blocks = [done[i].tobytes() for i in range(len(done))]
    if options.crc:
        blocks = [block + block_crc(block).to_bytes(4, "little") for block in blocks]
    return len(content), b"".join(blocks), np.array([len(block) for block in blocks], "<u4").tobytes()
