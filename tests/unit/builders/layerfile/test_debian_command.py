"""How mmdebstrap is called, and whose mirrors it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_layers.builders.layerfile.debian import bootstrap, command, describe, host_mirrors, parse_mirrors, source_lines
from dsec_layers.builders.layerfile.recipe import DebianInput
from dsec_layers.errors import ToolError, UsageError

ONE_LINE = """
# deb http://commented.test/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] https://mirror.test/debian/ bookworm main contrib # here
deb-src http://mirror.test/debian bookworm main
deb http://mirror.test/debian-security bookworm-security main
deb
"""

DEB822 = """Types: deb deb-src
# a comment inside
URIs: http://one.test/debian http://two.test/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://sources.test/debian
Suites: bookworm

Enabled: no
Types: deb
URIs: http://off.test/debian
Suites: bookworm
"""


def test_mirrors_of_both_kinds_of_files() -> None:
    assert list(parse_mirrors(ONE_LINE)) == ["https://mirror.test/debian/", "http://mirror.test/debian-security"]
    assert list(parse_mirrors(DEB822)) == ["http://one.test/debian", "http://two.test/debian"]


def test_the_hosts_mirrors_and_debians_own(tmp_path: Path) -> None:
    assert host_mirrors(tmp_path) == []
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(DEB822)
    (tmp_path / "sources.list").write_text("deb http://other.test/something bookworm main\n")
    assert host_mirrors(tmp_path) == ["http://one.test/debian"]
    (tmp_path / "sources.list").write_text(ONE_LINE)
    assert host_mirrors(tmp_path) == ["https://mirror.test/debian/", "http://mirror.test/debian-security"]


def test_lines_for_a_release_and_for_a_rolling_suite() -> None:
    mirrors = ["http://m.test/debian/", "http://m.test/debian-security"]
    assert source_lines(DebianInput("trixie", components=("main", "contrib")), mirrors) == [
        "deb http://m.test/debian trixie main contrib",
        "deb http://m.test/debian trixie-updates main contrib",
        "deb http://m.test/debian-security trixie-security main contrib",
    ]
    assert source_lines(DebianInput("sid"), mirrors) == ["deb http://m.test/debian sid main"]
    assert source_lines(DebianInput("x"), ["deb [trusted=yes] http://m.test/a x main"]) == ["deb [trusted=yes] http://m.test/a x main"]


@pytest.mark.parametrize("mirror", ["nonsense", "--help", "http://a b", "ftp"])
def test_what_is_no_mirror(mirror: str) -> None:
    with pytest.raises(UsageError, match="not a mirror"):
        source_lines(DebianInput("x"), [mirror])


def test_the_command() -> None:
    debian = DebianInput("bookworm", ("a", "b"), "apt", ("main",), keyring="/k.gpg", architecture="arm64")
    argv = command("mmdebstrap", debian, ["http://m.test/debian"], Path("/out.tar"), root=True, bundle=Path("/ca.pem"))
    assert argv[:8] == [
        "mmdebstrap", "--mode=root", "--variant=apt", "--format=tar", "--components=main", "--include=a,b", "--architectures=arm64", "--keyring=/k.gpg",
    ]  # fmt: skip
    assert '--aptopt=Acquire::https::CaInfo "/ca.pem"' in argv
    assert argv[-4:-2] == ["bookworm", "/out.tar"]
    hook = next(part for part in argv if part.startswith("--customize-hook="))
    for residue in ("etc/resolv.conf", "etc/hostname", "etc/machine-id", "var/lib/dpkg/status-old", "/CaInfo/d"):
        assert residue in hook
    plain = command("mmdebstrap", DebianInput("bookworm"), [], Path("/out.tar"), root=False)
    assert "--mode=unshare" in plain
    assert not any("CaInfo" in part or part.startswith(("--include", "--keyring", "--architectures")) for part in plain)


def test_the_key_of_a_root_does_not_depend_on_the_order_of_packages() -> None:
    mirrors = ("http://m.test/debian",)
    assert describe(DebianInput("x", ("a", "b"), mirrors=mirrors)) == describe(DebianInput("x", ("b", "a"), mirrors=mirrors))
    assert describe(DebianInput("x", ("a",), mirrors=mirrors)) != describe(DebianInput("y", ("a",), mirrors=mirrors))


def test_failures_carry_what_mmdebstrap_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mmdebstrap"
    program.write_text('#!/bin/sh\necho "E: NO_PUBKEY 1234" >&2\necho "$SOURCE_DATE_EPOCH $http_proxy" >&2\nexit 25\n')
    program.chmod(0o755)
    monkeypatch.setattr("dsec_layers.proc.find_tool", lambda name: str(program))
    with pytest.raises(ToolError, match=r"exit code 25: E: NO_PUBKEY 1234\n77 http://p.test") as caught:
        bootstrap(DebianInput("bookworm"), tmp_path / "out.tar", epoch=77, environ={"http_proxy": "http://p.test"})
    assert "keyring" in (caught.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["mmdebstrap"]
