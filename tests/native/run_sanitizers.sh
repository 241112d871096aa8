#!/usr/bin/env bash
# run_sanitizers.sh: the native tests plain, under AddressSanitizer + UndefinedBehaviorSanitizer, and
# under ThreadSanitizer, each in a build directory of its own (VKVMAP_SANITIZER_BUILD, default
# build/sanitizers). Fails if any program fails or any sanitizer speaks.
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
