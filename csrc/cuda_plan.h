// A plan as a GPU sees it: which device holds the cache, where that device sees the host memory, a
// copy of layers and tiles in device memory, and the runs that a copy engine would move.
//
// What must stay true: a device alias is asked for, piece by piece, never extrapolated. A layer whose
// host memory has no single offset between host address and alias cannot be addressed by one base,
// so the kernel refuses the plan; the copy engine takes host addresses and does not care.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "home.h"
#include "validate.h"

namespace vkvmap::cuda {

// The device whose memory holds every local range. Throws std::invalid_argument if there is none, or
// more than one.
int device_of(const Plan& plan);

// Alias minus address for all of [address, address + bytes), or why there is none.
struct Alias {
  std::optional<uint64_t> delta;  // modulo 2^64
  std::string why_not;
};
Alias alias_of(uint64_t address, uint64_t bytes);

// True if CUDA knows all of the plan's host memory as page-locked.
bool is_pinned(const Plan& plan);

class DevicePlan {
 public:
  // Throws std::invalid_argument with the reason if the kernel cannot reach the memory.
  explicit DevicePlan(const Plan& plan);
  ~DevicePlan();
  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  const int device;
  const LayerEntry* layers() const { return layers_; }  // device memory
  const Tile* tiles() const { return tiles_; }          // device memory

 private:
  const Home home_;
  void* memory_ = nullptr;
  const LayerEntry* layers_ = nullptr;
  const Tile* tiles_ = nullptr;
};

// Equal pieces of a page at a fixed distance on either side, as long as the tiles allow: what one
// (two-dimensional) copy moves.
struct CopyBox {
  uint64_t local_offset;
  uint64_t host_offset;
  uint64_t bytes;  // contiguous on both sides
  uint64_t rows;
  uint64_t local_stride;
  uint64_t host_stride;
};
std::vector<CopyBox> merge_tiles(const Tile* tiles, uint32_t num_tiles);

}  // namespace vkvmap::cuda
