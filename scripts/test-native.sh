#!/bin/sh
# Builds the C tests once per sanitizer named and runs them. Each has its own build
# folder, so a second run compiles only what changed. With --fast first, those that
# take long are left out.
set -eu
cd "$(dirname "$0")/.."

chosen=""
if [ "${1:-}" = --fast ]; then
    chosen="--label-exclude slow"
    shift
fi
jobs=$(nproc 2>/dev/null || echo 2)
log=build/native/build.log
mkdir -p build/native

for sanitizer in "$@"; do
    folder="build/native/$sanitizer"
    echo "efa-kv: C tests under the $sanitizer sanitizer"
    if ! {
        cmake -S native -B "$folder" -DCMAKE_BUILD_TYPE=Debug -DEFA_KV_PYTHON=OFF \
            -DEFA_KV_SANITIZER="$sanitizer" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON &&
            cmake --build "$folder" --parallel "$jobs"
    } >"$log" 2>&1; then
        cat "$log" >&2
        exit 1
    fi
    # shellcheck disable=SC2086  # a list of words
    ctest --test-dir "$folder" --output-on-failure --no-tests=error --timeout 180 $chosen
done
