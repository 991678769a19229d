#!/usr/bin/env bash
# Builds the kernels for this machine and for aarch64, runs both self-tests (the second under qemu), and demands that
# they print the same digests: one set of bits for all machines.
#
# usage: cross_aarch64.sh BUILD_DIR      needs: cmake, ninja, g++, aarch64-linux-gnu-g++; qemu-aarch64 to run the result
set -euo pipefail

source_dir=$(cd "$(dirname "$0")/../../csrc" && pwd)
build_dir=$1

build() { # NAME [CMAKE OPTION...]
    local dir=$build_dir/$1
    shift
    cmake -G Ninja -S "$source_dir" -B "$dir" -DHEADRACE_BINDINGS=OFF "$@" >/dev/null
    cmake --build "$dir"
}

build aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
if ! command -v qemu-aarch64 >/dev/null; then
    echo "built for aarch64; not run, because qemu-aarch64 is not installed"
    exit 0
fi
build host
"$build_dir/host/headrace_selftest" | tee "$build_dir/host.txt"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$build_dir/aarch64/headrace_selftest" | tee "$build_dir/aarch64.txt"
diff <(grep generic "$build_dir/host.txt") <(grep generic "$build_dir/aarch64.txt")
echo "aarch64 gives the same bits as this machine"
