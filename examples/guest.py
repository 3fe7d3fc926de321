"""A microVM's disks, start to end: a guest kernel in QEMU on EROFS layers and a writable disk, a snapshot while it runs, and two branches of it at the same time.

Run it from the repository: ``.venv/bin/python -m examples.guest``. It needs Linux on x86-64, Debian's apt-get (for the guest's kernel, which is unpacked and not
installed), qemu-system-x86, busybox-static and e2fsprogs, and no rights. How the guest is put together is in tests/kit/guest.py and docs/guests.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dsec_layers import Session, export, import_source, stop
from dsec_layers.api.disks import attach_detached, branch, commit, create, detach
from dsec_layers.disks.attach import SOCKET
from dsec_layers.errors import DsecError
from tests.kit.guest import Guest, Kernel, boot, busybox_root, cache_directory, find_kernel, pad_image

TOOL = '#!/bin/sh\necho "$(hostname) on $(uname -r) has: $(cd /work && echo *)"\n'


class Stopwatch:
    """Says what is done, and when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._began:7.2f} s  {text}\n")
        sys.stdout.flush()


def make_layers(session: Session, work: Path) -> list[Path]:
    """A base with a busybox and a toolkit with one program, and their images, the base's first."""
    busybox_root(work / "base")
    (work / "toolkit/usr/bin").mkdir(parents=True)
    (work / "toolkit/usr/bin/tell").write_text(TOOL)
    (work / "toolkit/usr/bin/tell").chmod(0o755)
    images = []
    for kind in ("base", "toolkit"):
        import_source(session, work / kind, kind=kind, name=f"{kind}:1")
        images.append(work / f"{kind}.erofs")
        export(session, f"{kind}:1", images[-1], format="erofs")
        pad_image(images[-1])
    return images


@contextmanager
def guest_on(session: Session, kernel: Kernel, images: list[Path], disk: Path) -> Iterator[Guest]:
    """A guest whose disk has a server of its own."""
    attach_detached(session, disk)
    try:
        with boot(kernel, images, disk / SOCKET) as guest:
            guest.run(f"hostname {disk.name}; mkdir -p /work")
            yield guest
    finally:
        detach(disk)


@contextmanager
def session_in(work: Path) -> Iterator[Session]:
    """A store and a cache in ``work``. What root's disks read goes through the cache's daemon, which has to end before its directory goes."""
    with Session(work / "store", work / "cache") as session:
        try:
            yield session
        finally:
            if os.geteuid() == 0:
                stop(session)


def demonstrate(work: Path) -> None:
    """The whole story, told on standard output."""
    say = Stopwatch()
    kernel = find_kernel(cache_directory())
    say(f"kernel {kernel.version}")
    with session_in(work) as session:
        images = make_layers(session, work)
        say("base and toolkit are in the store, and exported as EROFS images")
        create(session, work / "origin", size=512 << 20, mkfs="ext4")
        with guest_on(session, kernel, images, work / "origin") as guest:
            say("origin has booted; its layers are mounted so:")
            for line in guest.run("grep -e pmem -e vda /run/mounts").splitlines():
                say("    " + line)
            guest.run("echo 1 >/work/before-the-snapshot; sync")
            sealed = commit(session, work / "origin", "trajectory:1", fs_type="ext4")
            say(f"trajectory:1 made while origin runs: {sealed.stored_bytes:,} bytes stored")
            guest.run("echo 2 >/work/after-the-snapshot; sync")
            say(guest.run("tell").strip())
            guest.power_off()
        branch(session, "trajectory:1", [work / "left", work / "right"])
        with ExitStack() as stack:
            guests = {name: stack.enter_context(guest_on(session, kernel, images, work / name)) for name in ("left", "right")}
            say("two branches run at the same time, on the same images")
            for name, guest in guests.items():
                guest.run(f"echo 3 >/work/written-by-{name}; sync")
            for guest in guests.values():
                say(guest.run("tell").strip())
                guest.power_off()


def main() -> int:
    """Run it in a directory that is removed afterwards unless it was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="an empty directory to work in, which stays")
    given: Path | None = parser.parse_args().work
    work = given.absolute() if given else Path(tempfile.mkdtemp(prefix="dsec-guest-example-"))
    try:
        demonstrate(work)
    except DsecError as error:
        sys.stderr.write(f"{error.message}\n" + (f"{error.hint}\n" if error.hint else ""))
        return 1
    finally:
        if given is None:
            shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
