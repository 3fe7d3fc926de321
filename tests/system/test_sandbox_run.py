"""Commands in real containers: exit codes, limits, streams, namespaces; by each runtime that works here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_layers.errors import HostError, UsageError
from dsec_layers.sandbox import Bind, Captured, Network, RunSpec, Sandbox, capture, run
from dsec_layers.sandbox.output import Collector
from dsec_layers.sandbox.runtime import Runtime

pytestmark = pytest.mark.root

Shell = Callable[..., Captured]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("/bin/true",), 0),
        (("/bin/sh", "-c", "exit 7"), 7),
        (("/bin/sh", "-c", "exit 125"), 125),
        (("/bin/sh", "-c", "sh -c 'kill -SEGV $$'; exit $?"), 139),
        (("no-such-program",), 127),
        (("/no/such/program",), 127),
        (("/etc",), 126),
        (("/etc/passwd",), 126),
    ],
)
def test_exit_codes_are_passed_through(busybox_root: Path, state: Path, runtime: Runtime, argv: tuple[str, ...], code: int) -> None:
    with (
        open(os.devnull, "wb") as null,
        Sandbox(RunSpec(argv), [busybox_root], state=state, stdout=null.fileno(), stderr=null.fileno(), runtime=runtime) as box,
    ):
        outcome = box.wait(60)
    assert outcome.code == code
    assert bool(outcome.reason) == (code in (126, 127))


def test_the_command_has_namespaces_of_its_own(shell: Shell) -> None:
    done = shell("for n in pid mnt ipc uts net cgroup; do readlink /proc/self/ns/$n; done; echo $$; hostname; ls /sys/class/net")
    lines = done.stdout.decode().splitlines()
    for name, link in zip(("pid", "mnt", "ipc", "uts", "net", "cgroup"), lines, strict=False):
        assert link != os.readlink(f"/proc/self/ns/{name}"), name  # noqa: PTH115
    assert lines[6:] == ["1", "sandbox", "lo"]


def test_the_command_is_confined(shell: Shell) -> None:
    done = shell(
        "grep -E '^(NoNewPrivs|Seccomp|CapEff):' /proc/self/status; mount -t tmpfs x /tmp; unshare -m true; echo 1 > /proc/sys/kernel/panic; echo c > /proc/sysrq-trigger;"
        "mknod /tmp/disk b 8 0 && head -c 1 /tmp/disk; wc -c < /proc/keys; touch /sys/x"
    )
    status = dict(line.split(":\t") for line in done.stdout.decode().splitlines() if ":\t" in line)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    held = int(status["CapEff"], 16)
    assert [number for number in range(41) if held >> number & 1] == [0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31]  # linux/capability.h
    for refused in (b"mount: permission denied", b"unshare", b"panic", b"sysrq-trigger", b"/tmp/disk", b"/sys/x"):
        assert refused in done.stderr, refused
    assert done.stdout.rstrip().endswith(b"0")


def test_writes_stay_in_the_sandbox(shell: Shell, busybox_root: Path) -> None:
    before = sorted(str(path) for path in busybox_root.rglob("*"))
    assert shell("echo x > /etc/new; rm /etc/group; mkdir -p /a/b; ls /").outcome.code == 0
    assert sorted(str(path) for path in busybox_root.rglob("*")) == before


def test_standard_input_reaches_an_interactive_command_only(shell: Shell) -> None:
    read, write = os.pipe()
    os.write(write, b"hello\n")
    os.close(write)
    with open(read, "rb") as source:
        assert shell("cat", input=source.fileno()).stdout == b""
        assert shell("cat", input=source.fileno(), interactive=True).stdout == b"hello\n"


def test_large_streams_arrive_whole(busybox_root: Path, state: Path, tmp_path: Path, runtime: Runtime) -> None:
    """32 MiB in from a file and out to a file, as many to standard error: none of it through the caller's own descriptors."""
    blob = os.urandom(1 << 20) * 32
    (tmp_path / "in").write_bytes(blob)
    spec = RunSpec(("/bin/sh", "-c", "cat; dd if=/dev/zero bs=1M count=32 >&2 2>/dev/null"), interactive=True)
    with (
        open(tmp_path / "in", "rb") as source,
        open(tmp_path / "out", "wb") as target,
        open(tmp_path / "err", "wb") as errors,
        Sandbox(
            spec, [busybox_root], state=state, stdin=source.fileno(), stdout=target.fileno(), stderr=errors.fileno(), runtime=runtime
        ) as box,
    ):
        assert box.wait(60).code == 0
    assert (tmp_path / "out").read_bytes() == blob
    assert (tmp_path / "err").stat().st_size == 32 << 20


def test_the_callers_files_are_out_of_reach(busybox_root: Path, state: Path, tmp_path: Path, runtime: Runtime) -> None:
    """A process may open its standard streams again through /proc with other rights; it must find pipes there, not the caller's files."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("input\n")
    target.write_text("earlier\n")
    os.chown(target, 1234, 1234)
    spec = RunSpec(
        ("/bin/sh", "-c", "echo evil > /proc/self/fd/0; readlink /proc/self/fd/1; cat < /proc/self/fd/0 >/dev/null"),
        interactive=True,
        user="ann",
    )
    with (
        open(source, "rb") as stdin,
        open(target, "ab") as stdout,
        Sandbox(
            spec, [busybox_root], state=state, stdin=stdin.fileno(), stdout=stdout.fileno(), stderr=stdout.fileno(), runtime=runtime
        ) as box,
    ):
        box.wait(60)
    assert source.read_text() == "input\n"
    assert target.read_text().startswith("earlier\n")
    assert "pipe:" in target.read_text()
    assert target.stat().st_uid == 1234


def test_out_of_memory_is_137_and_said(shell: Shell, busybox_root: Path, state: Path) -> None:
    done = shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=60", memory=24 << 20)
    assert (done.outcome.code, done.outcome.oom) == (137, True)
    assert shell("true", memory=24 << 20).outcome.oom is False


def test_limits_are_set(shell: Shell) -> None:
    done = shell("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; wait", pids=8)
    assert b"fork" in done.stderr
    script = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max"
    assert shell(script, cpus=0.5, memory=64 << 20).stdout.split() in ([b"50000", b"67108864"], [b"50000", b"100000", b"67108864"])


@pytest.mark.parametrize(
    ("user", "line"),
    [
        ("", b"0 0 0 /root"),
        ("ann", b"1000 1000 1000 10 /home/ann"),
        ("1000", b"1000 1000 1000 10 /home/ann"),
        ("ann:wheel", b"1000 10 10 /home/ann"),
        ("4321:8765", b"4321 8765 8765 /"),
    ],
)
def test_users_are_looked_up_inside(shell: Shell, user: str, line: bytes) -> None:
    assert shell('echo $(id -u) $(id -g) $(id -G) "$HOME"', user=user).stdout.strip() == line


def test_an_unknown_user_is_refused(shell: Shell) -> None:
    with pytest.raises(UsageError, match="no user 'nobody-here'"):
        shell("true", user="nobody-here")


def test_environment_and_working_directory(shell: Shell) -> None:
    done = shell("pwd; env | sort", env={"A": "b c", "PATH": "/bin"}, workdir="/var/tmp", hostname="box")
    assert done.stdout.decode().splitlines() == [
        "/var/tmp",
        "A=b c",
        "HOME=/root",
        "HOSTNAME=box",
        "LANG=C.UTF-8",
        "PATH=/bin",
        "PWD=/var/tmp",
        "SHLVL=1",
    ]


def test_binds_are_read_only_unless_asked(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    binds = (Bind(tmp_path / "file", "/etc/from-host"), Bind(tree, "/new/place"), Bind(tree, "/new/open", read_only=False))
    done = shell("cat /etc/from-host; echo x > /etc/from-host; touch /new/place/x; touch /new/open/y", binds=binds)
    assert done.stdout == b"host\n"
    assert done.stderr.count(b"Read-only file system") == 2
    assert [path.name for path in tree.iterdir()] == ["y"]


def test_network_none_has_nothing_of_the_host(shell: Shell) -> None:
    done = shell("cat /etc/hosts; ls /run /etc; ip route; ping -c 1 -W 1 127.0.0.1 >/dev/null 2>&1; env")
    text = done.stdout.decode()
    assert "resolv.conf" not in text
    assert "dsec-layers" not in text
    assert "CA_BUNDLE" not in text
    assert text.startswith("127.0.0.1\tlocalhost\n")


def test_network_host_lends_resolver_bundle_and_proxies(busybox_root: Path, state: Path, tmp_path: Path, runtime: Runtime) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("CERTIFICATES\n")
    spec = RunSpec(
        (
            "/bin/sh",
            "-c",
            "readlink /proc/self/ns/net; cat $SSL_CERT_FILE; cat $APT_CONFIG; echo $http_proxy $HTTPS_PROXY; cat /etc/resolv.conf; echo gone > /etc/resolv.conf",
        ),
        network=Network.HOST,
    )
    environ = {"SSL_CERT_FILE": str(bundle), "http_proxy": "http://127.0.0.1:3128", "HTTPS_PROXY": "http://127.0.0.1:3129", "SECRET": "x"}
    resolver = Path("/etc/resolv.conf").read_text()
    out = Collector()
    upper = tmp_path / "upper"
    upper.mkdir()
    with Sandbox(spec, [busybox_root], state=state, upper=upper, environ=environ, stdout=out.fd, runtime=runtime) as box:
        box.wait(60)
    lines = out.finish().decode()
    assert lines == (
        f"{os.readlink('/proc/self/ns/net')}\nCERTIFICATES\n"  # noqa: PTH115
        'Acquire::http::Proxy "http://127.0.0.1:3128";\nAcquire::https::Proxy "http://127.0.0.1:3129";\n'
        'Acquire::https::CaInfo "/run/dsec-layers/ca-bundle.crt";\nhttp://127.0.0.1:3128 http://127.0.0.1:3129\n' + resolver
    )
    assert Path("/etc/resolv.conf").read_text() == resolver
    assert list(upper.iterdir()) == []


def test_capture_keeps_no_more_than_agreed(busybox_root: Path, state: Path) -> None:
    done = capture(RunSpec(("/bin/sh", "-c", "yes | head -c 5000000; echo end >&2")), [busybox_root], state=state, limit=1000)
    assert (done.outcome.code, done.stdout, done.stderr, done.truncated) == (0, b"y\n" * 500, b"end\n", True)


def test_capture_ends_a_sandbox_that_takes_too_long(busybox_root: Path, state: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        capture(RunSpec(("/bin/sleep", "100")), [busybox_root], state=state, timeout=0.5)
    assert time.monotonic() - began < 20


def test_many_at_once_from_threads(busybox_root: Path, state: Path) -> None:
    codes: list[int] = []

    def one(number: int) -> None:
        codes.append(run(RunSpec(("/bin/sh", "-c", f"exit {number}")), [busybox_root], state=state))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == list(range(8))


def test_layers_are_ordered_topmost_first(busybox_root: Path, state: Path, tmp_path: Path) -> None:
    for name in ("upper", "middle"):
        (tmp_path / name / "etc").mkdir(parents=True)
        (tmp_path / name / "etc/who").write_text(name + "\n")
    lower = [tmp_path / "upper", tmp_path / "middle", busybox_root]
    assert capture(RunSpec(("/bin/cat", "/etc/who")), lower, state=state).stdout == b"upper\n"


def test_the_runtime_is_chosen_once_a_boot(busybox_root: Path, state: Path) -> None:
    assert run(RunSpec(("/bin/true",)), [busybox_root], state=state) == 0
    chosen = (state / "runtime.json").read_bytes()
    assert run(RunSpec(("/bin/true",)), [busybox_root], state=state) == 0
    assert (state / "runtime.json").read_bytes() == chosen
    (state / "runtime.json").write_bytes(chosen.replace(b'"boot": "', b'"boot": "another-'))
    assert run(RunSpec(("/bin/true",)), [busybox_root], state=state) == 0
    assert (state / "runtime.json").read_bytes() == chosen


def test_a_layer_that_is_not_there_is_an_error_of_ours(busybox_root: Path, state: Path, tmp_path: Path) -> None:
    with pytest.raises((HostError, OSError)):
        run(RunSpec(("/bin/true",)), [tmp_path / "nowhere"], state=state)


SYSCALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
calls = {"bpf": 321, "keyctl": 250, "userfaultfd": 323, "perf_event_open": 298, "open_by_handle_at": 304, "io_uring_setup": 425, "fanotify_init": 300,
         "setns": 308, "kexec_load": 246, "init_module": 175, "move_mount": 429, "reboot": 169, "quotactl": 179, "clone3": 435}
for name, number in calls.items():
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0)
    print(name, errno.errorcode.get(ctypes.get_errno(), "done"))
libc.syscall(ctypes.c_long(56), ctypes.c_long(0x10000000 | 17), 0, 0, 0, 0)
print("clone", errno.errorcode.get(ctypes.get_errno()))
import socket
try:
    socket.socket(socket.AF_ALG)
except OSError as error:
    print("AF_ALG", errno.errorcode[error.errno])
import threading
thread = threading.Thread(target=print, args=("thread runs",))
thread.start()
thread.join()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the test knows the call numbers of x86-64 only")
def test_dangerous_system_calls_are_refused(state: Path, tmp_path: Path, runtime: Runtime) -> None:
    """With the host's own Python, from a root made of the host's /usr. Threads still work: the C library falls back from clone3 to clone."""
    root = tmp_path / "root"
    root.mkdir()
    binds = []
    for name in ("bin", "lib", "lib64", "usr"):
        path = Path("/") / name
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            binds.append(Bind(path, str(path)))
    out, err = Collector(), Collector()
    spec = RunSpec(("/usr/bin/python3", "-I", "-c", SYSCALLS), binds=tuple(binds))
    with Sandbox(spec, [root], state=state, stdout=out.fd, stderr=err.fd, runtime=runtime) as box:
        outcome = box.wait(60)
    lines = out.finish().decode().splitlines()
    assert (outcome.code, err.finish()) == (0, b"")
    answers = dict(line.rsplit(" ", 1) for line in lines)
    assert answers.pop("clone3") == "ENOSYS"
    assert answers.pop("thread") == "runs"
    assert set(answers.values()) == {"EPERM"}, answers
    assert len(answers) == 15
