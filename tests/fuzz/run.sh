#!/usr/bin/env bash
# run.sh SECONDS [SEED]: the fuzzers at length. Descriptors: half of SECONDS with a driver of their own
# under g++, half with libFuzzer where clang is installed. Then SECONDS for each Python target, where
# the environment (VKVMAP_VENV, default .venv) has atheris: pip install atheris. Findings are left in
# build/fuzz.
set -euo pipefail
seconds=${1:?usage: run.sh SECONDS [SEED]}
seed=${2:-$RANDOM}
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../../build/fuzz
mkdir -p "$out/corpus"
half=$seconds
if command -v clang++ >/dev/null; then
  "$here/build.sh" "$out/libfuzzer" clang++
  half=$((seconds / 2))
  (cd "$out" && ./libfuzzer -max_total_time="$half" -seed="$seed" -timeout=10 \
    -malloc_limit_mb=64 -max_len=16384 -print_final_stats=1 corpus "$here/corpus/descriptor")
fi
"$here/build.sh" "$out/own" g++
(cd "$out" && ./own "$half" "$seed" "$here/corpus/descriptor")

cd "$here/../.."
python=${VKVMAP_VENV:-.venv}/bin/python
if ! "$python" -c 'import atheris' 2>/dev/null; then
  echo "run.sh: no atheris in $python; the Python targets were not run" >&2
  exit 3
fi
for target in command config header identity ids region; do
  mkdir -p "build/fuzz/corpus-$target"
  echo "== $target"
  "$python" -m tests.fuzz.guided "$target" -max_total_time="$seconds" -seed="$seed" -timeout=30 \
    -rss_limit_mb=4096 -max_len=20000 -artifact_prefix=build/fuzz/ -print_final_stats=1 \
    "build/fuzz/corpus-$target" "tests/fuzz/corpus/$target"
done
