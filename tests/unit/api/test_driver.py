"""Which on-demand driver a mount gets: the one that was asked for, else the best that works on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsec_layers.api import mounts
from dsec_layers.api.session import Session
from dsec_layers.cli.settings import load_settings
from dsec_layers.errors import HostError
from dsec_layers.fuse.daemon.worker import _Worker


class Host:
    """Picks drivers as the daemon of a host without fanotify's pre-content events does."""

    warnings: tuple[str, ...] = ()

    def __init__(self, unusable: dict[str, str] | None) -> None:
        self._worker = _Worker.__new__(_Worker)
        self._worker._spec = {"unusable": unusable}

    def mount(self, store: object, digest: str, target: Path, *, label: str, driver: str | None) -> SimpleNamespace:
        """As Host."""
        return SimpleNamespace(driver=self._worker._pick(driver or ""))

    @contextmanager
    def attach(self, store: object, layers: list[str], *, driver: str | None) -> Iterator[SimpleNamespace]:
        """As Host."""
        yield SimpleNamespace(paths=[Path(self._worker._pick(driver or ""))])

    def close(self) -> None:
        """As Host."""


UNUSABLE = {"message": "no pre-content events", "hint": "use FUSE"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name is a layer."""
    monkeypatch.setattr(mounts, "resolve", lambda store, text: ("sha256:0", None))
    monkeypatch.setattr(mounts, "_members", lambda session, text: ["sha256:0"])
    monkeypatch.setattr(mounts, "run_spec", lambda *arguments, **settings: None)
    monkeypatch.setattr(mounts, "run_sandbox", lambda spec, lower, **settings: str(lower[0]))


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("unusable", "asked", "set_before", "want"),
    [
        (None, None, None, "fanotify"),
        (UNUSABLE, None, None, "fuse"),
        (UNUSABLE, "fuse", None, "fuse"),
        (None, None, "fuse", "fuse"),
        (None, "fanotify", "fuse", "fanotify"),
        (UNUSABLE, "fanotify", None, ""),
        (UNUSABLE, None, "fanotify", ""),
    ],
)
def test_b7_the_driver_of_a_mount(
    tmp_path: Path, unusable: dict[str, str] | None, asked: str | None, set_before: str | None, want: str
) -> None:
    """``want`` empty: who insists on fanotify is told what this host lacks."""
    options: dict[str, Any] = {} if set_before is None else {"driver": set_before}
    with Session(tmp_path / "store", tmp_path / "cache", **options) as session:
        session.__dict__["host"] = Host(unusable)
        if not want:
            with pytest.raises(HostError, match="pre-content"):
                mounts.mount(session, "dev:1", tmp_path, driver=asked)
            return
        assert mounts.mount(session, "dev:1", tmp_path, driver=asked).driver == want
        if asked is None:
            assert str(mounts.run(session, "dev:1", ["true"]).code) == want


def test_b7_the_command_line_insists_on_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("DSEC_DRIVER", raising=False)
    assert load_settings(None, None).driver is None
    monkeypatch.setenv("DSEC_DRIVER", "fanotify")
    assert load_settings(None, None).driver == "fanotify"
