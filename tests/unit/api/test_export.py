"""Export, diff, inspect and copies on a real store: what goes in comes out."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_layers import Session, catalog_rebuild, diff, env_create, export, import_source, inspect, ls, pull, push, rm, verify
from dsec_layers.api.environment import rm_all
from dsec_layers.api.look import names
from dsec_layers.errors import Conflict, NotFound, UsageError
from dsec_layers.proc import run
from tests.kit.oracle import Snapshot, snapshot_dir, snapshot_tars
from tests.kit.oracle import diff as differences


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path / "store", tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with what trees have: links, sparse and large files, odd names, times before 1970 and with nanoseconds, xattrs."""
    root = tmp_path / "tree"
    (root / "dir/empty").mkdir(parents=True)
    (root / "dir/small").write_bytes(b"small")
    os.link(root / "dir/small", root / "dir/hard")
    (root / "link").symlink_to("dir/small")
    (root / os.fsdecode(b"odd \xff\n name")).write_bytes(b"odd")
    (root / "big").write_bytes(os.urandom(300_000) + bytes(200_000) + b"tail")
    with open(root / "sparse", "wb") as sparse:
        sparse.seek(5 << 20)
        sparse.write(b"data in the middle")
        sparse.truncate(9 << 20)
    os.mkfifo(root / "fifo")
    os.utime(root / "dir/small", ns=(0, -1_500_000_000))
    os.utime(root / "big", ns=(0, 1_234_567_890_987_654_321))
    os.setxattr(root / "big", "user.binary", b"\0\xff\n=")
    (root / "dir").chmod(0o1750)
    return root


def tar_snapshot(path: Path) -> Snapshot:
    return snapshot_tars([path.read_bytes()])


def test_directory_to_layer_to_tar_is_the_same_tree(session: Session, tree: Path, tmp_path: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    made = export(session, "t:1", tmp_path / "out.tar")
    assert made.size == (tmp_path / "out.tar").stat().st_size
    assert differences(snapshot_dir(tree), tar_snapshot(tmp_path / "out.tar")) == []


def test_gnu_tar_reads_the_export(session: Session, tree: Path, tmp_path: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    export(session, "t:1", tmp_path / "out.tar")
    (tmp_path / "unpacked").mkdir()
    run(["tar", "-xpf", tmp_path / "out.tar", "-C", tmp_path / "unpacked", "--xattrs", "--xattrs-include=*"])
    assert differences(snapshot_dir(tree), snapshot_dir(tmp_path / "unpacked")) == []
    assert (tmp_path / "unpacked/sparse").stat().st_blocks * 512 < 1 << 20


def test_export_is_deterministic_and_streams(session: Session, tree: Path, tmp_path: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    export(session, "t:1", tmp_path / "one.tar")
    stream = io.BytesIO()
    export(session, "t:1", stream)
    assert stream.getvalue() == (tmp_path / "one.tar").read_bytes()


def test_oci_layout_round_trip(session: Session, tree: Path, tmp_path: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    export(session, "t:1", tmp_path / "layout", format="oci")
    import_source(session, tmp_path / "layout", kind="base", name="back:1")
    assert diff(session, "t:1", "back:1").changes == ()


def test_environment_view_applies_whiteouts_and_opaque_directories(session: Session, tmp_path: Path) -> None:
    def layer(name: str, kind: str, **files: bytes) -> None:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for path, content in files.items():
                info = tarfile.TarInfo(path.replace("__", "/"))
                info.size = len(content)
                if content == b"<whiteout>":
                    info.type, info.size = tarfile.CHRTYPE, 0
                archive.addfile(info, io.BytesIO(content) if info.size else None)
        target = tmp_path / f"{name}.tar"
        target.write_bytes(data.getvalue())
        import_source(session, target, kind=kind, name=f"{name}:1")

    layer("base", "base", etc__a=b"base a", etc__b=b"base b", opt__x=b"x")
    layer("work", "workspace", etc__a=b"work a", etc__b=b"<whiteout>", srv__c=b"c")
    layer("tool", "toolkit", opt__y=b"y")
    env_create(session, "env:1", base="base:1", workspace="work:1", toolkits=["tool:1"])
    export(session, "env:1", tmp_path / "env.tar")
    with tarfile.open(tmp_path / "env.tar") as archive:
        content = {item.name: archive.extractfile(item).read() for item in archive if item.isreg()}  # type: ignore[union-attr]
    assert content == {"etc/a": b"work a", "srv/c": b"c", "opt/x": b"x", "opt/y": b"y"}
    found = diff(session, "base:1", "env:1")
    kinds = {change.path: change.change for change in found.changes}
    assert kinds["etc/a"] == "content"
    assert kinds["opt/y"] == kinds["srv/c"] == "added"
    assert kinds["etc/b"] == "removed"
    assert found.files["removed"] == 1
    assert found.bytes_added >= len(b"work a") + 2


def test_diff_says_what_kind_of_change(session: Session, tree: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    (tree / "dir/small").write_bytes(b"SMALL")
    (tree / "big").chmod(0o600)
    (tree / "link").unlink()
    (tree / "link").mkdir()
    (tree / "new").write_bytes(b"new")
    (tree / "fifo").unlink()
    import_source(session, tree, kind="base", name="t:2")
    kinds = {change.path: change.change for change in diff(session, "t:1", "t:2").changes}
    assert kinds.pop("/", "attributes") == "attributes"
    assert kinds.pop("dir", "attributes") == "attributes"
    assert kinds == {"dir/small": "content", "dir/hard": "content", "big": "attributes", "link": "type", "new": "added", "fifo": "removed"}


def test_inspect_tree_sums_directories(session: Session, tree: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    found = inspect(session, "t:1", tree=True, depth=1)
    sizes = {entry.path: entry.bytes for entry in found.tree}
    assert sizes["/sparse"] == 9 << 20
    assert sizes["/dir"] == 10
    assert sizes["/"] == sum(size for path, size in sizes.items() if path != "/")
    assert "/dir/small" not in sizes


def test_inspect_tells_what_a_blob_is(session: Session, tree: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    (layer,) = inspect(session, "t:1").layers
    for blob in layer.blobs:
        found = inspect(session, blob.digest)
        assert (found.type, found.stored_bytes) == (f"blob ({blob.role})", blob.size)
        assert [user.digest for user in found.layers] == [layer.digest]
    rm(session, "t:1")
    assert "nothing refers to it" in inspect(session, layer.blobs[-1].digest).type
    with pytest.raises(NotFound):
        inspect(session, "sha256:" + "0" * 64)


def test_push_pull_and_verify(session: Session, tree: Path, tmp_path: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    env_create(session, "e:1", base="t:1")
    first = push(session, "e:1", str(tmp_path / "other"))
    again = push(session, "e:1", str(tmp_path / "other"))
    assert first.copied > 0
    assert again.copied == 0
    with Session(tmp_path / "third", tmp_path / "cache3") as third:
        pull(third, "e:1", str(tmp_path / "other"))
        assert [row.name for row in ls(third)] == ["e:1"]
        (report,) = verify(third, deep=True)
        assert report.problems == ()


def test_verify_names_what_is_damaged(session: Session, tree: Path, tmp_path: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    largest = max((tmp_path / "store/blobs").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.chmod(0o644)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    (report,) = verify(session, ["t:1"], deep=True)
    assert any(largest.name in problem for problem in report.problems)


def test_bad_calls(session: Session, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing:1"):
        export(session, "nothing:1", tmp_path / "x")
    import_source(session, tree, kind="base", name="t:1")
    (tmp_path / "there").touch()
    with pytest.raises(Conflict, match="there"):
        export(session, "t:1", tmp_path / "there")
    with pytest.raises(UsageError, match="not a toolkit"):
        env_create(session, "e:1", base="t:1", toolkits=["t:1"])
    with pytest.raises(UsageError, match="kind"):
        import_source(session, tree, kind="bse", name="x:1")
    rm(session, "t:1")
    with pytest.raises(NotFound):
        rm(session, "t:1")


@pytest.mark.parametrize("format", ["tar", "erofs", "oci"])
def test_two_exports_to_one_target_do_not_collide(session: Session, tree: Path, tmp_path: Path, format: str) -> None:
    """One that is under way is not disturbed by a second, and what is there by the end is not replaced."""
    import_source(session, tree, kind="base", name="t:1")
    export(session, "t:1", tmp_path / "alone", format=format)
    target = tmp_path / "out/target"
    target.parent.mkdir()

    quiet = session.progress

    class Meanwhile:
        """At the first step of one export, another is made."""

        def __getattr__(self, name: str) -> Any:
            if name == "task" and session.progress is not quiet:
                session.progress = quiet
                export(session, "t:1", target, format=format)
            return getattr(quiet, name)

    session.progress = Meanwhile()
    with pytest.raises(Conflict, match="exists already"):
        export(session, "t:1", target, format=format)
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    run(["diff", "-r", tmp_path / "alone", target])


def test_the_catalog_is_made_anew_from_the_store(session: Session, tree: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    made = catalog_rebuild(session)
    assert (made.layers, made.skipped) == (1, ())
    assert made.chunks > 0


def test_all_refs_go_or_none(session: Session, tree: Path) -> None:
    import_source(session, tree, kind="base", name="t:1")
    with pytest.raises(NotFound):
        rm_all(session, ["t:1", "t:2"])
    assert names(session, "t:") == ["t:1"]
    assert [ref.name for ref in rm_all(session, ["t:1"])] == ["t:1"]
    assert names(session) == []
