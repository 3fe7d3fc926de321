"""``dsec-layers disk``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsec_layers.cli.common import REF, App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes
from dsec_layers.cli.settings import source_date_epoch
from dsec_layers.cli.values import parse_size
from dsec_layers.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from dsec_layers.api.disks import DiskInfo, Sealed

DISK = click.Path(path_type=Path)
FORMAT = click.Choice(["zfile", "zfile-zstd", "lsmt"])


@click.group("disk", short_help="Writable disks for microVMs.")
def command() -> None:
    """Make, serve, snapshot and branch writable disks for microVMs. DISK is a local directory, REF a sealed disk in the store."""


@command.command(
    "create",
    cls=Command,
    example="dsec-layers disk create ./vm1 --size 4G --mkfs ext4\ndsec-layers disk create ./vm2 --parent tools-disk:1\ndsec-layers disk create ./vm3 --from dev:1 --size 8G",
)
@click.argument("disk", metavar="DISK", type=DISK)
@click.option("--size", metavar="SIZE", help="Bytes of the disk, such as 512M or 4G; default: that of --parent, or what --from needs.")
@click.option("--parent", metavar="REF", type=REF, help="The sealed disk below.")
@click.option("--mkfs", type=click.Choice(["none", "ext4"]), help="Make a file system; default: ext4 with --from, else none.")
@click.option(
    "--from", "source", metavar="DIR|TAR|REF", type=REF, help="What the file system holds: a directory, tar, layer or environment."
)
@app_options
@pass_app
def create(app: App, disk: Path, size: str | None, parent: str | None, mkfs: str | None, source: str | None) -> None:
    """Make a writable disk in the new directory DISK: empty, with a file system, or on a sealed disk."""
    from dsec_layers.api.disks import create as make

    mkfs = mkfs or ("ext4" if source else "none")
    made = make(app.session, disk, size=parse_size(size), parent=parent, mkfs=mkfs, source=source, epoch=source_date_epoch() or 0)
    app.console.result(made, lambda: _show(app, made))


@command.command("show", cls=Command, example="dsec-layers disk show ./vm1")
@click.argument("disk", metavar="DISK", type=DISK)
@app_options
@pass_app
def show(app: App, disk: Path) -> None:
    """Say what DISK is made of, and where it is served."""
    from dsec_layers.api.disks import info

    found = info(disk)
    app.console.result(found, lambda: _show(app, found))


@command.command(
    "attach",
    cls=Command,
    example="dsec-layers disk attach ./vm1 --detach\nqemu-system-x86_64 ... -drive file=nbd+unix:///?socket=./vm1/nbd.sock,format=raw,if=virtio",
)
@click.argument("disk", metavar="DISK", type=DISK)
@click.option("--socket", type=click.Path(path_type=Path), metavar="PATH", help="Listen on this Unix socket; default: nbd.sock in DISK.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Listen on this port of the loopback instead; 0: any.")
@click.option("--read-only", is_flag=True, help="Refuse writes.")
@click.option("--detach", is_flag=True, help="Serve in the background, until disk detach.")
@app_options
@pass_app
def attach(app: App, disk: Path, socket: Path | None, port: int | None, read_only: bool, detach: bool) -> None:
    """Serve DISK over NBD, for a VMM or nbd-client; ends with Ctrl-C, SIGTERM or disk detach."""
    from dsec_layers.api.disks import Attached, attach_detached
    from dsec_layers.api.disks import attach as run

    def ready(attached: Attached) -> None:
        app.console.result(attached, lambda: app.console.out(attached.uri))

    if detach:
        ready(attach_detached(app.session, disk, unix=socket, port=port, read_only=read_only))
    else:
        run(app.session, disk, unix=socket, port=port, read_only=read_only, ready=ready)


@command.command("detach", cls=Command, example="dsec-layers disk detach ./vm1")
@click.argument("disk", metavar="DISK", type=DISK)
@app_options
@pass_app
def detach(app: App, disk: Path) -> None:
    """End the server of DISK; all that was written is durable then."""
    from dsec_layers.api.disks import detach as end

    found = end(disk)
    app.console.result(found, lambda: app.console.out(found.path))


@command.command(
    "snapshot", cls=Command, example="dsec-layers disk snapshot ./vm1\ndsec-layers disk snapshot ./vm1 --name trajectory:step-7"
)
@click.argument("disk", metavar="DISK", type=DISK)
@click.option("--name", metavar="NAME:TAG", help="Publish the snapshot in the store, as disk commit does.")
@click.option("--format", "format_", type=FORMAT, default="zfile", show_default=True, help="How its layer is packed.")
@app_options
@pass_app
def snapshot(app: App, disk: Path, name: str | None, format_: str) -> None:
    """Freeze what was written to DISK so far, while it is attached or not. It goes on on top of that."""
    if name is not None:
        _commit(app, disk, name, format_, "")
        return
    from dsec_layers.api.disks import snapshot as freeze

    made = freeze(disk)
    app.console.result(made, lambda: app.console.out(f"{made.path}: {len(made.frozen)} frozen generations"))


@command.command("commit", cls=Command, example="dsec-layers disk commit ./vm1 --name tools-disk:1")
@click.argument("disk", metavar="DISK", type=DISK)
@click.option("--name", required=True, metavar="NAME:TAG", help="The sealed disk's name.")
@click.option("--format", "format_", type=FORMAT, default="zfile", show_default=True, help="How the new layer is packed.")
@click.option("--fs-type", default="", metavar="TYPE", help="The file system on it, for the layer's annotations.")
@app_options
@pass_app
def commit(app: App, disk: Path, name: str, format_: str, fs_type: str) -> None:
    """Seal what was written to DISK as a layer in the store, and name the whole disk; it goes on on top of that. Works while it is attached."""
    _commit(app, disk, name, format_, fs_type)


@command.command("branch", cls=Command, example="dsec-layers disk branch trajectory:step-7 ./try1 ./try2 ./try3")
@click.argument("ref", metavar="REF", type=REF)
@click.argument("disks", metavar="DISK...", nargs=-1, required=True, type=DISK)
@app_options
@pass_app
def branch(app: App, ref: str, disks: tuple[Path, ...]) -> None:
    """Make writable disks on the sealed disk REF, one in each new directory; each records only its own changes."""
    from dsec_layers.api.disks import branch as make

    made = make(app.session, ref, disks)

    def show() -> None:
        for path in made.paths:
            app.console.out(path)

    app.console.result(made, show)


@command.command("merge", cls=Command, example="dsec-layers disk merge trajectory:step-7 --name tools-disk:2 --keep 1")
@click.argument("ref", metavar="REF", type=REF)
@click.option("--name", required=True, metavar="NAME:TAG", help="The new disk's name.")
@click.option("--keep", default=0, type=click.IntRange(0), metavar="N", show_default=True, help="Leave the lowest N layers as they are.")
@click.option("--format", "format_", type=FORMAT, default="zfile", show_default=True, help="How the new layer is packed.")
@app_options
@pass_app
def merge(app: App, ref: str, name: str, keep: int, format_: str) -> None:
    """Make one layer of the layers of the sealed disk REF. It reads the same, and opens faster."""
    from dsec_layers.api.diskconvert import merge as make

    made = make(app.session, ref, name, keep=keep, format=format_)
    app.console.result(made, lambda: _show_sealed(app, made))


@command.command("resize", cls=Command, example="dsec-layers disk resize ./vm1 --size 8G")
@click.argument("disk", metavar="DISK", type=DISK)
@click.option("--size", required=True, metavar="SIZE", help="The new size, such as 8G; not below the present one.")
@app_options
@pass_app
def resize(app: App, disk: Path, size: str) -> None:
    """Make DISK larger. It must not be attached; the guest then grows its file system (resize2fs)."""
    from dsec_layers.api.disks import resize as make

    wanted = parse_size(size)
    assert wanted is not None
    found = make(disk, wanted)
    app.console.result(found, lambda: _show(app, found))


@command.command(
    "convert",
    cls=Command,
    example="dsec-layers disk convert vm.qcow2 --name vm:1\ndsec-layers disk convert vm:1 -o vm.raw\ndsec-layers disk convert tools.tar --mkfs ext4 --name tools-disk:1\ndsec-layers disk convert vm:1 --to oci -o vm-image",
)
@click.argument("source", metavar="SOURCE", type=REF)
@click.option("--name", metavar="NAME:TAG", help="Publish it in the store under this name.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="PATH", help="Write it to this file or directory instead.")
@click.option(
    "--to", type=click.Choice(["raw", "qcow2", "overlaybd", "oci"]), default="raw", show_default=True, help="What --output is to be."
)
@click.option("--format", "format_", type=FORMAT, default="zfile", show_default=True, help="How new layers in the store are packed.")
@click.option(
    "--mkfs", type=click.Choice(["ext4"]), help="With --name: make a file system; SOURCE is a directory, tar, layer or environment."
)
@click.option("--size", metavar="SIZE", help="With --mkfs: bytes of the disk; default: what SOURCE needs.")
@click.option("--flatten", is_flag=True, help="With --name: make one layer, even where SOURCE has OverlayBD layers.")
@app_options
@pass_app
def convert(
    app: App, source: str, name: str | None, output: Path | None, to: str, format_: str, mkfs: str | None, size: str | None, flatten: bool
) -> None:
    """Turn one form of disk into another.

    SOURCE is a DISK, a REF (a layer or environment gives its flat EROFS image), a raw or qcow2 file, an OverlayBD blob, a config.v1.json, or an OCI image layout
    made by accelerated-container-image. An attached DISK is snapshotted.
    """
    from dsec_layers.api.diskconvert import convert as write
    from dsec_layers.api.diskconvert import seal

    if (name is None) == (output is None):
        raise UsageError("give --name NAME:TAG or --output PATH")
    if (mkfs and name is None) or (size and not mkfs):
        raise UsageError("--mkfs goes with --name, --size with --mkfs")
    if name is not None:
        made = seal(
            app.session,
            source,
            name,
            format=format_,
            flatten=flatten,
            mkfs=mkfs or "",
            size=parse_size(size),
            epoch=source_date_epoch() or 0,
        )
        app.console.result(made, lambda: _show_sealed(app, made))
        return
    assert output is not None
    done = write(app.session, source, output, to=to)
    app.console.result(done, lambda: app.console.out(f"{done.output}  {human_bytes(done.virtual_size)}, {human_bytes(done.bytes)} used"))


@command.command("verify", cls=Command, example="dsec-layers disk verify ./vm1")
@click.argument("disk", metavar="DISK", type=DISK)
@app_options
@pass_app
def verify(app: App, disk: Path) -> int:
    """Check DISK: its local generations open and fit together, and every byte of the sealed disk below matches its digest. Exit code 16 if not."""
    from dsec_layers.api.disks import verify as check

    report = check(app.session, disk)

    def show() -> None:
        app.console.out(f"{'BAD' if report.problems else 'ok '}  {report.name}  ({report.blobs} blobs, every byte read)")
        for problem in report.problems:
            app.console.out(f"     {problem}")

    app.console.result(report, show)
    return CorruptError.exit_code if report.problems else 0


def _commit(app: App, disk: Path, name: str, format_: str, fs_type: str) -> None:
    from dsec_layers.api.disks import commit as seal

    made = seal(app.session, disk, name, format=format_, fs_type=fs_type)
    app.console.result(made, lambda: _show_sealed(app, made))


def _show(app: App, found: DiskInfo) -> None:
    app.console.out(f"{found.path}: {human_bytes(found.virtual_size)}, {human_bytes(found.local_bytes)} of it here")
    if found.parent:
        app.console.out(f"  on {found.parent} in {found.store}")
    if found.generations:
        app.console.out(f"  {found.generations} frozen generations")
    if found.uri:
        app.console.out(f"  served at {found.uri}")


def _show_sealed(app: App, made: Sealed) -> None:
    app.console.out(f"{made.name}  {made.digest}")
    app.console.info(f"{human_bytes(made.virtual_size)} in {made.layers} layers, {human_bytes(made.stored_bytes)} new")
