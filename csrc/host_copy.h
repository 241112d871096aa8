// Copies one box of equal fragments, as fast as this processor can.
//
// Contract: writes exactly the bytes of the fragments, never a neighbour's (canonical lines are shared
// by ranks, which write them at the same time); reads no byte outside the fragments (prefetches are
// hints and fault on nothing). Safe for every alignment and length. `stream` asks for non-temporal
// stores on whole lines; whoever uses it calls finish_streaming() before telling anyone.
//
// The same kernels are compiled for SSE2, AVX2 and AVX-512 and picked at run time; elsewhere plain
// C++ takes their place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vkvmap {

struct BoxShape {
  uint64_t fragment_bytes;
  uint64_t count[2];  // inner, outer; at least 1
  uint64_t dst_stride[2];
  uint64_t src_stride[2];
  uint64_t ahead;  // prefetch distance in bytes
};

// Pages that one call walks side by side. Their addresses are unrelated, so four page walks and four
// open rows of memory are in flight instead of one.
constexpr int kStrands = 4;

// Copies the box of one page, or of kStrands pages, whose boxes begin at dst[i] and src[i];
// next_src[i] is where reading goes on after this box: its first lines are asked for early.
using BoxCopy = void (*)(uint8_t* const* dst, const uint8_t* const* src, const BoxShape& shape,
                         const uintptr_t* next_src);

struct BoxCopies {
  BoxCopy one;
  BoxCopy strands;
};

// `dst_bits` is the OR of everything that destination addresses are made of besides the strides.
BoxCopies choose_box_copy(const BoxShape& shape, uint64_t dst_bits, bool stream);

void finish_streaming();

// "avx512", "avx2", "sse2" or "portable"; the best is in use unless a test chooses another.
std::vector<std::string> instruction_sets();
std::string instruction_set();
void set_instruction_set(const std::string& name);  // std::invalid_argument if not available

}  // namespace vkvmap
