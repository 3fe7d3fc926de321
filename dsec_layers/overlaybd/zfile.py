"""Read a ZFile: random access to bytes that are stored as independently compressed blocks.

A read touches only the blocks it needs; adjoining blocks come with one read of the source and are decompressed in a batch. Every block that carries a
checksum is verified, every time it is read from the source.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

import numpy as np
import zstandard
from crc32c import crc32c
from lz4.block import LZ4BlockError
from lz4.block import decompress as lz4_decompress

from dsec_layers.blocksource import BlockSource, check_range
from dsec_layers.errors import ImageError
from dsec_layers.overlaybd.zfile_format import BLOCK_CRC, CRC_SEED, MAX_BLOCKS, SPACE, Algorithm, Flags, ZHeader, parse_table

__all__ = ["BlockCache", "ZFile"]

_ONES = 0xFFFFFFFF
_RUN = 1 << 20  # bytes decompressed from one read of the source
_CACHED = 16  # blocks; a longer read is a scan and would only wash the cache out
_idents = itertools.count()


class BlockCache:
    """Decompressed blocks, the least recently used given up first. One may serve any number of ZFiles and threads."""

    def __init__(self, capacity: int = 32 << 20) -> None:
        self.capacity = capacity
        self.used = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: int) -> bytes | None:
        """The block stored under ``key``, if it is still here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: int, block: bytes) -> None:
        """Keep ``block``, at the expense of others; a block larger than the whole cache is not kept."""
        size = len(block)
        if size > self.capacity:
            return
        with self._lock:
            old = self._blocks.pop(key, None)
            self.used += size - (len(old) if old is not None else 0)
            self._blocks[key] = block
            while self.used > self.capacity:
                self.used -= len(self._blocks.popitem(last=False)[1])


class ZFile:
    """The bytes inside a ZFile, as a BlockSource. Construction reads the header (or trailer) and the jump table; raises ImageError."""

    def __init__(self, source: BlockSource, cache: BlockCache | None = None) -> None:
        self.header = header = _read_header(source)
        self.size = header.size
        self._source = source
        self._starts = parse_table(source.pread(header.index_offset, 4 * header.blocks), header)
        self._cache = cache if cache is not None else BlockCache()
        self._ident = next(_idents) << 32
        self._shift = header.block_size.bit_length() - 1
        self._mask = header.block_size - 1
        self._last = header.blocks - 1
        self._last_size = header.size - self._last * header.block_size
        self._overhead = BLOCK_CRC if header.crc else 0
        self._idle: list[zstandard.ZstdDecompressor] = []  # a decompressor serves one thread at a time

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource. Raises ImageError for a block that does not match its checksum or does not decompress to its size."""
        check_range(offset, length, self.size)
        if not length:
            return b""
        first, begin = offset >> self._shift, offset & self._mask
        last, end = (offset + length - 1) >> self._shift, ((offset + length - 1) & self._mask) + 1
        if first == last:
            block = self._block(first)
            return block if length == len(block) else block[begin:end]
        blocks = self._few(first, last + 1) if last - first < _CACHED else self._many(first, last + 1)
        if begin:
            blocks[0] = blocks[0][begin:]
        if end < len(blocks[-1]):
            blocks[-1] = blocks[-1][:end]
        return b"".join(blocks)

    def _block(self, number: int) -> bytes:
        key = self._ident + number
        block = self._cache.get(key)
        if block is None:
            start = self._starts.item(number)
            raw = self._source.pread(start, self._starts.item(number + 1) - start)
            view: bytes | memoryview = raw
            if self._overhead:
                view = memoryview(raw)[:-BLOCK_CRC]
                if crc32c(view, CRC_SEED) ^ _ONES != int.from_bytes(raw[-BLOCK_CRC:], "little"):
                    raise ImageError(f"ZFile block {number}: checksum mismatch")
            block = self._decompress(number, [view])[0]
            self._cache.put(key, block)
        return block

    def _few(self, first: int, end: int) -> list[bytes]:
        """Blocks through the cache; each run of missing ones is read at once."""
        found = [self._cache.get(self._ident + number) for number in range(first, end)]
        blocks: list[bytes] = []
        for missing, run in itertools.groupby(found, lambda block: block is None):
            if not missing:
                blocks.extend(block for block in run if block is not None)
                continue
            at = first + len(blocks)
            fresh = self._many(at, at + len(list(run)))
            for number, block in enumerate(fresh, at):
                self._cache.put(self._ident + number, block)
            blocks.extend(fresh)
        return blocks

    def _many(self, first: int, end: int) -> list[bytes]:
        """Blocks from the source, in reads of about _RUN bytes of content."""
        blocks: list[bytes] = []
        step = max(1, _RUN >> self._shift)
        for low in range(first, end, step):
            blocks += self._run(low, min(low + step, end))
        return blocks

    def _run(self, first: int, end: int) -> list[bytes]:
        starts = self._starts[first : end + 1]
        base = int(starts[0])
        raw = self._source.pread(base, int(starts[-1]) - base)
        stops = starts[1:] - base - self._overhead
        view = memoryview(raw)
        parts = [view[start:stop] for start, stop in zip((starts[:-1] - base).tolist(), stops.tolist(), strict=True)]
        if self._overhead:
            trailing = np.frombuffer(raw, np.uint8)[stops[:, None] + np.arange(BLOCK_CRC)]
            stored = (trailing.view("<u4").ravel() ^ np.uint32(_ONES)).tolist()
            if [crc32c(part, CRC_SEED) for part in parts] != stored:
                bad = next(i for i, part in enumerate(parts) if crc32c(part, CRC_SEED) != stored[i])
                raise ImageError(f"ZFile block {first + bad}: checksum mismatch")
        return self._decompress(first, parts)

    def _decompress(self, first: int, parts: list[bytes] | list[memoryview] | list[bytes | memoryview]) -> list[bytes]:
        sizes = [self.header.block_size] * len(parts)
        if first + len(parts) > self._last:
            sizes[-1] = self._last_size
        try:
            if self.header.algorithm is Algorithm.LZ4:
                blocks = [lz4_decompress(part, size) for part, size in zip(parts, sizes, strict=True)]
            else:
                blocks = self._unzstd(parts, sizes)
        except (LZ4BlockError, zstandard.ZstdError) as error:
            raise ImageError(f"ZFile: one of the blocks {first} to {first + len(parts) - 1} does not decompress: {error}") from error
        if [len(block) for block in blocks] != sizes:
            raise ImageError(f"ZFile: one of the blocks {first} to {first + len(parts) - 1} decompresses to a wrong size")
        return blocks

    def _unzstd(self, parts: list[bytes] | list[memoryview] | list[bytes | memoryview], sizes: list[int]) -> list[bytes]:
        # The size a frame states is looked at first: the library would allocate whatever it says.
        for part, size in zip(parts, sizes, strict=True):
            if zstandard.frame_content_size(part) not in (size, -1):
                raise zstandard.ZstdError("the frame is for another size")
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = zstandard.ZstdDecompressor()
        blocks = [worker.decompress(part, max_output_size=size) for part, size in zip(parts, sizes, strict=True)]
        self._idle.append(worker)
        return blocks


def _read_header(source: BlockSource) -> ZHeader:
    if source.size < 2 * SPACE:
        raise ImageError(f"ZFile: {source.size} bytes are too few for a header and a trailer")
    header = ZHeader.parse(source.pread(0, SPACE))
    if not header.flags & Flags.HEADER:
        raise ImageError("ZFile header: flags say that it is a trailer")
    if not header.flags & Flags.OVERWRITTEN:
        header = ZHeader.parse(source.pread(source.size - SPACE, SPACE), "ZFile trailer")
        if header.flags & (Flags.HEADER | Flags.DATA | Flags.SEALED) != Flags.DATA | Flags.SEALED:
            raise ImageError(f"ZFile trailer: flags {header.flags:#x} are not those of a finished file")
    if header.blocks > MAX_BLOCKS or header.blocks != -(-header.size // header.block_size):
        raise ImageError(f"ZFile: {header.blocks} blocks of {header.block_size} cannot hold {header.size} bytes")
    if header.index_offset < SPACE + header.dict_size or header.index_offset + 4 * header.blocks > source.size - SPACE:
        raise ImageError("ZFile: the jump table is outside of the file")
    return header
