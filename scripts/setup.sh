# Sourced by ./quickstart and ./test: packages, virtual environment, install. Debian 12 or 13, root for the packages. Uses what is there.
# Usage: . scripts/setup.sh; setup run|test

BASE_PACKAGES=(python3 python3-venv ca-certificates erofs-utils crun runc mmdebstrap zstd fuse3 e2fsprogs xz-utils)
TEST_PACKAGES=(busybox-static fio libnbd-bin nbdkit openssl procps qemu-system-x86 qemu-utils skopeo squashfs-tools umoci)

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

install_packages() {
    local missing=() package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if [ ${#missing[@]} -eq 0 ]; then say "packages: all ${#} there"; return; fi
    if [ "$(id -u)" != 0 ]; then
        say "not root: cannot install ${missing[*]}; going on without"
        return
    fi
    say "packages: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || say "apt-get update failed; trying with the lists that are there"
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

setup() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1
    if [ ! -x /usr/bin/apt-get ]; then say "this script knows Debian; elsewhere install the packages named in scripts/setup.sh"; else
        if [ "$1" = test ]; then install_packages "${BASE_PACKAGES[@]}" "${TEST_PACKAGES[@]}"; else install_packages "${BASE_PACKAGES[@]}"; fi
    fi
    local python=${PYTHON:-/usr/bin/python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { say "$python is older than 3.11; set PYTHON to a newer one"; return 1; }
    if [ ! -x .venv/bin/python ]; then
        say "virtual environment: making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    local extra=""
    [ "$1" = test ] && extra="[test]"
    local stamp=".venv/.installed-$1" want
    want=$(sha256sum pyproject.toml | cut -d' ' -f1)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        say "installing dsec-layers$extra and its dependencies"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".$extra"
        echo "$want" >"$stamp"
    fi
}
