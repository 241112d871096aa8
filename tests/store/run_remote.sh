#!/usr/bin/env bash
# run_remote.sh VENV: install a real Mooncake beside vkvmap and run the tests that need it.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: run_remote.sh VENV}
# Mooncake links libibverbs whatever it transports with.
if ! ldconfig -p | grep -q libibverbs.so.1; then
  command -v apt-get >/dev/null || {
    echo "run_remote.sh: install libibverbs (libibverbs1, rdma-core) first" >&2
    exit 2
  }
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq libibverbs1 >/dev/null
fi
"$venv/bin/python" -m pip install --quiet --editable ".[dev,remote]"
VKVMAP_REMOTE=1 exec "$venv/bin/python" -m pytest -q tests/store/test_mooncake.py
