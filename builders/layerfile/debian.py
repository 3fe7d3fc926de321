"""A Debian root by mmdebstrap: with an epoch, the same bytes for the same package versions.

mmdebstrap itself clamps all times to SOURCE_DATE_EPOCH and removes logs and caches. What it leaves of the host (resolver, host name) and of the moment (backups and
locks of the package tools) is removed by a hook. Works with mmdebstrap 1.3 (Debian 12) and later.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from dsec_layers import proc
from dsec_layers.builders.layerfile.recipe import DebianInput
from dsec_layers.errors import ToolError, UsageError
from dsec_layers.progress import SILENT, Progress
from dsec_layers.sandbox.hostnet import find_ca_bundle, proxy_variables

__all__ = ["bootstrap", "command", "describe", "host_mirrors", "parse_mirrors", "source_lines"]

_ROLLING: Final = frozenset(("sid", "unstable", "experimental"))
_TAIL: Final = 3000

_CLEAN: Final = (
    # Of the host.
    *("etc/resolv.conf", "etc/hostname", "etc/machine-id", "var/lib/dbus/machine-id"),
    # Of the moment: backups, locks and caches that the next change writes again.
    *(f"etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")),
    *("etc/.pwd.lock", "var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock", "var/cache/ldconfig/aux-cache"),
    *("var/lib/dpkg/diversions-old", "var/lib/dpkg/status-old", "var/lib/dpkg/statoverride-old", "var/lib/dpkg/available"),
    *("var/cache/debconf/config.dat-old", "var/cache/debconf/passwords.dat-old", "var/cache/debconf/templates.dat-old"),
    *("var/cache/apt/pkgcache.bin", "var/cache/apt/srcpkgcache.bin", "var/cache/apt/archives/lock", "var/lib/apt/lists/lock"),
    *(
        f"var/log/{name}"
        for name in (
            "alternatives.log",
            "bootstrap.log",
            "dpkg.log",
            "apt/history.log",
            "apt/term.log",
            "apt/eipp.log.xz",
            "fontconfig.log",
        )
    ),
)


def bootstrap(
    debian: DebianInput, target: Path, *, epoch: int | None, environ: Mapping[str, str] | None = None, progress: Progress = SILENT
) -> None:
    """Make a Debian root and write it to the new file ``target`` as a tar.

    ``epoch``: no file is younger (seconds; None: times are the clock's, and no two roots the same). ``environ``: the host's environment, for proxy and CA settings (None: this process's).
    Raises ToolError with the last lines of what mmdebstrap said.
    """
    environ = dict(os.environ) if environ is None else environ
    mirrors = debian.mirrors or host_mirrors()
    argv = command(proc.find_tool("mmdebstrap"), debian, mirrors, target, root=os.geteuid() == 0, bundle=find_ca_bundle(environ))
    env = proc.clean_environment({**proxy_variables(environ), **({} if epoch is None else {"SOURCE_DATE_EPOCH": str(epoch)})})
    tail: list[bytes] = []
    progress.info(
        f"mmdebstrap: Debian {debian.suite}, {debian.variant}" + (f", {len(debian.packages)} packages" if debian.packages else "")
    )
    with ExitStack() as stack:
        if os.geteuid() == 0:
            # The root is made where there is room for it. (Without root its owner is another user, who must be able to reach it.)
            env["TMPDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix=".debian-", dir=target.parent))
        process = stack.enter_context(proc.spawn(argv, stderr=proc.PIPE, env=env))
        assert process.stderr is not None
        for line in process.stderr:
            tail = [*tail[-40:], line]
            progress.debug(line.decode(errors="replace").rstrip())
        code = process.wait()
    if code != 0:
        text = b"".join(tail)[-_TAIL:].decode(errors="replace").strip()
        raise ToolError(f"mmdebstrap failed with exit code {code}: {text}", hint=_hint(text))


def command(
    program: str, debian: DebianInput, mirrors: Iterable[str], target: Path, *, root: bool, bundle: Path | None = None
) -> list[str]:
    """The argument vector of mmdebstrap. ``bundle``: the host's CA bundle, which apt would not find by itself."""
    argv = [program, f"--mode={'root' if root else 'unshare'}", f"--variant={debian.variant}", "--format=tar"]
    argv += [f"--components={','.join(debian.components)}"] if debian.components else []
    argv += [f"--include={','.join(debian.packages)}"] if debian.packages else []
    argv += [f"--architectures={debian.architecture}"] if debian.architecture else []
    argv += [f"--keyring={debian.keyring}"] if debian.keyring else []
    argv += [f'--aptopt=Acquire::https::CaInfo "{bundle}"'] if bundle is not None else []
    # Without recommendations, as every other tool that makes small images.
    argv += ['--aptopt=Apt::Install-Recommends "false"']
    argv += ["--customize-hook=" + _hook(bundle is not None)]
    return [*argv, debian.suite, str(target), *source_lines(debian, mirrors)]


def source_lines(debian: DebianInput, mirrors: Iterable[str]) -> list[str]:
    """The sources.list lines: as given, or for a plain URL the suite, its updates and its security updates."""
    components = " ".join(debian.components)
    lines = []
    for mirror in mirrors:
        if mirror.startswith(("deb ", "deb-src ")):
            lines.append(mirror)
            continue
        if not re.match(r"(https?|file|copy|mirror|ftp)[:+]", mirror) or any(letter.isspace() for letter in mirror):
            raise UsageError(f"not a mirror: {mirror!r}", hint="a URL, or a whole line that begins with 'deb '")
        url = mirror.rstrip("/")
        if url.endswith("-security"):
            lines += [] if debian.suite in _ROLLING else [f"deb {url} {debian.suite}-security {components}"]
        else:
            lines.append(f"deb {url} {debian.suite} {components}")
            lines += [] if debian.suite in _ROLLING else [f"deb {url} {debian.suite}-updates {components}"]
    return lines


def host_mirrors(directory: Path = Path("/etc/apt")) -> list[str]:
    """The Debian mirrors this host's apt uses: the archive and the security archive. None if it names no archive: mmdebstrap then knows Debian's own."""
    texts = []
    for path in [
        directory / "sources.list",
        *sorted((directory / "sources.list.d").glob("*.list")),
        *sorted((directory / "sources.list.d").glob("*.sources")),
    ]:
        try:
            texts.append(path.read_text(errors="replace"))
        except OSError:
            continue
    found = [url for text in texts for url in parse_mirrors(text)]
    archive = [url for url in found if url.rstrip("/").endswith("/debian")]
    security = [url for url in found if url.rstrip("/").endswith("/debian-security")]
    return archive[:1] + security[:1] if archive else []


def parse_mirrors(text: str) -> Iterator[str]:
    """The URLs of enabled binary sources in a sources.list or a deb822 .sources file (sources.list(5))."""
    for line in text.splitlines():
        fields = re.sub(r"\[[^\]]*\]", " ", line.partition("#")[0]).split()
        if len(fields) >= 3 and fields[0] == "deb":
            yield fields[1]
    for stanza in re.split(r"\n\s*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields_of = {name.strip().lower(): value.split() for name, _, value in (line.partition(":") for line in stanza.splitlines())}
        if "deb" in fields_of.get("types", []) and fields_of.get("enabled") != ["no"]:
            yield from fields_of.get("uris", [])


def _hook(bundle: bool) -> str:
    """Runs outside the root, whose path is its first argument. The names are ours: nothing in them needs quoting."""
    script = 'cd "$1" && rm -f -- ' + " ".join(_CLEAN) + " && : > etc/machine-id"
    # The option that named the host's bundle: mmdebstrap writes all of them into the root.
    return script + (" && sed -i /CaInfo/d etc/apt/apt.conf.d/99mmdebstrap" if bundle else "")


def _hint(text: str) -> str | None:
    if "keyring" in text.lower() or "NO_PUBKEY" in text:
        return "apt-get install debian-archive-keyring, or name a keyring in the source table"
    if "unshare" in text or "newuidmap" in text:
        return "run it as root, or apt-get install uidmap and allow user namespaces"
    return None


def describe(debian: DebianInput) -> dict[str, Any]:
    """What identifies a root as far as it can be known before it is made; part of its cache key."""
    return {
        "suite": debian.suite,
        "packages": sorted(debian.packages),
        "variant": debian.variant,
        "components": list(debian.components),
        "mirrors": list(debian.mirrors or host_mirrors()),
        "architecture": debian.architecture or os.uname().machine,
    }
