"""What every verb needs: a store, a cache, and somebody to report to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.errors import HostError
from dsec_layers.progress import SILENT, Progress
from dsec_layers.store.base import Store
from dsec_layers.store.open import open_store

if TYPE_CHECKING:
    from dsec_layers.fuse.client.host import Host
    from dsec_layers.registry.catalog import Catalog

__all__ = ["Session"]


class Session:
    """A store, a cache directory and a progress receiver; opens what a verb asks for, once. Use as a context.

    ``store`` is a URL or a path; ``driver`` names the on-demand driver of mounts (``fanotify`` or ``fuse``);
    None: fanotify where it works, else FUSE.
    """

    def __init__(self, store: str | Path, cache: str | Path, *, progress: Progress = SILENT, driver: str | None = None) -> None:
        self.store_url = str(store)
        self.cache = Path(cache).absolute()
        self.progress = progress
        self.driver = driver

    @cached_property
    def store(self) -> Store:
        """The store, opened at the first use."""
        return open_store(self.store_url)

    @cached_property
    def catalog(self) -> Catalog:
        """The chunk catalog of this store, kept in the cache directory."""
        from dsec_layers.registry.catalog import Catalog

        directory = self.cache / "catalog"
        directory.mkdir(parents=True, exist_ok=True)
        return Catalog(directory / f"{sha256_digest(self.store.url.encode())[7:23]}.sqlite", store=self.store, progress=self.progress)

    @cached_property
    def host(self) -> Host:
        """The mount daemon of this cache, started if need be."""
        from dsec_layers.fuse.client.host import open_host

        if os.geteuid() != 0:
            raise HostError("mounts and sandboxes need root", hint="sudo; build, import, inspect, verify and export work without")
        return open_host(self.cache)

    @contextmanager
    def mounted(self, digest: Digest, target: Path, label: str) -> Iterator[None]:
        """A layer or environment, mounted read-only on the existing directory ``target`` while the context lasts; ``label`` is its name in ``ps``."""
        self.host.mount(self.store, digest, target, label=label, driver=self.driver)
        try:
            yield
        finally:
            self.host.umount(target)

    def close(self) -> None:
        """Close what was opened."""
        for name in ("host", "catalog", "store"):
            opened = self.__dict__.pop(name, None)
            if opened is not None:
                opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
