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
say() { echo "setup.sh: $1" >&2; }

if [ ! -x "$venv/bin/python" ]; then
  say "making $venv; the first time takes minutes: torch is large, and the native code is compiled"
  "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip install --quiet --upgrade pip
# torch first and pinned, so that a machine without a GPU can be given its CPU build.
"$venv/bin/python" -c 'import torch' 2>/dev/null ||
  "$venv/bin/python" -m pip install --quiet "torch==${VKVMAP_TORCH:-2.13.0}"
say "building vkvmap and installing what it needs"
# setuptools warns of folders named like the package, which the line below it settles.
PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --editable "$root[$extras]"
# A script beside a clone that is called vkvmap must find the package, not the clone's folder: a path
# entry comes before setuptools' own hook, and a real package before a bare folder.
"$venv/bin/python" - "$root" <<'EOF'
import sys, sysconfig, pathlib
pathlib.Path(sysconfig.get_path("purelib"), "vkvmap-checkout.pth").write_text(sys.argv[1] + "\n")
EOF
