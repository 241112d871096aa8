#include "host_copy.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vkvmap {
namespace {

constexpr size_t kLine = 64;

// Read once, then left alone: asked for without a place in the outer caches. An address past the end
// of anything is harmless, which is why addresses of prefetches are numbers and not pointers.
inline void prefetch_line(uintptr_t address) {
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 0);
}

// The same by way of the outer caches; copy_fixed says when.
inline void prefetch_to_keep(uintptr_t address) {
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 3);
}

#if defined(__x86_64__)

#define VKVMAP_ISA sse2
#define VKVMAP_TARGET __attribute__((target("sse2")))
#define VKVMAP_LEVEL 1
#include "host_copy_kernels.inc"
#undef VKVMAP_ISA
#undef VKVMAP_TARGET
#undef VKVMAP_LEVEL

#define VKVMAP_ISA avx2
#define VKVMAP_TARGET __attribute__((target("avx2")))
#define VKVMAP_LEVEL 2
#include "host_copy_kernels.inc"
#undef VKVMAP_ISA
#undef VKVMAP_TARGET
#undef VKVMAP_LEVEL

#define VKVMAP_ISA avx512
#define VKVMAP_TARGET __attribute__((target("avx2,avx512f")))
#define VKVMAP_LEVEL 3
#include "host_copy_kernels.inc"
#undef VKVMAP_ISA
#undef VKVMAP_TARGET
#undef VKVMAP_LEVEL

#endif

#define VKVMAP_ISA portable
#define VKVMAP_TARGET
#define VKVMAP_LEVEL 0
#include "host_copy_kernels.inc"

using Choose = BoxCopies (*)(const BoxShape&, uint64_t, bool);

struct InstructionSet {
  const char* name;
  Choose choose;
  bool available;
};

const std::vector<InstructionSet>& known_sets() {
  static const auto* sets = new std::vector<InstructionSet>{
#if defined(__x86_64__)
      {"avx512", avx512::choose, __builtin_cpu_supports("avx512f") != 0},
      {"avx2", avx2::choose, __builtin_cpu_supports("avx2") != 0},
      {"sse2", sse2::choose, true},
#endif
      {"portable", portable::choose, true},
  };
  return *sets;
}

const InstructionSet* best_set() {
  for (const InstructionSet& set : known_sets()) {
    if (set.available) return &set;
  }
  return &known_sets().back();
}

std::atomic<const InstructionSet*>& chosen_set() {
  static std::atomic<const InstructionSet*> chosen{best_set()};
  return chosen;
}

}  // namespace

BoxCopies choose_box_copy(const BoxShape& shape, uint64_t dst_bits, bool stream) {
  return chosen_set().load(std::memory_order_relaxed)->choose(shape, dst_bits, stream);
}

void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : known_sets()) {
    if (set.available) names.emplace_back(set.name);
  }
  return names;
}

std::string instruction_set() { return chosen_set().load()->name; }

void set_instruction_set(const std::string& name) {
  for (const InstructionSet& set : known_sets()) {
    if (set.available && name == set.name) {
      chosen_set().store(&set);
      return;
    }
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available on this machine; " +
                              "leave the choice to the host mover");
}

}  // namespace vkvmap
