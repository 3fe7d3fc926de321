"""The sandbox's value, its OCI configuration, and the texts it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsec_layers.errors import DsecError, HostError, ToolError, UsageError
from dsec_layers.sandbox import Bind, Network, RunSpec
from dsec_layers.sandbox.account import parse_identity
from dsec_layers.sandbox.cgroups import CgroupHost, default_limits, read_cgroup_mounts
from dsec_layers.sandbox.config import CAPABILITIES, Identity, Mountpoint, oci_config
from dsec_layers.sandbox.hostnet import find_ca_bundle, lend, proxy_variables
from dsec_layers.sandbox.runtime import Runtime, choose_runtime, read_failure
from dsec_layers.sandbox.seccomp import seccomp_profile
from dsec_layers.sandbox.signals import signal_number
from dsec_layers.sandbox.variables import merge_variables

V1 = CgroupHost({"memory": Path("/sys/fs/cgroup/memory")}, None)


def config(spec: RunSpec, **more: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"rootfs": "/merged", "cgroup": "/dsec-layers-x/box", "machine": "x86_64", "identity": Identity()}
    return oci_config(spec, **(arguments | more))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"argv": ()}, "no command"),
        ({"argv": ("",)}, "no command"),
        ({"argv": ("a\0b",)}, "NUL"),
        ({"argv": ("x" * (3 << 20),)}, "longer than"),
        ({"env": {"A=B": "c"}}, "environment variable"),
        ({"workdir": "relative"}, "working directory"),
        ({"workdir": "/a/../b"}, "working directory"),
        ({"user": "a b"}, "not a user"),
        ({"user": "a:b:c"}, "not a user"),
        ({"hostname": "-x"}, "host name"),
        ({"memory": 4096}, "memory limit of 4096"),
        ({"cpus": 0.0}, "cpu limit"),
        ({"cpus": float("nan")}, "cpu limit"),
        ({"pids": 0}, "process limit"),
        ({"shm": 0}, "/dev/shm"),
    ],
)
def test_what_cannot_be_run_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunSpec(**({"argv": ("true",)} | fields))


@pytest.mark.parametrize("target", ["etc", "/", "/a/../b", "/proc/x", "/dev", "/sys/fs"])
def test_binds_go_to_places_of_the_environment_only(target: str) -> None:
    with pytest.raises(UsageError):
        Bind(Path("/tmp"), target)


def test_the_configuration_grants_little() -> None:
    value = config(RunSpec(("true",), user="x"), identity=Identity(1000, 1000, (10,), "/home/x"))
    process = value["process"]
    assert process["noNewPrivileges"] is True
    assert process["capabilities"]["effective"] == process["capabilities"]["ambient"] == process["capabilities"]["inheritable"] == []
    assert process["user"] == {"uid": 1000, "gid": 1000, "additionalGids": [10], "umask": 0o022}
    assert process["env"] == [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME=/home/x",
        "HOSTNAME=sandbox",
        "LANG=C.UTF-8",
    ]
    assert {item["type"] for item in value["linux"]["namespaces"]} == {"pid", "mount", "ipc", "uts", "cgroup", "network"}
    assert value["linux"]["resources"] == {"devices": value["linux"]["resources"]["devices"]}
    assert value["linux"]["resources"]["devices"][0] == {"allow": False, "access": "rwm"}
    assert "CAP_SYS_ADMIN" not in CAPABILITIES
    assert "CAP_NET_RAW" not in CAPABILITIES
    json.dumps(value)


def test_limits_and_network_in_the_configuration() -> None:
    value = config(RunSpec(("true",), memory=64 << 20, cpus=1.5, pids=7, network=Network.HOST, shm=1 << 20), console=(30, 90))
    assert value["linux"]["resources"] | {"devices": []} == {
        "devices": [],
        "memory": {"limit": 64 << 20, "swap": 64 << 20},
        "cpu": {"quota": 150_000, "period": 100_000},
        "pids": {"limit": 7},
    }
    assert {"type": "network"} not in value["linux"]["namespaces"]
    assert value["process"]["consoleSize"] == {"height": 30, "width": 90}
    assert "size=1048576" in next(item for item in value["mounts"] if item["destination"] == "/dev/shm")["options"]
    assert config(RunSpec(("true",), memory=64 << 20), swap=False)["linux"]["resources"]["memory"] == {"limit": 64 << 20}


def test_the_specs_variables_win_over_the_hosts() -> None:
    value = config(RunSpec(("true",), env={"http_proxy": "mine"}), host_env={"http_proxy": "host", "no_proxy": "x"})
    assert "http_proxy=mine" in value["process"]["env"]
    assert "no_proxy=x" in value["process"]["env"]


def test_binds_in_the_configuration() -> None:
    value = config(RunSpec(("true",)), binds=[Mountpoint("/a", "/b"), Mountpoint("/c", "/d", read_only=False)])
    assert [(item["source"], item["destination"], item["options"][-1]) for item in value["mounts"][-2:]] == [
        ("/a", "/b", "ro"),
        ("/c", "/d", "rw"),
    ]
    assert all("nosuid" in item["options"] and "nodev" in item["options"] for item in value["mounts"][-2:])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_the_filter_names_what_reaches_past_namespaces(machine: str) -> None:
    profile = seccomp_profile(machine)
    plain = next(rule["names"] for rule in profile["syscalls"] if len(rule["names"]) > 1)
    wanted = {
        "mount",
        "move_mount",
        "unshare",
        "setns",
        "keyctl",
        "bpf",
        "perf_event_open",
        "fanotify_init",
        "open_by_handle_at",
        "userfaultfd",
        "io_uring_setup",
    }
    assert wanted <= set(plain)
    assert plain == sorted(set(plain))
    flags = [rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["clone"]]
    assert sorted(flags) == [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
    assert ("architectures" in profile) == (machine != "riscv64")


PASSWD = "root:x:0:0:root:/root:/bin/sh\n# comment:x:1:1:::\nshort:x:5\nann:x:1000:1000::/home/ann:/bin/sh\nbad:x:12345678901:0::/:\n"
GROUP = "root:x:0:\nwheel:x:10:ann,root\naudio:x:29:ann\nodd:x:abc:ann\n"


@pytest.mark.parametrize(
    ("user", "identity"),
    [
        ("", Identity(0, 0, (10,), "/root")),
        ("ann", Identity(1000, 1000, (10, 29), "/home/ann")),
        ("1000", Identity(1000, 1000, (10, 29), "/home/ann")),
        ("ann:audio", Identity(1000, 29, (), "/home/ann")),
        ("77", Identity(77, 0, (), "/")),
        ("77:88", Identity(77, 88, (), "/")),
    ],
)
def test_users(user: str, identity: Identity) -> None:
    assert parse_identity(user, PASSWD, GROUP) == identity


@pytest.mark.parametrize("user", ["nobody", "short", "ann:none", "bad", "99999999999", "4294967295"])
def test_users_that_do_not_exist(user: str) -> None:
    with pytest.raises(UsageError):
        parse_identity(user, PASSWD, GROUP)


def test_root_without_a_passwd_file() -> None:
    assert parse_identity("", "", "") == Identity(0, 0, (), "/root")


def test_control_group_layouts() -> None:
    v1 = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,nosuid,memory 0 0\n"
    v1 += "cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0\n"
    v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
    mixed = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    assert read_cgroup_mounts("").roots() == []
    assert read_cgroup_mounts(v2) == CgroupHost({}, Path("/sys/fs/cgroup"))
    assert read_cgroup_mounts(v2).hybrid is None
    host = read_cgroup_mounts(v1 + mixed)
    assert host.hybrid == Path("/sys/fs/cgroup/unified")
    assert host.roots() == [Path(f"/sys/fs/cgroup/{name}") for name in ("cpu,cpuacct", "memory", "systemd", "unified")]
    assert host.v1["cpuacct"] == host.v1["cpu"]


def test_default_limits_are_those_the_host_can_hold(tmp_path: Path) -> None:
    assert default_limits(CgroupHost({"memory": tmp_path, "pids": tmp_path}, None)) == {"memory": 2 << 30, "pids": 1024}
    assert default_limits(V1) == {"memory": 2 << 30}
    assert default_limits(CgroupHost({}, None)) == default_limits(CgroupHost({}, tmp_path)) == {}
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    assert default_limits(CgroupHost({}, tmp_path)) == {"pids": 1024}


def test_swap_is_limited_where_it_can_be(tmp_path: Path) -> None:
    assert not CgroupHost({"memory": tmp_path}, None).limits_swap()
    (tmp_path / "memory.memsw.limit_in_bytes").touch()
    assert CgroupHost({"memory": tmp_path}, None).limits_swap()
    two = tmp_path / "two"
    (two / "system.slice").mkdir(parents=True)
    assert not CgroupHost({}, two).limits_swap()
    (two / "system.slice/memory.swap.max").touch()
    assert CgroupHost({}, two).limits_swap()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ('runc run failed: unable to start container process: exec: "nope": executable file not found in $PATH', 127),
        ('runc run failed: unable to start container process: exec: "/nope": stat /nope: no such file or directory', 127),
        ('runc run failed: unable to start container process: exec: "/etc": permission denied', 126),
        ("executable file `/nope` not found in $PATH: No such file or directory", 127),
        ("open executable: Permission denied", 126),
        ("the path `/etc` is not a regular file: Operation not permitted", 126),
        ("the path `/etc/passwd` exists but it is not executable: Operation not permitted", 126),
        ("exec container process `/x`: Exec format error", 126),
        ("cgroups in hybrid mode not supported, drop all controllers from cgroupv2", 125),
    ],
)
def test_failures_of_the_runtimes_are_told_apart(tmp_path: Path, message: str, code: int) -> None:
    log = tmp_path / "log"
    log.write_text(
        "noise\n[]\n" + json.dumps({"level": "warning", "msg": "x"}) + "\n" + json.dumps({"level": "error", "msg": message}) + "\n"
    )
    failure = read_failure(log, 1)
    assert failure is not None
    assert (failure.code, failure.message) == (code, message)
    assert read_failure(log, 0) is None
    assert read_failure(log, 7) is None
    assert read_failure(tmp_path / "none", 1) is None


def test_the_choice_of_a_runtime_tells_every_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("crun", "runc"):
        (tmp_path / name).touch()
    monkeypatch.setattr("dsec_layers.proc.find_tool", lambda name: str(tmp_path / name))
    tried: list[str] = []

    def works(runtime: Runtime) -> None:
        tried.append(runtime.name)
        raise ToolError("does not like this host")

    with pytest.raises(HostError, match=r"crun: does not like this host; runc: does not like this host"):
        choose_runtime(tmp_path, V1, works)
    assert tried == ["crun", "runc"]
    chosen = choose_runtime(tmp_path, V1, lambda runtime: works(runtime) if runtime.name == "crun" else None)
    assert chosen.name == "runc"
    assert choose_runtime(tmp_path, V1, works) == chosen
    (tmp_path / "runc").write_text("another version")
    with pytest.raises(HostError):
        choose_runtime(tmp_path, V1, works)


def test_no_runtime_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise ToolError(f"{name} is not installed")

    monkeypatch.setattr("dsec_layers.proc.find_tool", missing)
    with pytest.raises(DsecError, match="no OCI runtime is installed"):
        choose_runtime(tmp_path, V1, lambda runtime: None)


def test_proxies_and_bundles_are_found(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("x")
    assert find_ca_bundle({"SSL_CERT_FILE": str(tmp_path / "none"), "CURL_CA_BUNDLE": str(bundle)}) == bundle
    assert proxy_variables({"HTTP_PROXY": "a", "https_proxy": "", "No_Proxy": "c", "PROXY": "d"}) == {"HTTP_PROXY": "a", "No_Proxy": "c"}


def test_nothing_is_lent_without_the_hosts_network(tmp_path: Path) -> None:
    loan = lend(tmp_path, Network.NONE, "box", {"http_proxy": "x", "SSL_CERT_FILE": "/etc/passwd"})
    assert loan.env == {}
    assert sorted(item.target for item in loan.binds) == ["/etc/hostname", "/etc/hosts"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostname", "hosts"]


@pytest.mark.parametrize(("text", "number"), [("SIGINT", 2), ("int", 2), ("9", 9), ("sigquit", 3), ("SIGRTMIN+3", 37), ("RTMAX", 64)])
def test_signals_by_name(text: str, number: int) -> None:
    assert signal_number(text) == number


@pytest.mark.parametrize("text", ["", "SIG", "SIGNO", "0", "65", "99999999999999", "-1", "INT+", "SIGINT+x", "RTMIN+99", "2 "])
def test_signals_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="no signal is called"):
        signal_number(text)


def test_variables_of_layers_are_joined() -> None:
    layers: list[dict[str, str]] = [{"A": "1", "B": "base"}, {"B": "top", "PATH": "/opt/one/bin"}, {"PATH": "/opt/two/bin:/opt/one/bin"}]
    assert merge_variables(layers) == {
        "A": "1",
        "B": "top",
        "PATH": "/opt/two/bin:/opt/one/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    assert merge_variables([]) == {}
