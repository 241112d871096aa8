#!/usr/bin/env bash
# run.sh [pytest arguments]: the vllm lane. Makes an environment with the real engine, then runs the
# tests marked `vllm`, one engine at a time. VKVMAP_VENV is the environment that pytest runs in.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${VKVMAP_VENV:-.venv}
engine=${VKVMAP_VLLM_VENV:-$venv-vllm}
start=$SECONDS
tests/vllm/install.sh "$engine" 0.32.0 0.27.1
echo "== vllm: installed in $((SECONDS - start)) s"
export VKVMAP_VLLM_PYTHON=$engine/bin/python
exec "$venv/bin/python" -m pytest -q -p no:xdist --durations=25 -m vllm "${@:-tests/vllm}"
