#!/bin/sh
# Makes sure that the tools from outside Python are here: a C compiler, make,
# CMake, libfabric's headers and a Python that can make virtual environments.
# Missing ones are installed by apt where that is allowed; otherwise one message
# names them all, so that nobody has to come back once per package.
set -eu

oldest_python="3, 11"

have() { command -v "$1" >/dev/null 2>&1; }

# A version manager leaves stand-ins on PATH that only print an error, so
# a Python counts only after it has run.
python_works() { "$1" -c "import sys; sys.exit(sys.version_info < ($oldest_python))" >/dev/null 2>&1; }

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
        if [ -n "$candidate" ] && python_works "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

# Prints the Debian packages that are missing, in one line.
missing_packages() {
    have cc || have gcc || have clang || printf 'build-essential '
    have make || printf 'make '
    have cmake || printf 'cmake '
    # The run-time library too: it is opened by name when an engine starts.
    if ! { echo '#include <rdma/fabric.h>' | cc -E - >/dev/null 2>&1; }; then
        printf 'libfabric-dev '
    fi
    if ! python=$(find_python); then
        printf 'python3 python3-venv python3-dev '
        return 0
    fi
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || printf 'python3-venv '
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
        >/dev/null 2>&1 || printf 'python3-dev '
}

give_up() {
    cat >&2 <<MESSAGE
efa-kv: system packages are missing.
  found:      no $1
  expected:   all of: a C compiler, make, CMake 3.20 or later, libfabric's headers, Python 3.11 or later with venv and headers
  what to do: as root, run: apt-get install $1
MESSAGE
    exit 1
}

install() {
    have apt-get || give_up "$1"
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif have sudo && sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        give_up "$1"
    fi
    echo "efa-kv: installing $1 with apt" >&2
    # shellcheck disable=SC2086  # both are word lists
    if ! { $as_root apt-get -o DPkg::Lock::Timeout=300 update -qq \
        && $as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $1; } >&2; then
        give_up "$1"
    fi
}

missing=$(missing_packages)
if [ -n "$missing" ]; then
    install "${missing% }"
    still_missing=$(missing_packages)
    [ -z "$still_missing" ] || give_up "${still_missing% }"
fi
# The caller runs everything else with the Python found here.
find_python
