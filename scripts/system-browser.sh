#!/bin/sh
# A Chromium for the test that looks at the page of `efa-kv report`.  It is installed by apt
# where that is allowed; where it is not, the test says so and is left out.
set -eu

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    as_root="none"
fi
if [ "$as_root" = none ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "efa-kv: no Chromium, so its test is left out; as root, run: apt-get install chromium" >&2
    exit 0
fi
echo "efa-kv: installing chromium with apt" >&2
if ! { $as_root apt-get -o DPkg::Lock::Timeout=300 update -qq &&
    $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends chromium; } >&2; then
    echo "efa-kv: chromium could not be installed, so its test is left out" >&2
fi
