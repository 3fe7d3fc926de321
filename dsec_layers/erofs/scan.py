"""Walking an image from its root: every reachable inode and directory entry, checked, as columns.

Directories are taken level by level, all directories of a level at once. Time and memory are bounded by the size of the image: what reachable
inodes claim as theirs may not add up to more than the image holds, a directory has one name, and levels are limited.
"""

from __future__ import annotations

import operator
import stat
from array import array
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.columns import Ints, Mask, slices
from dsec_layers.erofs.inodes import Geometry, InodeTable, decode_inodes, inode_modes
from dsec_layers.erofs.overlay import whiteout_columns
from dsec_layers.erofs.tree import BLOCK, show_path
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["Entries", "Scan", "read_directories", "scan"]

Nids = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Entries:
    """The entries of several directories, ``.`` and ``..`` left out, names sorted within each."""

    names: list[bytes]
    nid: Nids
    first: Ints
    """First entry of each directory, and one more: the number of entries."""


@dataclass(slots=True)
class Scan:
    """All that is reachable. ``inodes`` is ordered by nid; directories are in level order, the root first."""

    inodes: InodeTable
    dir_inode: Ints
    names: list[bytes]
    child: Ints
    """The inode number of each entry."""
    first: Ints
    """First entry of each directory, and one more: the number of entries."""
    links: Ints
    """Names of each inode; of a directory 2 + its subdirectories."""

    def path(self, inode: int) -> bytes:
        """One path of an inode."""
        parts: list[bytes] = []
        while (found := np.flatnonzero(self.child == inode)).size:
            entry = int(found[0])
            parts.append(self.names[entry])
            inode = int(self.dir_inode[int(np.searchsorted(self.first, entry, "right")) - 1])
        return b"/".join(reversed(parts))

    def refuse(self, bad: Mask, what: str, code: ImageCode) -> None:
        """Raise ImageError with the nid and a path of the first inode for which ``bad`` holds, if any does."""
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise ImageError(f"inode {self.inodes.nid[at]} ({show_path(self.path(at))}): {what}", code=code)


def scan(geometry: Geometry, root_nid: int) -> Scan:
    """Walk the whole image. Raises ImageError for anything that is not a well-formed tree."""
    frontier = np.array([root_nid], np.uint64)
    parents = frontier
    seen = {root_nid}
    budget = float(geometry.length)
    room = fmt.MAX_ENTRIES
    dir_nids: list[Nids] = []
    parts: list[Entries] = []
    while len(frontier):
        if len(dir_nids) > fmt.MAX_DEPTH:
            raise ImageError(f"directories nested deeper than {fmt.MAX_DEPTH}", code=ImageCode.LIMIT)
        table = decode_inodes(geometry, frontier)
        budget -= float(table.size.sum(dtype=np.float64))
        if budget < 0:
            raise ImageError("directories larger together than the image", code=ImageCode.INCONSISTENT)
        entries, types = read_directories(geometry, table, parents)
        modes = inode_modes(geometry, entries.nid)
        wrong = (types != fmt.FT_UNKNOWN) & (types != fmt.FILE_TYPE_OF_MODE[modes >> 12])
        if wrong.any():
            raise ImageError(
                f"inode {entries.nid[np.flatnonzero(wrong)[0]]}: another file type than its directory entry says",
                code=ImageCode.INCONSISTENT,
            )
        below = (modes & 0o170000) == stat.S_IFDIR
        room -= len(entries.names)
        if room < 0:
            raise ImageError(f"more than {fmt.MAX_ENTRIES} names", code=ImageCode.LIMIT)
        dir_nids.append(frontier)
        parts.append(entries)
        parents = np.repeat(frontier, np.diff(entries.first))[below]
        frontier = entries.nid[below]
        for nid in frontier.tolist():
            if nid in seen:
                raise ImageError(f"inode {nid}: a directory with two names", code=ImageCode.INCONSISTENT)
            seen.add(nid)
    return _assemble(geometry, dir_nids, parts)


def _assemble(geometry: Geometry, dir_nids: list[Nids], parts: list[Entries]) -> Scan:
    entry_nids = np.concatenate([part.nid for part in parts])
    dirs = np.concatenate(dir_nids)
    nids, inverse = np.unique(np.concatenate((dirs[:1], entry_nids)), return_inverse=True)
    child = inverse.reshape(-1)[1:].astype(np.int64)
    del entry_nids, inverse  # eight bytes an entry each, while the inodes are decoded
    dir_inode = np.searchsorted(nids, dirs).astype(np.int64)
    counts = np.concatenate([np.diff(part.first) for part in parts])
    first = np.zeros(len(dirs) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    table = decode_inodes(geometry, nids)
    is_dir = (table.mode & 0o170000) == stat.S_IFDIR
    owner = np.repeat(dir_inode, counts)
    links = np.bincount(child, minlength=len(nids))
    links[is_dir] = 2
    links += np.bincount(owner[is_dir[child]], minlength=len(nids))
    found = Scan(table, dir_inode, [name for part in parts for name in part.names], child, first, links)
    _check_whole(geometry, found)
    return found


def _check_whole(geometry: Geometry, found: Scan) -> None:
    table = found.inodes
    small = np.where(table.size < BLOCK, np.where(table.whole > 0, table.size, 0), 0)
    claimed = (table.body_at - table.pos) + table.inline + table.chunks * table.unit + small
    if claimed.sum(dtype=np.float64) > geometry.length:
        raise ImageError("inodes that overlap: together they claim more than the image holds", code=ImageCode.INCONSISTENT)
    whiteout = whiteout_columns(table.mode, table.i_u)
    found.refuse(whiteout & ((table.nlink > 1) | (found.links > 1)), "a whiteout with more than one link", ImageCode.INCONSISTENT)
    link = (table.mode & 0o170000) == stat.S_IFLNK
    found.refuse(
        link & ((table.size == 0) | (table.size > fmt.MAX_TARGET)), "a link target that is empty or too long", ImageCode.OUT_OF_BOUNDS
    )


# --- directories -------------------------------------------------------------------------------------------------------------------------------


def read_directories(geometry: Geometry, table: InodeTable, parents: Nids) -> tuple[Entries, npt.NDArray[np.uint8]]:
    """The entries of the directories in ``table``, with their file types. ``parents`` are the nids that ``..`` must name.

    The caller bounds the sum of the directories' sizes. Raises ImageError.
    """
    table.refuse((table.mode & 0o170000) != stat.S_IFDIR, "not a directory", ImageCode.INCONSISTENT)
    table.refuse(
        (table.layout != fmt.FLAT_PLAIN) & (table.layout != fmt.FLAT_INLINE),
        "a compressed directory, which is not supported",
        ImageCode.UNKNOWN_FEATURE,
    )
    table.refuse(table.size < 2 * fmt.DIRENT.itemsize + 3, "a directory too small for '.' and '..'", ImageCode.TRUNCATED)
    count = table.whole + (table.inline > 0)
    owner = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    place = np.where(nth < table.whole[owner], (table.i_u[owner] + nth) << 12, table.body_at[owner])
    used = np.minimum(table.size[owner] - (nth << 12), BLOCK)
    per_block, nid, types, names, dot, dotdot = _read_blocks(geometry, table, owner, place, used)
    entry_owner = np.repeat(owner, per_block)
    _check_order(table, entry_owner, names)
    for mark, want, what in ((dot, table.nid, "'.'"), (dotdot, parents.astype(np.int64), "'..'")):
        table.refuse(np.bincount(entry_owner[mark], minlength=len(count)) != 1, f"a directory without {what}", ImageCode.INCONSISTENT)
        table.refuse(nid[mark].astype(np.int64) != want, f"a directory whose {what} is another", ImageCode.INCONSISTENT)
    keep = ~(dot | dotdot)
    first = np.zeros(len(count) + 1, np.int64)
    np.cumsum(np.bincount(entry_owner[keep], minlength=len(count)), out=first[1:])
    return Entries(list(compress(names, keep.tolist())), nid[keep], first), types[keep]


def _read_blocks(
    geometry: Geometry, table: InodeTable, owner: Ints, place: Ints, used: Ints
) -> tuple[Ints, Nids, npt.NDArray[np.uint8], list[bytes], Mask, Mask]:
    """Entries a block, and of each entry: nid, file type, name, whether it is ``.``, whether it is ``..``."""
    words = geometry.words

    def refuse(bad: Mask, blocks: Ints, what: str, code: ImageCode) -> None:
        if bad.any():
            raise ImageError(f"inode {table.nid[owner[blocks[np.flatnonzero(bad)[0]]]]}: {what}", code=code)

    every = np.arange(len(place))
    refuse(used < fmt.DIRENT.itemsize + 1, every, "a directory block without an entry", ImageCode.TRUNCATED)
    names_at = (words[(place >> 2) + 2] & 0xFFFF).astype(np.int64)
    refuse(
        (names_at < fmt.DIRENT.itemsize) | (names_at % fmt.DIRENT.itemsize != 0) | (names_at >= used),
        every,
        "a bad first nameoff",
        ImageCode.OUT_OF_BOUNDS,
    )
    per_block = names_at // fmt.DIRENT.itemsize
    block = np.repeat(every, per_block)
    word = np.repeat(place >> 2, per_block) + 3 * (slices(np.zeros_like(per_block), per_block))
    nid = words[word] | words[word + 1].astype(np.uint64) << np.uint64(32)
    start = (words[word + 2] & 0xFFFF).astype(np.int64)
    types = (words[word + 2] >> 16 & 0xFF).astype(np.uint8)
    last = np.cumsum(per_block) - 1
    end = np.append(start[1:], 0)
    end[last] = used
    refuse((start < names_at[block]) | (end > used[block]) | (start >= end), block, "name offsets out of order", ImageCode.INCONSISTENT)
    names: list[bytes] = []
    starts, ends = array("q", start.tobytes()), array("q", end.tobytes())  # as objects they are five times as large
    spans = zip(starts, ends, strict=True)
    at = 0
    for here, size, n in zip(place.tolist(), used.tolist(), per_block.tolist(), strict=True):
        data = bytes(geometry.raw[here : here + size])
        stop = data.find(0, starts[at + n - 1])
        if stop >= 0:
            ends[at + n - 1] = stop
        names += [data[a:b] for a, b in islice(spans, n)]
        at += n
    length = np.fromiter(map(len, names), np.int64, len(names))
    refuse((length == 0) | (length > fmt.MAX_NAME), block, "an empty name or one longer than 255 bytes", ImageCode.BAD_ENCODING)
    joined = b"".join(names)
    if b"/" in joined or b"\0" in joined:
        bad = np.array([b"/" in name or b"\0" in name for name in names], np.bool_)
        refuse(bad, block, "a name with '/' or NUL in it", ImageCode.BAD_ENCODING)
    dot = np.fromiter(map(b".".__eq__, names), np.bool_, len(names))
    dotdot = np.fromiter(map(b"..".__eq__, names), np.bool_, len(names))
    return per_block, nid, types, names, dot, dotdot


def _check_order(table: InodeTable, owner: Ints, names: list[bytes]) -> None:
    ascending = np.fromiter(map(operator.lt, names, islice(names, 1, None)), np.bool_, len(names) - 1)
    bad = ~ascending & (owner[:-1] == owner[1:])
    if bad.any():
        raise ImageError(f"inode {table.nid[owner[np.flatnonzero(bad)[0]]]}: names out of order or twice", code=ImageCode.INCONSISTENT)
