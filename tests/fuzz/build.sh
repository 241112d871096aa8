#!/usr/bin/env bash
# build.sh OUT [CXX]: the descriptor fuzzer, with address and undefined-behaviour sanitizers. With
# clang it is a libFuzzer program, with any other compiler it drives itself.
set -euo pipefail
out=$(realpath -m "${1:?usage: build.sh OUT [CXX]}")
cxx=${2:-${CXX:-c++}}
cd "$(dirname "$0")/../.."
flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -Icsrc -pthread -fno-sanitize-recover=undefined)
case $("$cxx" --version) in
  *clang*) flags+=(-fsanitize=fuzzer,address,undefined -DVKVMAP_LIBFUZZER) ;;
  *) flags+=(-fsanitize=address,undefined) ;;
esac
mkdir -p "$(dirname "$out")"
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
for source in csrc/{validate,host_program,host_copy,host_mover}.cpp tests/fuzz/fuzz_descriptor.cpp; do
  "$cxx" "${flags[@]}" -c "$source" -o "$objects/$(basename "$source").o" &
done
for job in $(jobs -p); do wait "$job"; done
"$cxx" "${flags[@]}" "$objects"/*.o -o "$out"
