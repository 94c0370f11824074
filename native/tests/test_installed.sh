#!/bin/sh
# Installs libefa_kv.so into a folder of its own, moves that folder, and builds and runs
# the example with nothing but what pkg-config says of it. Then looks at what the library
# shows to others: only names of the contract.
#
# Arguments: cmake, its build folder, a C compiler, the example, pkg-config or an empty
# word, more flags for the compiler.
set -eu
cmake=$1 build=$2 compiler=$3 example=$4 pkg_config=$5
shift 5

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$cmake" --install "$build" --component c --prefix "$folder/first" >/dev/null
mv "$folder/first" "$folder/here"
described=$(find "$folder/here" -name efa_kv.pc)
library=$(find "$folder/here" -name libefa_kv.so)
test -n "$described"
test -n "$library"

if [ -n "$pkg_config" ]; then
    flags=$(PKG_CONFIG_PATH=$(dirname "$described") "$pkg_config" --cflags --libs efa_kv)
else
    echo "no pkg-config: its file is not tried"
    flags="-I$folder/here/include -L$(dirname "$library") -lefa_kv"
fi
# Flags are words: they are meant to be split.
# shellcheck disable=SC2086
"$compiler" -std=c11 -Wall -Wextra -Werror "$@" "$example" $flags -o "$folder/move"
LD_LIBRARY_PATH=$(dirname "$library") "$folder/move" tcp

shown=$(nm -D --defined-only --format=posix "$library" | cut -d' ' -f1)
declared=$(grep -oE '\bekv_[a-z_]+\(' "$folder/here/include/efa_kv.h" | tr -d '(' | sort -u)
test -n "$declared"
for name in $declared; do
    echo "$shown" | grep -qx "$name" || { echo "$name is declared and not in the library"; exit 1; }
done
for name in $shown; do
    echo "$declared" | grep -qx "$name" || { echo "$name is shown and not declared"; exit 1; }
done
