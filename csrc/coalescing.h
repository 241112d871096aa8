// What the kernel's accesses touch, counted: the model behind benchmarks/coalescing.py.
//
// What must stay true: addresses come from tile.h, as they do in the kernel, and a request is what one
// warp asks for in one instruction, lanes beyond the tile's end left out.
#pragma once

#include <cstdint>

#include "validate.h"

namespace vkvmap {

struct AccessCounts {
  uint64_t bytes = 0;
  uint64_t requests = 0;        // warp-level accesses, on either side
  uint64_t tiles = 0;
  uint64_t host_lines = 0;      // of 128 bytes
  uint64_t host_sectors = 0;    // of 32 bytes
  uint64_t device_lines = 0;
  uint64_t device_sectors = 0;
};

// One page of every layer of a class: block 0 and page 0 of row 0.
AccessCounts count_accesses(const Plan& plan, Direction direction, uint32_t class_index);

}  // namespace vkvmap
