#!/usr/bin/env bash
# lower-bounds.sh VENV: run the tests of the Python rooms with the oldest dependencies allowed.
# Downloads gigabytes: old releases of torch come with CUDA libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: lower-bounds.sh VENV}
python=${PYTHON:-python3.11}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --requirement tests/lower-bounds.txt pytest hypothesis
"$venv/bin/python" -m pip install --quiet --editable . --constraint tests/lower-bounds.txt
VKVMAP_HYPOTHESIS=fast "$venv/bin/python" -m pytest -q tests/test_transfer.py tests/test_derive.py \
  tests/test_memory.py tests/test_whole_models.py tests/test_cli.py tests/test_models.py \
  tests/test_region.py tests/test_format.py
