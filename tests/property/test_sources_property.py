"""Random trees through real archivers come out the same; random layers merge as the oracle says; damaged archives give a tree or a proper error."""

from __future__ import annotations

import io
import os
import random
import stat
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_layers import proc
from dsec_layers.builders.names import Limits
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.builders.sources.merge import merge_layers
from dsec_layers.errors import DsecError, InputError, LimitError
from tests.kit.oracle import MemorySink, Snapshot, diff, snapshot_dir, snapshot_tars, snapshot_tree
from tests.kit.tars import Entry, directory, entry, file, hard_link, ingest, make_tar, node, symlink
from tests.unit.builders.test_merge_layers import Layer

_NAMES = st.one_of(
    st.sampled_from([b"a", b"b", b"c", b"lib"]),
    st.binary(min_size=1, max_size=130).filter(
        lambda name: not set(name) & set(b"/\0") and name not in (b".", b"..") and not name.startswith(b".wh.")
    ),
)
_TIMES = st.integers(0, 2**33 * 10**9)
_quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[bytes, str, bytes, int, int]]:
    """A list of (path, kind, content or target, mode, time) whose parents come before their children."""
    paths: list[bytes] = [b""]
    made: list[tuple[bytes, str, bytes, int, int]] = []
    files: list[bytes] = []
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(paths))
        path = (parent + b"/" if parent else b"") + draw(_NAMES)
        if any(path == other[0] for other in made):
            continue
        kind = draw(st.sampled_from(["file", "file", "dir", "dir", "link", "hard", "sparse"]))
        mode, time = draw(st.integers(0, 0o777)) | 0o600, draw(_TIMES)
        if kind == "dir":
            paths.append(path)
            made.append((path, kind, b"", mode | 0o700, time))
        elif kind == "hard":
            if files:
                made.append((path, kind, draw(st.sampled_from(files)), 0, time))
        elif kind == "link":
            made.append((path, kind, draw(st.binary(min_size=1, max_size=150).filter(lambda target: b"\0" not in target)), 0, time))
        else:
            files.append(path)
            content = draw(st.binary(max_size=1500)) if kind == "file" else b"end"
            made.append((path, kind, content, mode, time))
    return made


def build(root: Path, tree: list[tuple[bytes, str, bytes, int, int]]) -> None:
    top = os.fsencode(root) + b"/"
    for path, kind, content, mode, _ in tree:
        if kind == "dir":
            os.mkdir(top + path)  # noqa: PTH102
        elif kind == "link":
            os.symlink(content, top + path)  # noqa: PTH211
        elif kind == "hard":
            os.link(top + content, top + path)
        else:
            with open(top + path, "wb") as stream:
                stream.write(content)
                if kind == "sparse":
                    os.pwrite(stream.fileno(), b"far", 300_000)
            os.chmod(top + path, mode)  # noqa: PTH101
    for path, _, _, mode, time in reversed(tree):
        if stat.S_ISDIR(os.lstat(top + path).st_mode):
            os.chmod(top + path, mode)  # noqa: PTH101
        os.utime(top + path, ns=(time, time), follow_symlinks=False)


def read(data: Path | io.BytesIO) -> Snapshot:
    sink = MemorySink()
    return snapshot_tree(TarSource(data).ingest(sink), sink.content)


@_quick
@given(trees(), st.sampled_from(["gnu", "oldgnu", "posix", "pax-0.0", "pax-0.1"]), st.booleans())
def test_gnu_tar_round_trip(tree: list[tuple[bytes, str, bytes, int, int]], form: str, numeric: bool) -> None:
    with TemporaryDirectory() as name:
        root = Path(name) / "root"
        root.mkdir()
        build(root, tree)
        archive = Path(name) / "a.tar"
        options = [f"--format={form}"] if not form.startswith("pax") else ["--format=posix", f"--sparse-version={form[4:]}"]
        proc.run(["tar", "-C", root, "-S", *options, *(["--numeric-owner"] if numeric else []), "-cf", archive, "."])
        wanted = snapshot_dir(root)
        exact = options[0] == "--format=posix"
        if not exact:
            for one in wanted.values():
                one.mtime -= one.mtime % 10**9
        assert diff(read(archive), wanted) == []
        sink = MemorySink()
        assert diff(snapshot_tree(DirectorySource(root).ingest(sink), sink.content), snapshot_dir(root)) == []


@_quick
@given(trees(), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_python_tarfile_round_trip(tree: list[tuple[bytes, str, bytes, int, int]], form: int) -> None:
    with TemporaryDirectory() as name:
        root = Path(name) / "root"
        root.mkdir()
        build(root, tree)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
            archive.add(root, ".")
        found, wanted = read(io.BytesIO(stream.getvalue())), snapshot_dir(root)
        assert diff(found, wanted, ignore=("mtime",)) == []
        assert all(abs(found[path].mtime - one.mtime) <= 10**9 for path, one in wanted.items())  # tarfile counts in floats


_PATHS = st.sampled_from(
    ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/f/g", "l", "l/a", "l/d/b", "/d/c", "./d//e/b", "e/l2/a", "e/l2", "e"]
)  # fmt: skip


@st.composite
def members(draw: st.DrawFn) -> Entry:
    """One member of a layer, whiteouts among them, over few paths, so that they meet."""
    path = draw(_PATHS)
    head, slash, tail = path.rpartition("/")
    kind = draw(st.sampled_from(["file", "file", "dir", "dir", "link", "hard", "white", "white", "opaque", "fifo"]))
    if kind == "file":
        return file(path, draw(st.sampled_from([b"", b"x", b"yy"])), mode=draw(st.sampled_from([0o600, 0o4755])))
    if kind == "dir":
        return directory(
            path, mode=draw(st.sampled_from([0o700, 0o755])), mtime=draw(st.sampled_from([0, 7])), pax={"SCHILY.xattr.user.n": path}
        )
    if kind == "link":
        return symlink(path, draw(st.sampled_from(["d", "/d/e", "../..", "a", "l", "nowhere/at/all", "d/../e"])))
    if kind == "hard":
        return hard_link(path, draw(_PATHS))
    if kind == "white":
        return file(f"{head}{slash}.wh.{tail}")
    return file(f"{path}/.wh..wh..opq") if kind == "opaque" else node(path, tarfile.FIFOTYPE)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(members(), max_size=8), min_size=1, max_size=4))
def test_layers_merge_as_the_oracle_says(layers: list[list[Entry]]) -> None:
    """Every member is tried: one that is refused is dropped, and the reference gets the rest."""
    kept: list[list[Entry]] = []
    for layer in layers:
        kept.append([])
        for member in layer:
            trial = [*kept[:-1], [*kept[-1], member]]
            try:
                merge_layers([Layer(make_tar(*entries)) for entries in trial], MemorySink())
            except InputError:
                continue
            kept = trial
    tars = [make_tar(*entries) for entries in kept]
    sink = MemorySink()
    tree = merge_layers([Layer(tar) for tar in tars], sink)
    found = snapshot_tree(tree, sink.content)
    assert diff(found, snapshot_tars(tars)) == []
    alive = {inode for _, inode in tree.walk() if stat.S_ISREG(inode.mode)}
    assert alive == set(sink.pieces) if len(tars) > 1 else alive <= set(sink.pieces)


def _seed_archives() -> list[bytes]:
    rich = make_tar(
        directory("d"), file("d/f", b"content" * 100), symlink("l", "d/f"), hard_link("h", "d/f"), node("c", tarfile.CHRTYPE, 1, 2),
        file("n" * 120, b"long"), file("x", b"1", mtime=1.5, pax={"SCHILY.xattr.user.a": "v", "LIBARCHIVE.xattr.user.b": "dg=="}),
        entry("g", tarfile.REGTYPE, b"12345", pax={"GNU.sparse.map": "3,2,10,3", "GNU.sparse.size": "20"}), file("d/.wh.q"), file("d/.wh..wh..opq"),
    )  # fmt: skip
    gnu = make_tar(file("n" * 200, b"long"), symlink("s", "t" * 200), file("d/" * 60 + "x", b"y"), form=1)
    return [rich, gnu]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(_seed_archives()))
def test_damaged_archives_give_a_tree_or_a_proper_error(seed: int, data: bytes) -> None:
    chance = random.Random(seed)
    broken = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = (
            chance.randrange(len(broken))
            if chance.random() < 0.3
            else chance.randrange(len(broken) // 512) * 512 + chance.randrange(400) % 512
        )
        deed = chance.random()
        if deed < 0.6:
            broken[at % len(broken)] = chance.choice([0, 0x20, 0x2F, 0x30, 0x31, 0x37, 0x80, 0xFF, chance.randrange(256)])
        elif deed < 0.8:
            del broken[at : at + chance.choice([1, 512, 100])]
        else:
            broken[at:at] = broken[at : at + 512]
        if not broken:
            break
    if chance.random() < 0.9:
        _repair_checksums(broken)
    try:
        TarSource(io.BytesIO(bytes(broken)), limits=Limits(inodes=10_000)).ingest(MemorySink())
    except (InputError, LimitError) as error:
        assert str(error) == error.message and len(error.message) < 2000


def _repair_checksums(data: bytearray) -> None:
    """Make every block a header as far as its checksum goes, so that the damage gets past that."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=2000), st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh9", b"\x50\x2a\x4d\x18"])
)
def test_junk_gives_a_proper_error(junk: bytes, magic: bytes) -> None:
    try:
        ingest(magic + junk)
    except DsecError:
        pass
