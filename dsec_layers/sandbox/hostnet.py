"""What a sandbox on the host's network is lent: the host's resolver, its CA bundle, its proxy variables.

All of it is bound or passed in for the time of the run: copies in the sandbox's own directory, so that writing to them changes neither the host nor the layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_layers.sandbox.config import Mountpoint
from dsec_layers.sandbox.mountpoints import Wanted
from dsec_layers.sandbox.spec import Network

__all__ = ["INSIDE", "Loan", "find_ca_bundle", "host_environment", "lend", "proxy_variables"]

INSIDE: Final = "/run/dsec-layers"
"""Where the bundle and apt's settings are inside. Not over /etc/ssl/certs: installing ca-certificates there must keep working."""

_BUNDLE_VARIABLES: Final = (
    *("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE"),
    *("HTTPLIB2_CA_CERTS", "CARGO_HTTP_CAINFO", "NIX_SSL_CERT_FILE", "UV_CA_BUNDLE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
_BUNDLES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem")
_PROXIES: Final = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
_MAX_FILE: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Loan:
    """Mounts and variables of one run."""

    wanted: tuple[Wanted, ...]
    binds: tuple[Mountpoint, ...]
    env: Mapping[str, str]


def host_environment() -> dict[str, str]:
    """The environment of this process, from which proxy and CA settings (and TERM) are taken, and nothing else."""
    return dict(os.environ)


def find_ca_bundle(environ: Mapping[str, str]) -> Path | None:
    """The host's CA bundle: what the variables of OpenSSL, curl or requests name, else where distributions keep it."""
    named = (environ[name] for name in _BUNDLE_VARIABLES[:3] if environ.get(name))
    return next((Path(name) for name in (*named, *_BUNDLES) if Path(name).is_file()), None)


def proxy_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The proxy variables that are set, as they are spelled."""
    return {name: value for name, value in environ.items() if name.lower() in _PROXIES and value}


def lend(bundle: Path, network: Network, hostname: str, environ: Mapping[str, str]) -> Loan:
    """Write the files of a run below the existing directory ``bundle`` and say where they go. ``environ``: the host's environment."""
    files = {"/etc/hostname": f"{hostname}\n", "/etc/hosts": _hosts(hostname, network)}
    env: dict[str, str] = {}
    wanted, binds = [], []
    if network is Network.HOST:
        files["/etc/resolv.conf"] = _read(Path("/etc/resolv.conf"))
        env = _lend_trust(bundle / "host", environ)
        wanted.append(Wanted(INSIDE, directory=True))
        binds.append(Mountpoint(str(bundle / "host"), INSIDE))
    for target, content in files.items():
        source = bundle / Path(target).name
        source.write_text(content)
        source.chmod(0o644)
        wanted.append(Wanted(target, directory=False))
        # Writable: programs that insist on writing there find that they can, and the copy goes with the sandbox.
        binds.append(Mountpoint(str(source), target, read_only=False))
    return Loan(tuple(wanted), tuple(binds), env)


def _lend_trust(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    directory.mkdir(mode=0o755)
    env = proxy_variables(environ)
    apt = [
        f'Acquire::{name[:-6].lower()}::Proxy "{value}";'
        for name, value in env.items()
        if name.lower() in ("http_proxy", "https_proxy")
        if '"' not in value
    ]
    source = find_ca_bundle(environ)
    if source is not None:
        (directory / "ca-bundle.crt").write_text(_read(source))
        env |= dict.fromkeys(_BUNDLE_VARIABLES, f"{INSIDE}/ca-bundle.crt")
        apt.append(f'Acquire::https::CaInfo "{INSIDE}/ca-bundle.crt";')
    # apt's TLS library reads none of the variables.
    (directory / "apt.conf").write_text("\n".join(apt) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)
    return env | {"APT_CONFIG": f"{INSIDE}/apt.conf"}


def _hosts(hostname: str, network: Network) -> str:
    lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback", f"127.0.1.1\t{hostname}"]
    if network is Network.HOST:
        known = {name for line in lines for name in line.split()[1:]}
        for line in _read(Path("/etc/hosts")).splitlines():
            fields = line.partition("#")[0].split()
            names = [name for name in fields[1:] if name not in known]
            if names:
                lines.append("\t".join([fields[0], *names]))
    return "\n".join(lines) + "\n"


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(_MAX_FILE)
    except OSError:
        return ""
