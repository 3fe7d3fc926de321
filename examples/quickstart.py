"""The main job on real input, start to end, with a closing report.

Builds a Debian base (mmdebstrap), a workspace with a real Python project and its test suite, and a toolkit; composes an environment; empties the cache; mounts it lazily and
runs the project's tests in it; then does the same eagerly (fetch everything, unpack, run) and prints both beside each other.
Everything it makes lies below one directory (default: .quickstart), which may be deleted afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dsec_layers import Session, build, cache_clear, cache_show, env_create, export, inspect, run, stop
from dsec_layers.api.mounts import run_spec
from dsec_layers.cli.console import Console, human_bytes
from dsec_layers.proc import run as run_program
from dsec_layers.sandbox import run as run_sandbox

EXAMPLES = Path(__file__).resolve().parent
ENVIRONMENT = "quickstart:1"
LAYERS = (
    ("Base: a Debian root by mmdebstrap", "base-debian.toml"),
    ("Workspace: a Python project from PyPI with its dependencies and test suite", "workspace-python.toml"),
    ("Toolkit: a linter and a type checker", "toolkit-quality.toml"),
    ("Toolkit: tools that find things", "toolkit-search.toml"),
)
FIRST = ("/bin/true",)
TESTS = ("pytest", "-q", "-p", "no:cacheprovider")


@dataclass
class Measured:
    """One way to run the tests: bytes moved from the store, seconds to the first command, seconds to the end of the tests."""

    fetched: int
    first: float
    whole: float
    code: int


def step(title: str) -> None:
    """Say what comes next."""
    sys.stderr.write(f"\n==> {title}\n")
    sys.stderr.flush()


def lazily(session: Session) -> Measured:
    """Mount and run with an empty cache."""
    cache_clear(session)
    before = cache_show(session).fetched_bytes
    began = time.monotonic()
    run(session, ENVIRONMENT, FIRST)
    first = time.monotonic() - began
    code = run(session, ENVIRONMENT, TESTS).code
    return Measured(cache_show(session).fetched_bytes - before, first, time.monotonic() - began, code)


def eagerly(session: Session, work: Path) -> Measured:
    """Fetch every blob, unpack the merged tree, run on it: what a host without on-demand loading does."""
    archive, tree = work / "eager.tar", work / "eager"
    archive.unlink(missing_ok=True)
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    fetched = inspect(session, ENVIRONMENT).stored_bytes
    began = time.monotonic()
    export(session, ENVIRONMENT, archive)
    run_program(["tar", "--extract", "--file", archive, "--directory", tree, "--xattrs", "--xattrs-include=*", "--numeric-owner"])
    run_sandbox(run_spec(session, ENVIRONMENT, FIRST), [tree], state=work / "eager-state")
    first = time.monotonic() - began
    code = run_sandbox(run_spec(session, ENVIRONMENT, TESTS), [tree], state=work / "eager-state")
    whole = time.monotonic() - began
    archive.unlink()
    shutil.rmtree(tree)
    return Measured(fetched, first, whole, code)


def report(console: Console, session: Session, lazy: Measured, eager: Measured) -> None:
    """The closing table."""
    found = inspect(session, ENVIRONMENT)
    step("Report")
    rows = [
        (
            f"{layer.kind} {layer.name}",
            human_bytes(layer.counts.get("bytes", 0)),
            human_bytes(sum(b.size for b in layer.blobs if not b.foreign)),
        )
        for layer in found.layers
    ]
    rows.append(("environment", human_bytes(found.image_bytes), human_bytes(found.stored_bytes)))
    console.table(("layer", "image", "stored (dedup + zstd)"), rows, right=(1, 2))
    console.out()
    console.table(
        ("", "lazy", "eager", "lazy / eager"),
        [
            ("bytes fetched", human_bytes(lazy.fetched), human_bytes(eager.fetched), f"{lazy.fetched / eager.fetched:.2f}"),
            ("time to first command", f"{lazy.first:.2f} s", f"{eager.first:.2f} s", f"{lazy.first / eager.first:.2f}"),
            ("time to tests done", f"{lazy.whole:.2f} s", f"{eager.whole:.2f} s", f"{lazy.whole / eager.whole:.2f}"),
            ("exit code of the tests", lazy.code, eager.code, ""),
        ],
        right=(1, 2, 3),
    )
    console.out()
    read = cache_show(session).bytes
    console.out(f"share of the image's bytes that were read: {100 * read / found.image_bytes:.1f} % (the DSec report has 4.2 to 13.3 %)")


def main() -> int:
    """Run it all; exit code 0 if the project's tests passed both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=EXAMPLES.parent / ".quickstart", help="where everything goes (default: %(default)s)")
    arguments = parser.parse_args()
    work: Path = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    console = Console()
    with Session(work / "store", work / "cache", progress=console) as session:
        names = []
        for title, file in LAYERS:
            step(title)
            made = build(session, EXAMPLES / file)
            console.info(f"{made.name} {made.digest}")
            names.append(made.name)
        step("Environment")
        env_create(session, ENVIRONMENT, base=names[0], workspace=names[1], toolkits=names[2:])
        step("Lazy: empty cache, mount, run the project's tests")
        lazy = lazily(session)
        step("Eager: fetch everything, unpack, run the same")
        eager = eagerly(session, work)
        report(console, session, lazy, eager)
        stop(session)  # so that the directory may be deleted
    return 0 if lazy.code == eager.code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
