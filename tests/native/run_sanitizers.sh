#!/usr/bin/env bash
# run_sanitizers.sh [PART ...]: everything native under sanitizers. Fails if a test fails or a
# sanitizer speaks. Parts, without any all but `module`:
#
#   native   the native tests plain, under AddressSanitizer + UndefinedBehaviorSanitizer, and under
#            ThreadSanitizer
#   python   the core lane under the former two
#   threads  the Python tests with threads, under ThreadSanitizer
#   leaks    things made and let go, under LeakSanitizer
#   module   instead of `python`: only the Python tests that reach the native module
#
# Needs a virtual environment with the test tools (VKVMAP_VENV, default .venv) for all but `native`;
# builds in VKVMAP_SANITIZER_BUILD, default build/sanitizers.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
out=${VKVMAP_SANITIZER_BUILD:-build/sanitizers}
mkdir -p "$out"
out=$(cd "$out" && pwd)
jobs=${VKVMAP_JOBS:-2}
generator=()
! command -v ninja >/dev/null || generator=(-G Ninja)
cxx=${CXX:-c++}

# Faults that tests make on purpose (guard pages) are the kernel's, not findings. Leaks are looked
# for by `leaks`: an interpreter that ends frees little.
asan=detect_leaks=0:abort_on_error=1:strict_string_checks=1:handle_segv=0:quarantine_size_mb=16
ubsan=print_stacktrace=1:halt_on_error=1
# Children of a forked process with threads may start their own.
tsan=halt_on_error=1:die_after_fork=0

configure() { # DIR SANITIZERS OPTION...
  local dir=$1 kinds=$2
  shift 2
  cmake -S "$root" -B "$dir" "${generator[@]}" -DVKVMAP_CUDA=OFF -DVKVMAP_SANITIZE="$kinds" \
    -DCMAKE_BUILD_TYPE=Release "$@" >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
}

part_native() {
  local kind dir only
  for kind in plain address,undefined thread; do
    dir=$out/${kind%%,*}
    configure "$dir" "$([ "$kind" = plain ] || echo "$kind")" -DVKVMAP_MODULE=OFF \
      -DVKVMAP_NATIVE_TESTS=ON
    cmake --build "$dir" --parallel "$jobs"
    only=()
    [ "$kind" != thread ] || only=(-R '^engine$') # the others have one thread
    echo "== native tests, $kind"
    ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:abort_on_error=1 UBSAN_OPTIONS=$ubsan \
      TSAN_OPTIONS=halt_on_error=1 ctest --test-dir "$dir" --output-on-failure "${only[@]}"
  done
}

# A copy of the project in which the module is the instrumented one, wherever a test's own programs
# start: `$out/NAME` is the copy, `$out/NAME.path` has the package alone.
copy_with() { # NAME SANITIZERS
  local tree=$out/$1 python=${VKVMAP_VENV:-.venv}/bin/python
  python=$(cd "$(dirname "$python")" && pwd)/python
  rm -rf "$tree" "$tree.path"
  mkdir -p "$tree" "$tree.path"
  tar -c --exclude=./build --exclude=./.git --exclude='./.venv*' --exclude='./.*_cache' \
    --exclude='*.so' --exclude=__pycache__ . | tar -x -C "$tree"
  ln -s "$tree/vkvmap" "$tree.path/vkvmap"
  "$python" -c 'import pybind11' 2>/dev/null || "$python" -m pip install --quiet pybind11
  configure "$out/module-$1" "$2" -DVKVMAP_MODULE_DIR="$tree/vkvmap" \
    -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
  cmake --build "$out/module-$1" --target _C --parallel "$jobs"
  interpreter=$python
}

within() { # NAME LIBRARY ARGUMENT...: Python in a copy, its sanitizer there before the interpreter
  local tree=$out/$1 library=$2
  shift 2
  (cd "$tree" && LD_PRELOAD="$("$cxx" -print-file-name="$library") $("$cxx" \
    -print-file-name=libstdc++.so)" PYTHONPATH="$tree.path" ASAN_OPTIONS="${told:-$asan}" \
    UBSAN_OPTIONS=$ubsan TSAN_OPTIONS=$tsan VKVMAP_HYPOTHESIS=fast VKVMAP_SPARE_MIB=64 \
    "$interpreter" "$@")
}

check_module() { # NAME LIBRARY: or an ordinary build would pass in silence
  within "$1" "$2" -c 'import os, vkvmap._C as m; assert m.__file__.startswith(os.getcwd()), m'
}

tests() { # NAME LIBRARY ARGUMENT...
  local name=$1 library=$2
  shift 2
  check_module "$name" "$library"
  # Memory that sanitizers keep is no growth of ours; `leaks` looks for that.
  within "$name" "$library" -m pytest -q -p no:cacheprovider -n "$jobs" \
    --deselect tests/test_survival.py::test_what_is_made_and_let_go_leaves_nothing "$@"
}

part_module() {
  copy_with asan address,undefined
  echo "== Python tests that reach the module, address,undefined"
  tests asan libasan.so tests/guarded tests/fuzz/test_fuzz_ids.py tests/test_cuda_python.py \
    tests/test_{coalescing,edges,engine,engine_soak,faults_memory,faults_runtime,gaps,pack}.py \
    tests/test_{plan,region,survival,transfer}.py
}

part_python() {
  copy_with asan address,undefined
  echo "== the core lane, address,undefined"
  tests asan libasan.so tests \
    -m "not cuda and not gpu and not store and not fuzz and not packaging and not vllm"
}

part_threads() {
  copy_with tsan thread
  echo "== Python tests with threads, thread"
  # ThreadSanitizer loses count of threads in a forked child that starts its own.
  tests tsan libtsan.so tests/test_{edges,engine,engine_soak,survival,transfer}.py \
    -k "not forked_child"
}

part_leaks() {
  [ -d "$out/asan" ] || copy_with asan address,undefined
  interpreter=$(cd "$(dirname "${VKVMAP_VENV:-.venv}/bin/python")" && pwd)/python
  check_module asan libasan.so
  echo "== things made and let go, leak"
  # The interpreter and numpy leave much behind; a leak of ours has a frame of ours.
  told=detect_leaks=1:exitcode=0 within asan libasan.so -m tests.cycles 300 >"$out/leaks.log" 2>&1
  grep -q "LeakSanitizer" "$out/leaks.log" || { cat "$out/leaks.log"; exit 1; }
  if grep -n "_C\.cpython" "$out/leaks.log"; then
    echo "run_sanitizers.sh: leaks of ours in $out/leaks.log" >&2
    exit 1
  fi
}

[ $# -gt 0 ] || set -- native python threads leaks
for part in "$@"; do
  declare -F "part_$part" >/dev/null ||
    { echo "run_sanitizers.sh: unknown part '$part'; parts: native module threads leaks python" >&2; exit 2; }
done
for part in "$@"; do
  start=$SECONDS
  "part_$part"
  echo "== $part: $((SECONDS - start)) s"
done
