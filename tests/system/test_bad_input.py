"""Bad luck and bad input through the command line: an error names the thing, has its exit code, and leaves nothing half done."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_layers import Session, diff, export, import_source, inspect, ls, push, verify
from dsec_layers.errors import Conflict, CorruptError, NotFound, UsageError
from dsec_layers.linux.mount import umount
from dsec_layers.proc import PIPE, Completed, run, spawn
from dsec_layers.registry.refs import swap_ref
from dsec_layers.sandbox import RunSpec
from dsec_layers.store.base import check_ref
from dsec_layers.store.transfer import put_bytes

pytestmark = pytest.mark.root

COMMAND = (sys.executable, "-m", "dsec_layers")


class Cli:
    """The command line on a store and cache of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = home / "store"
        self.env = {**os.environ, "DSEC_STORE": str(self.store), "DSEC_CACHE": str(home / "cache")}
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)

    def __call__(self, *argv: str | Path, code: int = 0, **more: str) -> Completed:
        done = run([*COMMAND, *argv], check=False, env={**self.env, **more}, timeout=120)
        assert done.code == code, (done.stdout + done.stderr).decode()
        assert b"Traceback" not in done.stderr
        assert b"internal error" not in done.stderr
        return done

    def shell(self, script: str, *, code: int = 0) -> Completed:
        """``script`` with ``dsec`` as the command line: for redirections and pipes."""
        prefix = f'dsec() {{ "{sys.executable}" -m dsec_layers "$@"; }}; set -o pipefail; '
        done = run(["bash", "-c", prefix + script], check=False, env=self.env, timeout=120)
        assert done.code == code, (done.stdout + done.stderr).decode()
        assert b"Traceback" not in done.stderr
        return done

    def json(self, *argv: str | Path, code: int = 0) -> Any:
        return json.loads(self(*argv, "--json", code=code).stdout)


def refs(cli: Cli) -> set[Path]:
    return {path for path in (cli.store / "refs").rglob("*") if path.is_file()}


def flip(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x55]))


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory, busybox_root: Path) -> Iterator[Cli]:
    call = Cli(tmp_path_factory.mktemp("bad-input"))
    call("import", busybox_root, "--kind", "base", "--name", "box:1")
    yield call
    call("cache", "stop", "--force")
    assert str(call.home) not in Path("/proc/self/mountinfo").read_text()


def test_a_closed_standard_input_is_not_some_file_of_ours(cli: Cli) -> None:
    """The first file that was opened became descriptor 0, and with that the command's input: a manifest of the store."""
    assert cli.shell("dsec run -i box:1 -- cat <&-").stdout == b""
    assert cli.shell("dsec run -i box:1 -- cat <&- 2>&-").stdout == b""


@pytest.mark.parametrize("verb", ["ls --json", "run box:1 -- echo hello", "export box:1"])
def test_a_closed_standard_output_is_written_nowhere(cli: Cli, verb: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in cli.store.rglob("*") if path.is_file()}
    cli.shell(f"dsec {verb} >&-")
    assert {path: path.stat().st_mtime_ns for path in cli.store.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("verb", ["ls", "ls --json"])
def test_a_full_standard_output_is_an_error_that_says_so(cli: Cli, verb: str) -> None:
    assert b"error: standard output: No space left on device" in cli.shell(f"dsec {verb} >/dev/full", code=18).stderr


def test_a_reader_that_goes_away_is_no_failure_of_ours(cli: Cli) -> None:
    for verb in ("ls", "export box:1"):
        done = cli.shell(f"dsec -q {verb} | true; echo ${{PIPESTATUS[0]}}")
        assert (done.stdout.strip(), done.stderr) == (str(128 + signal.SIGPIPE).encode(), b"")


def test_standard_error_that_cannot_be_written_changes_no_exit_code(cli: Cli) -> None:
    cli.shell("dsec inspect no:1 2>/dev/full", code=10)
    cli.shell("dsec inspect no:1 2>&-", code=10)


@pytest.mark.parametrize("name", ["sha256:abc", "sha256:1", "sha256"])
def test_a_name_that_looks_like_a_digest_is_refused(name: str) -> None:
    """It could be set, and then neither be found nor listed."""
    with pytest.raises(UsageError, match="digest"):
        check_ref(name)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["import", "", "--kind", "base", "--name", "x:1"], 2, "empty"),
        (["import", "/etc/hostname", "--kind", "base", "--name", "sha256:abc"], 2, "sha256:abc"),
        (["import", "/etc", "--kind", "toolkit", "--name", "x:1", "--prefix", "../up"], 2, "../up"),
        (["import", "/etc", "--kind", "base", "--name", "x:1", "--prefix", "/x"], 2, "/x"),
        (["mount", "box:1", "/nowhere"], 10, "/nowhere"),
        (["run", "--memory", "9" * 400, "box:1", "--", "true"], 125, "999"),
        (["run", "--memory", "99999999999999999G", "box:1", "--", "true"], 125, "99999999999999999G"),
        (["export", "box:1", "-o", "/nowhere/x.tar"], 10, "/nowhere"),
        (["pull", "box:1", "--from", "/nowhere/store"], 17, "/nowhere/store"),
    ],
)
def test_one_line_that_names_the_thing(cli: Cli, argv: list[str], code: int, says: str) -> None:
    before = refs(cli)
    first = cli(*argv, code=code).stderr.decode().splitlines()[0]
    assert first.startswith("error: ")
    assert says in first
    assert refs(cli) == before
    assert not Path("/nowhere").exists()


def test_a_bare_path_does_not_make_the_sandbox_look_like_a_missing_command(cli: Cli, tmp_path: Path) -> None:
    """The programs around the runtime were looked up in the caller's PATH: 127 was then taken for the command's own."""
    (tmp_path / "sh").symlink_to("/bin/sh")
    assert cli("run", "box:1", "--", "echo", "hello", PATH=str(tmp_path)).stdout == b"hello\n"


@pytest.mark.parametrize("variable", [("DSEC_DRIVER", "floppy"), ("SOURCE_DATE_EPOCH", "٣"), ("SOURCE_DATE_EPOCH", "9" * 20)])
def test_settings_that_cannot_be(cli: Cli, tmp_path: Path, variable: tuple[str, str]) -> None:
    name, value = variable
    done = cli("import", tmp_path, "--kind", "base", "--name", "x:1", code=2, **{name: value})
    assert name in done.stderr.decode()


def test_a_limit_beyond_every_machine_is_refused_before_the_runtime_is_asked() -> None:
    with pytest.raises(UsageError, match="memory limit"):
        RunSpec(("true",), memory=1 << 70)


def test_rm_removes_nothing_if_a_name_is_wrong(cli: Cli, tmp_path: Path) -> None:
    cli("import", tmp_path, "--kind", "base", "--name", "keep:1")
    cli("rm", "keep:1", "no:1", code=10)
    cli("inspect", "keep:1")
    cli("rm", "keep:1")


def test_a_full_disk_while_exporting_names_the_output_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", small])
    try:
        for format_ in ("tar", "erofs", "oci"):
            message = cli.json("export", "box:1", "-o", small / "out", "--format", format_, code=18)["message"]
            assert str(small / "out") in message
            assert list(small.iterdir()) == []
    finally:
        umount(small)


def test_a_full_disk_under_the_cache_is_no_space(cli: Cli, tmp_path: Path) -> None:
    small, image = tmp_path / "small", tmp_path / "image"
    small.mkdir()
    with open(image, "wb") as stream:
        stream.truncate(8 << 20)
    run(["mkfs.ext4", "-q", "-F", "-m", "0", "-N", "64", image])
    run(["mount", "-o", "loop", image, small])
    try:
        (small / "layer.toml").write_text('kind = "workspace"\nname = "w:1"\nparent = "box:1"\nrun = ["true"]\n')
        for number in range(80):  # inodes, so that small files fail too
            try:
                (small / f"fill{number}").touch()
            except OSError:
                break
        for argv, code in (
            (["run", "box:1", "--", "true"], 125),
            (["build", small / "layer.toml"], 18),
            (["mount", "box:1", tmp_path], 18),
        ):
            assert "no space left" in cli(*argv, code=code, DSEC_CACHE=str(small / "cache")).stderr.decode().lower()
    finally:
        umount(small)


class Damaged:
    """A store with one sound layer and one to be damaged, and a good copy of it in ``replica``."""

    def __init__(self, home: Path) -> None:
        self.replica, self.output = home / "replica", home / "out"
        self.session = Session(home / "store", home / "cache")
        for name in ("sound", "broken"):
            source = home / name
            source.mkdir()
            (source / "file").write_bytes(os.urandom(100_000))
            import_source(self.session, source, kind="base", name=f"{name}:1")
            push(self.session, f"{name}:1", str(self.replica))

    def blob(self, role: str) -> Path:
        shown = inspect(self.session, "broken:1")
        digest = {"manifest": shown.digest, **{blob.role: blob.digest for blob in shown.layers[0].blobs}}[role]
        return Path(self.session.store_url) / "blobs/sha256" / digest[7:9] / digest[7:]

    def reopen(self) -> None:
        """Without the descriptors of files that are gone."""
        self.session.close()
        self.session = Session(self.session.store_url, self.session.cache)

    def fails(self, verb: Callable[[Session], object]) -> str:
        with pytest.raises((CorruptError, NotFound)) as caught:
            verb(self.session)
        return caught.value.message


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Damaged]:
    place = Damaged(tmp_path)
    yield place
    place.session.close()


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize("role", ["manifest", "config", "metadata", "chunks", "segments"])
def test_f7_a_damaged_blob_is_found_named_and_repaired(damaged: Damaged, role: str, how: str) -> None:
    """One damaged object hides no other; nothing trusts the bytes; a replica repairs them."""
    path = damaged.blob(role)
    flip(path) if how == "flip" else path.unlink()
    damaged.reopen()
    kinds = {"broken:1": "damaged" if role in ("manifest", "config") else "base", "sound:1": "base"}
    assert {row.name: row.kind for row in ls(damaged.session)} == kinds
    broken, sound = verify(damaged.session, deep=True)
    assert sound.problems == ()
    assert any(path.name in problem for problem in broken.problems)
    if role in ("manifest", "metadata", "segments"):
        assert path.name in damaged.fails(lambda session: export(session, "broken:1", damaged.output))
        assert not damaged.output.exists()
    if role in ("manifest", "metadata"):
        assert path.name in damaged.fails(lambda session: diff(session, "broken:1", "sound:1"))
        assert path.name in damaged.fails(lambda session: inspect(session, "broken:1", tree=True))
    repaired, _ = verify(damaged.session, deep=True, repair=str(damaged.replica))
    assert (repaired.repaired, repaired.problems) == ((f"sha256:{path.name}",), ())
    assert all((report.problems, report.repaired) == ((), ()) for report in verify(damaged.session, deep=True))


def test_repair_by_the_command_line(damaged: Damaged) -> None:
    call = Cli(Path(damaged.session.store_url).parent)
    path = damaged.blob("manifest")
    path.unlink()
    assert f"missing sha256:{path.name}" in call("verify", code=16).stdout.decode()
    assert f"repaired sha256:{path.name}" in call("verify", "--repair", damaged.replica).stdout.decode()


@pytest.mark.parametrize("manifest", [b"[" * 200_000, b"{" + b" " * (17 << 20) + b"}", b"\x00\xff", b""])
def test_no_manifest_hides_the_other_names(damaged: Damaged, manifest: bytes) -> None:
    damaged.session.store.set_ref("odd:1", put_bytes(damaged.session.store, manifest).digest, expected=None)
    assert [row.kind for row in ls(damaged.session)] == ["base", "damaged", "base"]
    assert [bool(report.problems) for report in verify(damaged.session)] == [False, True, False]


def test_names_in_a_layer_cannot_write_on_the_terminal(damaged: Damaged, tmp_path: Path) -> None:
    source = tmp_path / "names"
    source.mkdir()
    (source / "a\nb\033[31m\x9b").touch()
    (Path(os.fsdecode(os.fsencode(source) + b"/\xff"))).touch()
    import_source(damaged.session, source, kind="base", name="names:1")
    call = Cli(Path(damaged.session.store_url).parent)
    for argv in (["inspect", "names:1", "--tree"], ["diff", "sound:1", "names:1"]):
        shown = call(*argv).stdout
        assert rb"a\x0ab\x1b[31m\x9b" in shown
        assert rb"\xff" in shown
        assert b"\033" not in shown
    output = os.fsdecode(os.fsencode(tmp_path) + b"/o\xff")
    assert b"o\\udcff" in call("export", "names:1", "-o", output).stdout


def test_a_flipped_segment_table_is_not_believed(damaged: Damaged) -> None:
    """The table lies behind the compressed image, where zstd has no checksum: only the blob's digest tells."""
    path = damaged.blob("metadata")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert path.name in damaged.fails(lambda session: inspect(session, "broken:1", tree=True))
    assert path.name in damaged.fails(lambda session: diff(session, "broken:1", "sound:1"))
    assert path.name in damaged.fails(lambda session: export(session, "broken:1", damaged.output))


@pytest.mark.slow
def test_directories_nested_two_thousand_deep_verify(tmp_path: Path) -> None:
    """fsck.erofs recurses, and ended by SIGSEGV with the usual 8 MiB of stack: the layer was called malformed."""
    source = tmp_path / "deep.tar"
    with tarfile.open(source, "w", format=tarfile.PAX_FORMAT) as tar:
        entry = tarfile.TarInfo("/".join(["d"] * 2000))
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    with Session(tmp_path / "store", tmp_path / "cache") as session:
        import_source(session, source, kind="base", name="deep:1")
        assert verify(session, deep=True)[0].problems == ()


def test_ctrl_c_while_modules_load_is_no_traceback(tmp_path: Path) -> None:
    """The first module that main() needs is replaced by one that is interrupted."""
    script = (
        "import builtins, sys\n"
        "real = builtins.__import__\n"
        "def stop(name, *rest):\n"
        "    if name == 'click':\n"
        "        raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = stop\n"
        "import dsec_layers.__main__\n"
    )
    with spawn([sys.executable, "-c", script], stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_the_slower_build_is_told_when_the_name_was_changed_and_its_own_result_is_what_the_name_was_before(tmp_path: Path) -> None:
    """It said that the name is its layer, because that was so when it began."""
    sources = [tmp_path / "one", tmp_path / "two"]
    for source in sources:
        source.mkdir()
        (source / "file").write_text(source.name)
    with Session(tmp_path / "store", tmp_path / "cache") as session:
        one = import_source(session, sources[0], kind="base", name="x:1").digest
        two = import_source(session, sources[1], kind="base", name="x:1").digest
        with pytest.raises(Conflict, match="x:1 was changed"):
            swap_ref(session.store, "x:1", one, before=one)
        assert session.store.get_ref("x:1").digest == two
