#!/usr/bin/env bash
# run.sh SECONDS [SEED]: the descriptor fuzzer at length, half the time with its own driver under g++,
# half with libFuzzer where clang is installed. Findings are left in build/fuzz.
set -euo pipefail
seconds=${1:?usage: run.sh SECONDS [SEED]}
seed=${2:-$RANDOM}
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../../build/fuzz
mkdir -p "$out/corpus"
if command -v clang++ >/dev/null; then
  "$here/build.sh" "$out/libfuzzer" clang++
  seconds=$((seconds / 2))
  (cd "$out" && ./libfuzzer -max_total_time="$seconds" -seed="$seed" -timeout=10 \
    -malloc_limit_mb=64 -max_len=16384 -print_final_stats=1 corpus "$here/corpus/descriptor")
fi
"$here/build.sh" "$out/own" g++
cd "$out" && ./own "$seconds" "$seed" "$here/corpus/descriptor"
