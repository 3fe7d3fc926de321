"""The same input gives the same disk: a commit's layer, manifest and digest follow from what was written and on what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from dsec_layers.api.disks import FORMATS, branch, commit, create, snapshot
from dsec_layers.api.session import Session
from dsec_layers.digest import Digest
from dsec_layers.disks.place import find_disk, opened
from tests.kit.disks_kit import noise, quiet_session, sealed_content

MIB = 1 << 20
Parts = list[tuple[int, bytes]]
PARTS: Parts = [(0, noise(1, 200_192)), (MIB, b"text" * 4096), (MIB + 65536, bytes(4096)), (300_032, noise(2, 512))]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose disks ask no daemon."""
    with quiet_session(tmp_path, monkeypatch) as made:
        yield made


def write(session: Session, path: Path, parts: Parts) -> None:
    """Write to a disk."""
    with opened(session, path) as disk:
        for offset, data in parts:
            disk.disk.pwrite(offset, data)


def made(session: Session, path: Path, parts: Parts, name: str = "d:1", format: str = "zfile") -> Digest:
    """The digest of a new disk with that written to it."""
    create(session, path, size=2 * MIB)
    write(session, path, parts)
    return commit(session, path, name, format=format).digest


@pytest.mark.parametrize("format", FORMATS)
def test_b7_two_commits_of_the_same_input_have_the_same_digest(session: Session, tmp_path: Path, format: str) -> None:
    digests = {made(session, tmp_path / name, PARTS, format=format) for name in ("a", "b")}
    assert len(digests) == 1
    for path in ("c", "d"):
        branch(session, "d:1", [tmp_path / path])
        write(session, tmp_path / path, [(4096, noise(3, 4096))])
    assert len({commit(session, tmp_path / path, "d:2", format=format).digest for path in ("c", "d")}) == 1


def test_b7_how_it_was_written_does_not_matter(session: Session, tmp_path: Path) -> None:
    """Overwritten data, order, and snapshots in between are not in the UUID."""
    made(session, tmp_path / "a", PARTS)
    create(session, tmp_path / "b", size=2 * MIB)
    write(session, tmp_path / "b", [(0, noise(9, 4096)), *reversed(PARTS[2:])])
    snapshot(tmp_path / "b")
    write(session, tmp_path / "b", [(MIB, b"text" * 4096), (0, noise(1, 200_192)[:100_352]), (100_352, noise(1, 200_192)[100_352:])])
    commit(session, tmp_path / "b", "e:1")
    assert sealed_content(session, "d:1") == sealed_content(session, "e:1")
    one, other = (find_disk(session.store, name)[1].layers[-1].uuid for name in ("d:1", "e:1"))
    assert one == other


def test_b7_a_uuid_tells_content_size_place_and_parent_apart(session: Session, tmp_path: Path) -> None:
    data = noise(1, 4096)
    inputs: list[Parts] = [[(0, data)], [(0, noise(2, 4096))], [(4096, data)], [(0, data), (8192, data)], [(0, bytes(4096))], []]
    uuids = []
    for number, parts in enumerate(inputs):
        made(session, tmp_path / f"{number}", parts, f"d:{number}")
        uuids.append(find_disk(session.store, f"d:{number}")[1].layers[-1].uuid)
    create(session, tmp_path / "large", size=4 * MIB)
    write(session, tmp_path / "large", inputs[0])
    commit(session, tmp_path / "large", "d:large")
    branch(session, "d:1", [tmp_path / "on"])
    write(session, tmp_path / "on", inputs[0])
    commit(session, tmp_path / "on", "d:on")
    uuids += [find_disk(session.store, name)[1].layers[-1].uuid for name in ("d:large", "d:on")]
    assert len(set(uuids)) == len(uuids)
    assert {UUID(uuid).version for uuid in uuids} == {8}
