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
  uint64_t count[2];  // inner, outer
  uint64_t dst_stride[2];
  uint64_t src_stride[2];
  uint64_t ahead;  // prefetch distance in bytes
};

// `next_src` is where reading goes on after this box: its first lines are asked for early.
using BoxCopy = void (*)(uint8_t* dst, const uint8_t* src, const BoxShape& shape,
                         uintptr_t next_src);

// `dst_bits` is the OR of everything that destination addresses are made of besides the strides.
BoxCopy choose_box_copy(const BoxShape& shape, uint64_t dst_bits, bool stream);

void finish_streaming();

// "avx512", "avx2", "sse2" or "portable"; the best is in use unless a test chooses another.
std::vector<std::string> instruction_sets();
std::string instruction_set();
void set_instruction_set(const std::string& name);  // std::invalid_argument if not available

}  // namespace vkvmap
