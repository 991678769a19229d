#!/usr/bin/env bash
# Builds the kernels and their self-test for aarch64, runs it under qemu, and demands the digests that the self-test of
# this machine prints: one set of bits for all machines.
#
# usage: cross_aarch64.sh BUILD_DIR HOST_SELFTEST   needs: cmake, ninja, aarch64-linux-gnu-g++; qemu-aarch64 to run it
set -euo pipefail

source_dir=$(cd "$(dirname "$0")/../../csrc" && pwd)
build_dir=$1
host_selftest=$2

# Without optimization, for time: which bits come out depends on the source alone.
cmake -G Ninja -S "$source_dir" -B "$build_dir" -DHEADRACE_BINDINGS=OFF -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
cmake --build "$build_dir"
if ! command -v qemu-aarch64 >/dev/null; then
    echo "built for aarch64; not run, because qemu-aarch64 is not installed"
    exit 0
fi
"$host_selftest" | tee "$build_dir/host.txt"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$build_dir/headrace_selftest" | tee "$build_dir/aarch64.txt"
diff <(grep generic "$build_dir/host.txt") <(grep generic "$build_dir/aarch64.txt")
echo "aarch64 gives the same bits as this machine"
