#!/usr/bin/env bash
# gpu.sh FOLDER [OPTION ...]: all that only a GPU can say, within ten minutes. Builds the checkout in
# place if it carries no build with CUDA, or an older one, runs the GPU tests, then the GPU suite
# (OPTIONs are its own); what they print and the figures go to FOLDER. Fails if a test fails or a byte is
# wrong.
#
# Downloads nothing: Python (PYTHON, default python3) must have torch with CUDA, numpy, pybind11, pytest
# and hypothesis, and nvcc, cmake and ninja must be there.
set -uo pipefail
out=$(mkdir -p "${1:?usage: gpu.sh FOLDER [OPTION ...]}" && cd "$1" && pwd) || exit
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

limit() { timeout --kill-after=5 "$@"; }

limit 180 "$python" -m benchmarks.gpu_bench >"$out/build.txt" 2>&1 || {
  tail -n 30 "$out/build.txt" >&2
  echo "gpu.sh: the build failed, or took more than 180 s" >&2
  exit 1
}
failed=0
VKVMAP_TEST_GPU=1 limit 240 "$python" -m pytest -p no:cacheprovider -rA tests/gpu 2>&1 |
  tee "$out/tests.txt" | tail -n 5 || failed=1
left=$((570 - SECONDS))
limit "$left" "$python" -m benchmarks.gpu_suite --seconds $((left < 300 ? left - 30 : 270)) \
  --json "$out/figures.json" "$@" 2>&1 | tee "$out/suite.txt" || failed=1
exit "$failed"
