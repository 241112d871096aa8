// Division by a number fixed when the plan is packed, for small dividends.
//
// A tile holds at most kTileBytes = 4096 units, so dividend and divisor stay within 2^12. With
// mul = ceil(2^31 / d) the error mul*d - 2^31 is below d, hence n * error < 2^24 < 2^31 and
// (n * mul) >> 31 equals n / d exactly for every n, d in [1, 4096]; `d == 1` needs no special case.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define VKVMAP_HD __host__ __device__ __forceinline__
#else
#define VKVMAP_HD inline
#endif

namespace vkvmap {

constexpr uint32_t kFastDivShift = 31;
constexpr uint32_t kFastDivMax = 4096;  // largest dividend and divisor

VKVMAP_HD uint32_t fastdiv_multiplier(uint32_t divisor) {
  return static_cast<uint32_t>(((uint64_t{1} << kFastDivShift) + divisor - 1) / divisor);
}

VKVMAP_HD uint32_t fastdiv(uint32_t dividend, uint32_t multiplier) {
  return static_cast<uint32_t>((static_cast<uint64_t>(dividend) * multiplier) >> kFastDivShift);
}

}  // namespace vkvmap
