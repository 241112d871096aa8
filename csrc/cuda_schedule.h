// Cuts a range of a transfer's units into launches of the kernel.
//
// What must stay true: every unit of the range is in exactly one launch, in order; a launch stays
// within the limits (but moves at least one page); counts of work items fit 32 bits, so the kernel
// needs no wider arithmetic to find its place. Pure arithmetic: it calls nothing of CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_kernel.cuh"
#include "mover.h"

namespace vkvmap::cuda {

struct LaunchLimits {
  uint64_t bytes;  // a slice, so that other work on the device is let in between
  uint64_t pairs;  // what one pair buffer holds
};

constexpr uint64_t kMaxLaunchItems = uint64_t{1} << 30;

struct Launch {
  // Pairs [first, first + count) of one of the transfer's lists.
  struct Span {
    uint32_t list;
    uint64_t first;
    uint64_t count;
  };
  std::vector<Span> spans;
  std::vector<Segment> segments;       // first_pair counts from the start of its span
  std::vector<uint32_t> segment_span;  // index into spans, per segment
  uint64_t num_pairs = 0;
  uint64_t num_items = 0;
  uint64_t bytes = 0;
};

std::vector<Launch> cut_into_launches(const Transfer& transfer, uint64_t first, uint64_t last,
                                      const LaunchLimits& limits);

// Writes the segments, pair indices absolute, given where each span's pairs start in the buffer.
void place_segments(const Launch& launch, const std::vector<uint64_t>& span_starts,
                    LaunchHead& head);

// Shares `items` evenly among the warps of at most `ctas` CTAs; returns how many CTAs that takes.
uint32_t share_items(uint64_t items, uint32_t ctas, uint32_t threads, LaunchHead& head);

}  // namespace vkvmap::cuda
