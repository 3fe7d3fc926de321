"""Roots and sandboxes for tests that run programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_layers.errors import DsecError
from dsec_layers.sandbox import Captured, RunSpec, Sandbox
from dsec_layers.sandbox.box import _try
from dsec_layers.sandbox.cgroups import CgroupHost, read_cgroup_mounts
from dsec_layers.sandbox.output import Collector
from dsec_layers.sandbox.runtime import Runtime, _candidates
from tests.kit.busybox import make_busybox_root
from tests.kit.daemon_logs import log_places, pytest_runtest_makereport, pytest_runtest_teardown
from tests.kit.tools import tool

__all__ = ["log_places", "pytest_runtest_makereport", "pytest_runtest_teardown"]


@pytest.fixture(scope="session")
def busybox_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root directory with a static busybox and little else: no /proc, /dev, /sys, and of /etc only passwd and group. Not to be changed by tests."""
    return make_busybox_root(tmp_path_factory.mktemp("busybox"))


def _cgroups() -> CgroupHost:
    return read_cgroup_mounts(Path("/proc/self/mounts").read_text())


def _groups() -> set[str]:
    """Control groups of sandboxes in which nothing runs."""
    host = _cgroups()
    return {
        path.name
        for root in host.roots()
        for path in root.glob("dsec-layers-*")
        if not host.pids_of(path.name.removeprefix("dsec-layers-"))
    }


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory of sandboxes, of which nothing may be left at the end of the test: no directory, mount, or control group."""
    path = tmp_path / "state"
    path.mkdir()
    before = _groups()
    yield path
    left = [str(item) for item in path.rglob("*") if item.name not in ("sandboxes", ".lock", "runtime.json")]
    left += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(path) in line]
    assert left == []
    # Somebody else's sandbox on this machine may be between its last process and the removal of its groups.
    deadline = time.monotonic() + 10
    while _groups() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _groups() <= before


@pytest.fixture(scope="session", params=["crun", "runc"])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """Each OCI runtime, in the first way in which it works on this host."""
    tool(request.param)
    reason = "no way to run it was found"
    for candidate in _candidates(_cgroups()):
        if candidate.name == request.param:
            try:
                _try(candidate, tmp_path_factory.mktemp("trial"))
            except DsecError as error:
                reason = error.message
            else:
                return candidate
    pytest.skip(f"{request.param} does not work on this host: {reason}")


@pytest.fixture
def shell(busybox_root: Path, state: Path, runtime: Runtime) -> Callable[..., Captured]:
    """``shell(script, lower=…, input=…, upper=…, **spec)``: run shell lines over the busybox root, or other layers, by each runtime."""

    def execute(script: str, *, lower: list[Path] | None = None, input: int = 0, upper: Path | None = None, **fields: object) -> Captured:
        spec = RunSpec(argv=("/bin/sh", "-c", script), **fields)  # type: ignore[arg-type]
        out, err = Collector(), Collector()
        try:
            with Sandbox(
                spec, lower or [busybox_root], state=state, upper=upper, stdin=input, stdout=out.fd, stderr=err.fd, runtime=runtime
            ) as box:
                outcome = box.wait(60)
        finally:
            stdout, stderr = out.finish(), err.finish()
        return Captured(outcome, stdout, stderr, out.truncated)

    return execute
