#!/usr/bin/env bash
# test.sh [LANE ...]: set everything up and run the tests; all lanes if none is named.
#
#   lint        ruff, mypy
#   core        unit and property tests
#   sanitizers  native and Python tests under AddressSanitizer, ThreadSanitizer and their like
#   cuda        the GPU side without a GPU: compiled, disassembled, simulated, and all GPU tests on a
#               stand-in of the CUDA runtime (needs nvcc)
#   gpu         the GPU tests on a real one; only where it is named (needs one)
#   store       crash, corruption and concurrency tests of the store
#   remote      the store over a real Mooncake cluster on the loopback
#   fuzz        short runs of the fuzzers
#   packaging   sdist and wheel, installed in fresh environments
#   vllm        the real engine on the CPU, in an environment of its own
#
# A lane that cannot run fails; it is never skipped. Longer runs: docs/testing.md.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=${VKVMAP_VENV:-.venv}
all=(lint core sanitizers cuda store remote fuzz packaging vllm)

lane_lint() {
  "$venv/bin/ruff" check . && "$venv/bin/ruff" format --check . && "$venv/bin/mypy"
}
lane_core() {
  "$venv/bin/python" -m pytest -q -n "${VKVMAP_JOBS:-2}" tests \
    -m "not cuda and not gpu and not store and not fuzz and not packaging and not vllm"
}
lane_sanitizers() { tests/native/run_sanitizers.sh; }
lane_cuda() { VKVMAP_TEST_CUDA=1 "$venv/bin/python" -m pytest -q -n "${VKVMAP_JOBS:-2}" tests -m cuda; }
lane_gpu() { VKVMAP_TEST_GPU=1 "$venv/bin/python" -m pytest -q tests/gpu; }
lane_store() { "$venv/bin/python" -m pytest -q -n "${VKVMAP_JOBS:-2}" tests -m store; }
lane_remote() { tests/store/run_remote.sh "$venv"; }
lane_fuzz() { "$venv/bin/python" -m pytest -q tests -m fuzz; }
lane_packaging() { "$venv/bin/python" -m pytest -q tests -m packaging; }
lane_vllm() { tests/vllm/run.sh; }

[ $# -gt 0 ] || set -- "${all[@]}"
for lane in "$@"; do
  declare -F "lane_$lane" >/dev/null || {
    echo "test.sh: unknown lane '$lane'; lanes: ${all[*]}" >&2
    exit 2
  }
done

scripts/setup.sh "$venv" || exit
failed=()
for lane in "$@"; do
  echo "== $lane"
  start=$SECONDS
  "lane_$lane" || failed+=("$lane")
  echo "== $lane: $((SECONDS - start)) s"
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "test.sh: failed lanes: ${failed[*]}" >&2
  exit 1
fi
echo "test.sh: all lanes passed: $*"
