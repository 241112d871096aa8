#!/usr/bin/env bash
# setup.sh VENV [EXTRAS]: make a virtual environment with vkvmap built from this checkout, editable.
# EXTRAS (default "dev") are the package's optional dependencies to install with it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:?usage: setup.sh VENV [EXTRAS]}
extras=${2:-dev}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "setup.sh: Python 3.10 or newer is needed, $("$python" --version) found; set PYTHON" >&2
  exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
# torch first and pinned, so that a machine without a GPU can be given its CPU build.
"$venv/bin/python" -c 'import torch' 2>/dev/null ||
  "$venv/bin/python" -m pip install --quiet "torch==${VKVMAP_TORCH:-2.13.0}"
"$venv/bin/python" -m pip install --quiet --editable "$root[$extras]"
