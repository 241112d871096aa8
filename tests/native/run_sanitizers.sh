#!/usr/bin/env bash
# run_sanitizers.sh: the native tests plain, under AddressSanitizer + UndefinedBehaviorSanitizer, and
# under ThreadSanitizer, each in a build directory of its own (VKVMAP_SANITIZER_BUILD, default
# build/sanitizers); then the engine's Python tests on a module built with the former. Fails if any
# program fails or any sanitizer speaks. Needs a virtual environment with pybind11 for the last part
# (VKVMAP_VENV, default .venv).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${VKVMAP_SANITIZER_BUILD:-build/sanitizers}
mkdir -p "$out"

for kind in plain address,undefined thread; do
  dir=$out/${kind%%,*}
  generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  cmake -S . -B "$dir" "${generator[@]}" -DVKVMAP_MODULE=OFF -DVKVMAP_NATIVE_TESTS=ON \
    -DVKVMAP_CUDA=OFF -DVKVMAP_SANITIZE="$([ "$kind" = plain ] || echo "$kind")" \
    -DCMAKE_BUILD_TYPE=Release >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
  cmake --build "$dir" --parallel "${VKVMAP_JOBS:-2}"
  only=()
  [ "$kind" != thread ] || only=(-R '^engine$')  # the others have one thread
  echo "== native tests, $kind"
  ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:abort_on_error=1 \
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 TSAN_OPTIONS=halt_on_error=1 \
    ctest --test-dir "$dir" --output-on-failure "${only[@]}"
done

python=${VKVMAP_VENV:-.venv}/bin/python
package=$out/python/vkvmap
rm -rf "$package"
mkdir -p "$package"
for item in vkvmap/*; do
  case $item in *.so) ;; *) ln -s "$PWD/$item" "$package/" ;; esac
done
"$python" -c 'import pybind11' 2>/dev/null || "$python" -m pip install --quiet pybind11
cmake -S . -B "$out/module" "${generator[@]}" -DVKVMAP_CUDA=OFF -DVKVMAP_SANITIZE=address,undefined \
  -DVKVMAP_MODULE_DIR="$(cd "$package" && pwd)" -DPython_EXECUTABLE="$(command -v "$python")" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >"$out/module.log" 2>&1 ||
  { cat "$out/module.log"; exit 1; }
cmake --build "$out/module" --target _C --parallel "${VKVMAP_JOBS:-2}"
echo "== Python tests of the engine, address,undefined"
# The sanitizer has to be there before the interpreter; what the interpreter itself never frees is
# not looked for. The package is imported first, or pytest would find the ordinary one.
cxx=${CXX:-c++}
LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  VKVMAP_HYPOTHESIS=fast "$python" -c '
import sys
sys.path.insert(0, sys.argv[1])
import vkvmap._C
assert vkvmap._C.__file__.startswith(sys.argv[1]), vkvmap._C.__file__
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_engine.py"]))
' "$(cd "$out/python" && pwd)"
