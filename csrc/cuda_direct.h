// Transfers that go on a caller's stream or into a graph, without an engine.
//
// What must stay true: ids are checked by what checks the engine's (intake.h) before anything is
// launched; order against other transfers is the caller's business, by streams.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_mover.h"
#include "intake.h"

namespace vkvmap {

// All layers of the named groups. Throws std::invalid_argument naming group, index, value and rule.
Transfer make_direct_transfer(std::shared_ptr<const Plan> plan, Direction direction,
                              const std::vector<GroupIds>& groups);

// A captured transfer as callers see it: by group, with the writer election inside.
class GraphTransfer {
 public:
  struct Capacity {
    uint32_t group;
    uint64_t pairs;
  };
  GraphTransfer(std::shared_ptr<const Plan> plan, Direction direction,
                const std::vector<Capacity>& capacities, const KernelTuning& tuning);

  // Groups that are not named move nothing from now on. No replay may be under way. Throws
  // std::invalid_argument as make_direct_transfer does, and for more pairs than the capacity; the ids
  // are then those of before.
  void set_ids(const std::vector<GroupIds>& groups);
  void launch(uintptr_t stream) const { captured_->launch(stream); }
  size_t num_launches() const { return captured_->num_launches(); }

 private:
  std::shared_ptr<const Plan> plan_;
  Direction direction_;
  std::vector<uint64_t> capacities_;  // by group; 0 where it was made for nothing
  Transfer shape_;
  std::unique_ptr<CapturedTransfer> captured_;
};

// The device that holds the plan's caches; -1 if they are in host memory. Throws as device_of() does
// for caches on several devices. Needs a device: asks CUDA.
int cache_device(const Plan& plan);

// Mean length, in bytes, of what is contiguous on both sides, weighted by bytes: what decides
// between movers. 0 if the plan moves nothing in that direction.
uint64_t mean_run_bytes(const Plan& plan, Direction direction);

}  // namespace vkvmap
