"""A Linux guest in QEMU for tests and the example: Debian's cloud kernel out of its package, an initramfs made here, a root of EROFS images and a disk.

The guest's root is an overlay: the images, which are virtio-pmem devices mounted with DAX (the first is at the bottom), and on top a directory of the
ext4 disk that an NBD server provides as virtio-blk. Commands go in and results come out over the second serial port, one line each way; the first is the
kernel's console. The processor is emulated (TCG): that works on every host and is the same on all of them.
"""

from __future__ import annotations

import base64
import lzma
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from dsec_layers.errors import DsecError, ToolError
from dsec_layers.proc import PIPE, clean_environment, find_tool, run, spawn

__all__ = [
    "Guest",
    "GuestError",
    "Kernel",
    "archive",
    "boot",
    "cache_directory",
    "find_kernel",
    "pad_image",
    "program_with_libraries",
    "unpack",
]

PMEM_UNIT: Final = 128 << 20
"""A virtio-pmem device must be a multiple of the kernel's memory section, else it has no block device."""

_KERNEL: Final = "linux-image-cloud-amd64"
_MODULES: Final = ("virtio_pci", "virtio_blk", "virtio_pmem", "nd_pmem", "erofs", "overlay", "ext4")
_NETWORK_MODULES: Final = ("virtio_net", "nbd")
_MOUNT_TARGETS: Final = ("proc", "sys", "dev", "run", "tmp")

_INIT: Final = r"""#!/bin/busybox sh
fail() { echo "guest: $*" >/dev/console; /bin/busybox poweroff -f; }
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev || fail "no proc, sys or dev"
mount -t tmpfs run /run
for module in $(cat /modules/order); do insmod /modules/$module || fail "cannot load $module"; done
lower= number=0
for device in /dev/pmem*; do
    [ -b "$device" ] || fail "no pmem device"
    mkdir -p /layers/$number
    mount -t erofs -o ro,dax=always "$device" /layers/$number || fail "cannot mount $device"
    lower=/layers/$number${lower:+:$lower}
    number=$((number + 1))
done
mount -t ext4 /dev/vda /disk || fail "cannot mount the disk"
mkdir -p /disk/upper /disk/work
mount -t overlay -o lowerdir=$lower,upperdir=/disk/upper,workdir=/disk/work root /root || fail "cannot mount the overlay"
cat /proc/mounts >/run/mounts
cp /serve /run/serve
for place in proc sys dev run; do mount --move /$place /root/$place; done
exec switch_root /root /bin/sh /run/serve
"""

_SERVE: Final = r"""export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
port=/dev/ttyS1
exec 3<>$port
stty -F $port raw -echo
echo ready >&3
while read -r encoded <&3; do
    echo "$encoded" | base64 -d >/run/command
    sh /run/command >/run/output 2>&1 3>&-
    echo "$? $(base64 -w 0 /run/output)" >&3
done
"""


class GuestError(DsecError):
    """The guest did not start, did not answer in time, or a command in it failed."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel package: the image and the directory of its modules."""

    version: str
    image: Path
    modules: Path


def cache_directory() -> Path:
    """Where packages are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "dsec-layers-guests"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def unpack(packages: Sequence[str], cache: Path) -> Path:
    """The directory into which Debian packages were unpacked; nothing is installed. They are fetched once. Raises ToolError if they cannot be had."""
    target = cache / "+".join(packages)
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=cache, prefix=".unpack-") as name:
        # apt runs its downloads as a user of its own where it can; as root it says that it cannot do so here.
        run(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages], cwd=name, timeout=300)
        files = Path(name) / "files"
        files.mkdir()
        for package in sorted(Path(name).glob("*.deb")):
            run(["dpkg-deb", "--extract", package, files], timeout=120)
        try:
            files.rename(target)
        except OSError:  # somebody else was faster
            if not target.exists():
                raise
    return target


def find_kernel(cache: Path) -> Kernel:
    """Debian's current cloud kernel. Raises ToolError if its package cannot be had."""
    depends = run(["apt-cache", "depends", _KERNEL]).stdout.decode()
    found = re.search(r"Depends: (linux-image-(\S+-cloud-amd64))$", depends, re.MULTILINE)
    if found is None:
        raise ToolError(f"apt knows no {_KERNEL}", hint="apt-get update")
    package, version = found.groups()
    files = unpack([package], cache)
    modules = next(path for path in (files / "lib/modules" / version, files / "usr/lib/modules" / version) if path.is_dir())
    return Kernel(version, files / "boot" / f"vmlinuz-{version}", modules)


def load_order(kernel: Kernel, wanted: Sequence[str]) -> dict[str, bytes]:
    """The modules and all that they need, in the order in which they can be loaded: name to content. What is built in is left out.

    Packages have no modules.dep (it is made when they are installed), but each module names what it needs.
    """
    files = {_module_name(path): path for path in (kernel.modules / "kernel").rglob("*.ko*")}
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in order or name not in files:
            return
        data = files[name].read_bytes()
        if files[name].suffix == ".xz":
            data = lzma.decompress(data)
        needed = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in needed.group(1).decode().split(",") if needed else ():
            add(other.replace("-", "_"))
        order[name] = data

    for name in wanted:
        add(name)
    return order


def _module_name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def archive(entries: Mapping[str, tuple[int, bytes]]) -> bytes:
    """A cpio archive (newc, Documentation/driver-api/early-userspace/buffer-format.rst): path to (mode with type, content). Parents come first."""
    out = bytearray()
    for number, (path, (mode, content)) in enumerate([*entries.items(), ("TRAILER!!!", (0, b""))], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + name
        out += bytes(-len(out) % 4)
        out += content
        out += bytes(-len(out) % 4)
    return bytes(out)


def initramfs(kernel: Kernel, wanted: Sequence[str]) -> bytes:
    """The archive the kernel starts from: a static busybox, the modules, and the script that mounts the root."""
    busybox = Path(find_tool("busybox")).read_bytes()
    modules = load_order(kernel, wanted)
    entries: dict[str, tuple[int, bytes]] = {}
    for path in ("bin", "dev", "disk", "layers", "modules", "proc", "root", "run", "sys"):
        entries[path] = (stat.S_IFDIR | 0o755, b"")
    entries |= {"bin/busybox": (stat.S_IFREG | 0o755, busybox), "init": (stat.S_IFREG | 0o755, _INIT.encode())}
    entries["serve"] = (stat.S_IFREG | 0o644, _SERVE.encode())
    entries |= {f"modules/{name}.ko": (stat.S_IFREG | 0o644, data) for name, data in modules.items()}
    entries["modules/order"] = (stat.S_IFREG | 0o644, "\n".join(f"{name}.ko" for name in modules).encode())
    return archive(entries)


def pad_image(path: Path) -> None:
    """Enlarge an image, by a hole at its end, to a size that virtio-pmem can have."""
    os.truncate(path, -(-path.stat().st_size // PMEM_UNIT) * PMEM_UNIT)


def busybox_root(root: Path) -> None:
    """Make a small root: a static busybox under its names, and the directories that the guest mounts on."""
    for name in ("bin", "etc", "root", *_MOUNT_TARGETS):
        (root / name).mkdir(parents=True)
    busybox = find_tool("busybox")
    shutil.copy(busybox, root / "bin/busybox")
    for applet in run([busybox, "--list"]).stdout.decode().split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")


def program_with_libraries(program: Path, files: Path, root: Path) -> None:
    """Copy a dynamic program below ``root``, with the libraries that it loads, from ``files`` (an unpacked package) or else from this host."""
    libraries = ":".join(str(path) for path in sorted({path.parent for path in files.rglob("*.so.*")}))
    listed = run(["ldd", program], env={**clean_environment(), "LD_LIBRARY_PATH": libraries}).stdout.decode()
    (root / "usr/sbin").mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / "usr/sbin" / program.name)
    for line in listed.splitlines():
        found = re.search(r"(?:(\S+) => )?(/\S+) \(0x", line)
        if found is None:
            continue
        name, place = found.groups()
        target = root / (f"lib/x86_64-linux-gnu/{name}" if name and not name.startswith("/") else place.lstrip("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place, target)


class Guest:
    """A running guest. ``run`` executes shell lines in it; ``power_off`` ends it."""

    def __init__(self, channel: socket.socket, console: Path) -> None:
        self._channel = channel
        self._console = console
        self._received = bytearray()
        self._ended = False

    @property
    def console(self) -> str:
        """What the kernel has said so far."""
        return self._console.read_text(errors="replace")

    def start(self, script: str) -> Self:
        """Begin to execute shell lines; ``finish`` waits for them."""
        self._channel.sendall(base64.b64encode(script.encode()) + b"\n")
        return self

    def finish(self, timeout: float = 60) -> str:
        """The output, both streams, of what was started. Raises GuestError for an exit code other than 0, and when it takes too long."""
        code, _, encoded = self._line(timeout).partition(" ")
        output = base64.b64decode(encoded).decode(errors="replace")
        if code != "0":
            raise GuestError(f"exit code {code} in the guest: {output.strip()}")
        return output

    def run(self, script: str, timeout: float = 60) -> str:
        """Execute shell lines in the guest and return their output. See ``finish``."""
        return self.start(script).finish(timeout)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the guest's root is mounted."""
        if self._line(timeout) != "ready":
            raise GuestError("the guest said something else than that it is ready")

    def power_off(self, timeout: float = 60) -> None:
        """Write everything back and switch off, without unmounting anything. Returns when QEMU has ended."""
        self.start("sync; poweroff -f")
        try:
            self._line(timeout)
        except GuestError:
            if self._ended:
                return
            raise
        raise GuestError("the guest does not switch off")

    def _line(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._channel.recv(1 << 16)
            except TimeoutError as error:
                raise GuestError(f"no answer from the guest in {timeout:g} s; console:\n{self.console[-3000:]}") from error
            except ConnectionResetError:
                data = b""
            if not data:
                self._ended = True
                raise GuestError(f"the guest has ended; console:\n{self.console[-3000:]}")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        return line.decode().strip()


@contextmanager
def boot(
    kernel: Kernel,
    images: Sequence[Path],
    disk: Path,
    *,
    network: bool = False,
    reconnect: int = 0,
    timeout: float = 100,
    lifetime: float = 240,
) -> Iterator[Guest]:
    """Start a guest and wait until it is ready.

    ``images``: padded EROFS images, the lowest first. ``disk``: the socket of an NBD server. ``network``: the host's loopback at 10.0.2.2, by user-mode
    networking, and nothing else. ``reconnect``: seconds for which requests wait for an NBD server that has gone. Whatever happens, the guest ends with the context, and after
    ``lifetime`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="dsec-guest-") as name:
        work = Path(name)
        (work / "initramfs").write_bytes(initramfs(kernel, (*_MODULES, *(_NETWORK_MODULES if network else ()))))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            argv = [
                *("timeout", "--kill-after=5", f"{lifetime:g}", find_tool("qemu-system-x86_64")),
                *_machine(kernel, work, theirs.fileno()),
                *_images(images),
                *_disk(disk, reconnect),
                *(_NETWORK if network else ("-nic", "none")),
            ]
            with spawn(argv, stdout=PIPE, stderr=PIPE, pass_fds=(theirs.fileno(),), new_session=True) as process:
                theirs.close()
                guest = Guest(ours, work / "console")
                try:
                    guest.wait_ready(timeout)
                    yield guest
                except GuestError as error:
                    process.terminate()
                    said = process.communicate(timeout=10)[1].decode(errors="replace").strip()
                    raise GuestError(error.message + (f"\nQEMU: {said}" if said else "")) from error
                finally:
                    if process.poll() is None:
                        process.terminate()


_NETWORK: Final = ("-netdev", "user,id=net,restrict=off", "-device", "virtio-net-pci,netdev=net")


def _machine(kernel: Kernel, work: Path, channel: int) -> list[str]:
    return [
        *("-machine", "q35", "-accel", "tcg", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-m", "256M,slots=8,maxmem=8G", "-kernel", str(kernel.image), "-initrd", str(work / "initramfs")),
        *("-append", "console=ttyS0 panic=-1 quiet loglevel=4 random.trust_cpu=on cryptomgr.notests tsc=reliable no_timer_check audit=0"),
        *("-chardev", f"file,id=console,path={work}/console", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=commands,fd={channel}", "-serial", "chardev:commands"),
    ]


def _images(images: Sequence[Path]) -> list[str]:
    """One virtio-pmem device each: the host's page cache is the guest's memory, shared by all guests."""
    argv: list[str] = []
    for number, image in enumerate(images):
        backend = f"memory-backend-file,id=image{number},share=on,readonly=on,mem-path={image},size={image.stat().st_size}"
        argv += ["-object", backend, "-device", f"virtio-pmem-pci,memdev=image{number}"]
    return argv


def _disk(path: Path, reconnect: int) -> list[str]:
    node = f"driver=nbd,node-name=disk,server.type=unix,server.path={path},reconnect-delay={reconnect},discard=unmap"
    return ["-blockdev", node, "-device", "virtio-blk-pci,drive=disk"]
