"""Read a ZFile: random access to bytes that are stored as independently compressed blocks.

A read touches only the blocks it needs; adjoining blocks come with one read of the source and are decompressed in a batch. Every block that carries a
checksum is verified, every time it is read from the source.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import count, groupby

import zstandard
from crc32c import crc32c
from lz4.block import LZ4BlockError
from lz4.block import decompress as lz4_decompress

from dsec_layers.blocksource import BlockSource, check_range
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.overlaybd.zfile_format import BLOCK_CRC, CRC_GOOD, CRC_SEED, MAX_BLOCKS, SPACE, Algorithm, Flags, ZHeader, parse_table

__all__ = ["BlockCache", "ZFile", "read_header"]

_READ = 1 << 20  # bytes of content fetched with one read of the source
_CACHED = 16 << 10  # bytes; a longer read is a scan and would only wash the cache out
_idents = count()

# One large block that comes and goes teaches glibc to keep freed memory of that size (malloc's dynamic thresholds). Without it, every read of a megabyte
# has its pages given back to the kernel and faulted in again: half the throughput.
bytes(8 << 20)


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
        self.header = header = read_header(source)
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
        self._idle: list[_Unzstd] = []

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
        blocks = self._few(first, last + 1) if length <= _CACHED else self._many(first, last + 1)
        blocks[0] = blocks[0][begin:]
        blocks[-1] = blocks[-1][:end]
        data = b"".join(blocks)
        if len(data) != length:  # no block is larger than it should be, so each has its size if all together do
            raise ImageError(f"ZFile: one of the blocks {first} to {last} decompresses to a wrong size", code=ImageCode.INCONSISTENT)
        return data

    def _block(self, number: int) -> bytes:
        """A block through the cache."""
        key = self._ident + number
        block = self._cache.get(key)
        if block is None:
            start = self._starts.item(number)
            raw = self._source.pread(start, self._starts.item(number + 1) - start)
            size = self._last_size if number == self._last else self.header.block_size
            block = self._unpack(number, memoryview(raw), 0, [len(raw)], size)[0]
            if len(block) != size:
                raise ImageError(f"ZFile block {number}: decompresses to a wrong size", code=ImageCode.INCONSISTENT)
            self._cache.put(key, block)
        return block

    def _few(self, first: int, end: int) -> list[bytes]:
        """Blocks through the cache; each run of missing ones is read at once."""
        found = [self._cache.get(self._ident + number) for number in range(first, end)]
        blocks: list[bytes] = []
        for missing, run in groupby(found, lambda block: block is None):
            if not missing:
                blocks.extend(block for block in run if block is not None)
                continue
            at = first + len(blocks)
            fresh = self._many(at, at + len(list(run)))
            for number, block in enumerate(fresh, at):
                if len(block) == self.header.block_size:
                    self._cache.put(self._ident + number, block)
            blocks.extend(fresh)
        return blocks

    def _many(self, first: int, end: int) -> list[bytes]:
        """Blocks from the source, which is read in large pieces. A block may come out shorter than it should be, never longer."""
        blocks: list[bytes] = []
        step = max(1, _READ >> self._shift)
        for low in range(first, end, step):
            high = min(low + step, end)
            base = self._starts.item(low)
            raw = memoryview(self._source.pread(base, self._starts.item(high) - base))
            ends = (self._starts[low + 1 : high + 1] - base).tolist()
            last = [ends.pop()] if high > self._last else []
            blocks += self._unpack(low, raw, 0, ends, self.header.block_size)
            if last:
                blocks += self._unpack(self._last, raw, self._starts.item(self._last) - base, last, self._last_size)
        return blocks

    def _unpack(self, first: int, raw: memoryview, start: int, ends: list[int], size: int) -> list[bytes]:
        """The blocks that lie in ``raw`` from ``start`` on and are to have ``size`` bytes, verified. This loop is what sequential reading costs."""
        overhead = self._overhead
        unzstd = self._idle_unzstd() if self.header.algorithm is Algorithm.ZSTD else None
        decompress: Callable[[memoryview, int], bytes] = unzstd or lz4_decompress
        blocks: list[bytes] = []
        add = blocks.append
        try:
            for end in ends:
                if overhead and crc32c(raw[start:end], CRC_SEED) != CRC_GOOD:
                    raise ImageError(f"ZFile block {first + len(blocks)}: checksum mismatch", code=ImageCode.BAD_CHECKSUM)
                add(decompress(raw[start : end - overhead], size))
                start = end
        except (LZ4BlockError, zstandard.ZstdError) as error:
            raise ImageError(f"ZFile block {first + len(blocks)}: {error}", code=ImageCode.BAD_ENCODING) from error
        if unzstd is not None:
            self._idle.append(unzstd)
        return blocks

    def _idle_unzstd(self) -> _Unzstd:
        """A zstd decompressor that nobody uses: one serves one thread at a time."""
        try:
            return self._idle.pop()
        except IndexError:
            return _Unzstd()


class _Unzstd:
    """Decompresses zstd blocks."""

    def __init__(self) -> None:
        self._decompress = zstandard.ZstdDecompressor().decompress

    def __call__(self, part: memoryview, size: int) -> bytes:
        # The size a frame states is looked at first: the library would allocate whatever it says.
        if zstandard.frame_content_size(part) not in (size, -1):
            raise zstandard.ZstdError("the frame is for another size")
        return self._decompress(part, max_output_size=size)


def read_header(source: BlockSource) -> ZHeader:
    """What a ZFile says of itself: its header, or its trailer if the header was not rewritten at the end. Raises ImageError."""
    if source.size < 2 * SPACE:
        raise ImageError(f"ZFile: {source.size} bytes are too few for a header and a trailer", code=ImageCode.TRUNCATED)
    header = ZHeader.parse(source.pread(0, SPACE))
    if not header.flags & Flags.HEADER:
        raise ImageError("ZFile header: flags say that it is a trailer", code=ImageCode.INCONSISTENT)
    if not header.flags & Flags.OVERWRITTEN:
        header = ZHeader.parse(source.pread(source.size - SPACE, SPACE), "ZFile trailer")
        if header.flags & (Flags.HEADER | Flags.DATA | Flags.SEALED) != Flags.DATA | Flags.SEALED:
            raise ImageError(f"ZFile trailer: flags {header.flags:#x} are not those of a finished file", code=ImageCode.INCONSISTENT)
    if header.blocks > MAX_BLOCKS or header.blocks != -(-header.size // header.block_size):
        raise ImageError(
            f"ZFile: {header.blocks} blocks of {header.block_size} cannot hold {header.size} bytes", code=ImageCode.INCONSISTENT
        )
    if header.index_offset < SPACE + header.dict_size or header.index_offset + 4 * header.blocks > source.size - SPACE:
        raise ImageError("ZFile: the jump table is outside of the file", code=ImageCode.OUT_OF_BOUNDS)
    return header
