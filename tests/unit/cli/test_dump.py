"""``dump``: of files and blobs of all kinds, whole and damaged; bounded; an error where the bytes are not well-formed."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsec_layers import Session, dump, env_create, import_source
from dsec_layers.blocksource import BytesSource
from dsec_layers.erofs.dump import dump as dump_erofs
from dsec_layers.erofs.writer import render
from dsec_layers.errors import ImageCode, ImageError, InputError, LimitError, NotFound, UsageError
from dsec_layers.layers.frames import join_metadata
from dsec_layers.layers.tables import SEGMENT, pack_segments
from dsec_layers.overlaybd.dump import DumpKind
from dsec_layers.overlaybd.dump import dump as dump_overlaybd
from dsec_layers.proc import run
from dsec_layers.registry.objects import load_layer, resolve_any
from dsec_layers.store.transfer import put_bytes, read_blob
from tests.kit.erofs_samples import SAMPLES
from tests.kit.overlaybd_vectors import vector
from tests.kit.tars import file, make_tar

LAYER = "blk-64m-layer3.zfile-lz4-4k.tar"


@pytest.fixture
def session(tmp_path: Path) -> Any:
    with Session(tmp_path / "store", tmp_path / "cache") as opened:
        yield opened


def lines(session: Session, what: str | Path, **options: Any) -> list[str]:
    with dump(session, str(what), **options) as found:
        return list(found.lines)


def test_files_of_each_kind(session: Session, tmp_path: Path) -> None:
    image = render(*SAMPLES["everything"]())
    path = tmp_path / "file"
    path.write_bytes(image)
    assert lines(session, path) == list(dump_erofs(image)) == lines(session, path, kind="erofs")
    records = np.zeros(2, SEGMENT)
    records["size"], records["offset"], records["stored"] = 4096, [0, 50], [50, 60]
    path.write_bytes(join_metadata(image, pack_segments(records)))
    found = lines(session, path)
    assert found[:-4] == list(dump_erofs(image))
    assert found[-3] == "00000000+20 magic DSEG version 1 record 56 count 2"
    assert found[-1] == f"0000004c+56 segment 1 digest {'00' * 32} size 4096 blob 0 offset 50 stored 60 flags 0"
    path.write_bytes(join_metadata(image, b"no table"))
    with pytest.raises(ImageError, match="DSEG"):
        lines(session, path)
    path.write_bytes(vector(LAYER))
    whole = lines(session, path)
    assert whole == list(dump_overlaybd(BytesSource(vector(LAYER))))
    zfile, lsmt = lines(session, path, kind="zfile"), lines(session, path, kind="lsmt")
    assert whole == zfile + lsmt[1:]
    assert not (tmp_path / "store").exists()  # a file needs none


def test_layers_and_blobs_of_the_store(session: Session, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(make_tar(file("f", data=b"x" * 10_000)))
    made = import_source(session, str(archive), kind="base", name="a:1")
    metadata = load_layer(session.store, resolve_any(session.store, "a:1")[0]).metadata
    found = lines(session, "a:1")
    assert found[0].startswith("00000000+1024 zero") and any("name b'f'" in line for line in found)
    assert lines(session, made.digest) == found == lines(session, metadata.digest)
    blob = put_bytes(session.store, vector(LAYER)).digest
    assert lines(session, blob) == list(dump_overlaybd(BytesSource(vector(LAYER))))
    assert read_blob(session.store, blob, limit=1 << 30) == vector(LAYER)
    with pytest.raises(NotFound):
        lines(session, "b:1")
    env_create(session, "env:1", base="a:1")
    with pytest.raises(UsageError, match="several layers"):
        lines(session, "env:1")


@pytest.mark.parametrize(
    ("what", "kind"), [(b"", "auto"), (b"x" * 5000, "auto"), (b"x" * 5000, "erofs"), (vector("plain.lz4-4k.zfile"), "lsmt")]
)
def test_what_is_something_else(session: Session, tmp_path: Path, what: bytes, kind: str) -> None:
    (tmp_path / "file").write_bytes(what)
    with pytest.raises(ImageError) as caught:
        lines(session, tmp_path / "file", kind=kind)
    assert caught.value.code in (ImageCode.BAD_MAGIC, ImageCode.TRUNCATED)


def test_what_is_no_file_is_an_answer_at_once(session: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="no file"):
            lines(session, path)
    with pytest.raises(NotFound):
        lines(session, tmp_path / "nothing")
    with pytest.raises(UsageError, match="kind"):
        lines(session, tmp_path, kind="tar")


def test_the_output_is_bounded(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(vector(LAYER))
    count = len(lines(session, path))
    assert len(lines(session, path, max_lines=count)) == count
    seen: list[str] = []
    with pytest.raises(LimitError, match="more than 10 lines"), dump(session, str(path), max_lines=10) as found:
        seen.extend(found.lines)
    assert len(seen) == 10


def test_a_header_that_claims_much_costs_little(session: Session, tmp_path: Path) -> None:
    """A sparse file of 8 GiB whose ZFile header says that most of it is a jump table: the bound of lines ends it before the table is read whole."""
    from dsec_layers.overlaybd.zfile_format import Algorithm, Flags, ZHeader

    blocks = 900_000_000
    header = ZHeader(Flags.FINAL_HEADER, Algorithm.LZ4, 512, True, 512, blocks, blocks * 512)
    path = tmp_path / "file"
    with path.open("wb") as stream:
        stream.write(header.render())
        stream.truncate(8 << 30)
    began = time.monotonic()
    with pytest.raises(LimitError):
        lines(session, path, max_lines=10_000)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["blk-64m-layer3.lsmt", LAYER, "blk-64m-layer3.rw.index", "plain.zstd-64k.zfile"])
def test_damaged_files_give_lines_or_an_image_error(name: str) -> None:
    random_ = random.Random(name)
    whole = vector(name)
    ends = [at for at in (0, 512, 1536, 2048, len(whole) - 4096, len(whole) - 512) if 0 <= at < len(whole)]
    for _ in range(150):
        data = bytearray(whole[: random_.randrange(len(whole))] if random_.random() < 0.2 else whole)
        for _ in range(random_.randrange(1, 4)):
            at = random_.choice(ends) + random_.randrange(120) if random_.random() < 0.8 else random_.randrange(len(whole))
            if at < len(data):
                data[at] = random_.randrange(256)
        for kind in DumpKind:
            count = 0
            try:
                for line in dump_overlaybd(BytesSource(bytes(data)), kind):
                    assert "\n" not in line
                    count += 1
            except ImageError:
                pass
            assert count < 20 + 2 * len(data) // 4


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(vector(LAYER))

    def dsec(*argv: str | Path, code: int = 0) -> str:
        done = run([sys.executable, "-m", "dsec_layers", "dump", *argv], check=False, timeout=60)
        assert done.code == code, done.stderr.decode()
        return done.stdout.decode()

    plain = dsec(path).splitlines()
    assert plain == list(dump_overlaybd(BytesSource(vector(LAYER))))
    value = json.loads(dsec(path, "--json"))
    assert (value["lines"], value["kind"], value["size"], value["name"]) == (plain, "overlaybd", len(vector(LAYER)), str(path))
    path.write_bytes(vector(LAYER)[:-3000])
    assert json.loads(dsec(path, "--json", code=ImageError.exit_code))["code"] == "out_of_bounds"
    path.write_bytes(b"x" * 9000)
    assert json.loads(dsec(path, "--json", code=12))["code"] == "bad_magic"


def test_the_kinds_of_the_command_are_those_of_the_verb() -> None:
    from dsec_layers.api.dump import KINDS, MAX_LINES
    from dsec_layers.cli.dump import command

    options = {option.name: option for option in command.params}
    assert tuple(options["kind"].type.choices) == KINDS  # type: ignore[attr-defined]
    assert options["max_lines"].default == MAX_LINES
