#!/usr/bin/env bash
# main-job.sh [vkvmap roundtrip arguments]: set everything up and run the main job.
# Four ranks store Llama-3-8B's KV cache, two other ranks load it, every byte is compared.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VKVMAP_VENV:-.venv}
scripts/setup.sh "$venv"
if [ $# -eq 0 ]; then
  set -- llama-3-8b --from tp=4 --to tp=2
fi
exec "$venv/bin/vkvmap" roundtrip "$@"
