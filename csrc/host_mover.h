// The mover for two sides in host memory: the engine's threads copy.
#pragma once

#include <cstdint>

#include "mover.h"

namespace vkvmap {

Mover* host_mover();

// Transfers of at least this many bytes bypass the caches; a quarter of the last-level cache unless
// set (by benchmarks and tests).
uint64_t host_streaming_bytes();
void set_host_streaming_bytes(uint64_t bytes);

}  // namespace vkvmap
