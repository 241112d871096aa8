#!/usr/bin/env bash
# releases.sh VENV [RELEASE ...]: a store, a restart and a load in the real engine, once per release.
# Without arguments after VENV: every release that vkvmap is known to work with. 0.33.0, which has not
# been built for the CPU, runs its Python over 0.32.0's binaries.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: releases.sh VENV [RELEASE ...]}
shift
[ $# -gt 0 ] || set -- 0.33.0 0.32.0 0.31.0 0.30.0 0.29.0 0.28.0 0.27.1
tests/vllm/install.sh "$venv" 0.32.0 "$@"
export VKVMAP_VLLM_PYTHON=$venv/bin/python VKVMAP_VLLM_RELEASES="$*"
exec "${VKVMAP_VENV:-.venv}/bin/python" -m pytest -v -p no:xdist -m vllm tests/vllm/test_releases.py
