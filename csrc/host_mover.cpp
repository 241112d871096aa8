// The host mover: the plan executed by the engine's threads, where both sides are in host memory.
//
// It walks layer by layer and pair by pair, box by box; each box is told where reading goes on, so
// that prefetches never run dry between pages. Whether stores bypass the caches is decided once per
// transfer, by its size: streaming gains a third on data that no cache holds, and loses several-fold
// where source and destination would have stayed in one (benchmarks/host_mover.py --warm).
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "host_copy.h"
#include "host_mover.h"
#include "host_program.h"
#include "mover.h"
#include "tile.h"

namespace vkvmap {
namespace {

constexpr uint64_t kSliceBytes = 512 * 1024;
// Prefetch distances. A gather's lines are scattered, so fewer of them are open at once.
constexpr uint64_t kGatherAhead = 1024;
constexpr uint64_t kScatterAhead = 2048;

// From here on a transfer's bytes are taken to be in no cache.
uint64_t default_streaming_bytes() {
  long cache = -1;
#ifdef _SC_LEVEL3_CACHE_SIZE
  cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return cache > 0 ? static_cast<uint64_t>(cache) / 4 : uint64_t{8} << 20;
}

std::atomic<uint64_t>& streaming_threshold() {
  static std::atomic<uint64_t> bytes{default_streaming_bytes()};
  return bytes;
}

// A box in one direction, ready to run.
struct Step {
  uint64_t src_offset;
  uint64_t dst_offset;
  BoxShape shape;
  BoxCopy copy;
};

class HostMover : public Mover {
 public:
  const char* name() const noexcept override { return "host"; }
  uint64_t slice_bytes() const noexcept override { return kSliceBytes; }

  std::shared_ptr<void> prepare(const Plan& plan) override {
    return std::make_shared<HostProgram>(plan);
  }

  void move(const Transfer& transfer, uint64_t first, uint64_t last, MoveReport& report) override {
    const HostProgram& program = *static_cast<const HostProgram*>(transfer.state.get());
    const Plan& plan = *transfer.plan;
    const bool stream = transfer.bytes >= streaming_threshold().load();
    std::vector<Step> steps;
    for_each_stretch(
        transfer, first, last,
        [&](const WorkList& list, uint32_t layer, uint64_t begin, uint64_t end) {
          const LayerClass& c = plan.classes()[list.class_index];
          const LayerEntry& entry = plan.layers()[list.first_layer + layer];
          compile(program.boxes(list.class_index, transfer.direction), entry, transfer.direction,
                  stream, steps);
          if (transfer.direction == Direction::Store) {
            copy_pages<Direction::Store>(steps, entry, list.pairs + begin, list.pairs + end);
          } else {
            copy_pages<Direction::Load>(steps, entry, list.pairs + begin, list.pairs + end);
          }
          const uint64_t pages = end - begin;
          report.pages += pages;
          report.bytes += pages * plan.page_bytes(c, transfer.direction);
          report.fragments += pages * plan.page_fragments(c, transfer.direction);
        });
    if (stream) finish_streaming();
  }

 private:
  static void compile(const std::vector<CopyBox>& boxes, const LayerEntry& layer,
                      Direction direction, bool stream, std::vector<Step>& steps) {
    steps.clear();
    for (const CopyBox& box : boxes) {
      Step step{};
      step.shape.fragment_bytes = box.fragment_bytes;
      const bool store = direction == Direction::Store;
      for (int axis = 0; axis < 2; ++axis) {
        step.shape.count[axis] = box.count[axis];
        step.shape.dst_stride[axis] = store ? box.host_stride[axis] : box.local_stride[axis];
        step.shape.src_stride[axis] = store ? box.local_stride[axis] : box.host_stride[axis];
      }
      step.dst_offset = store ? box.host_offset : box.local_offset;
      step.src_offset = store ? box.local_offset : box.host_offset;
      step.shape.ahead =
          step.shape.src_stride[0] == box.fragment_bytes ? kScatterAhead : kGatherAhead;
      const uint64_t dst_bits =
          step.dst_offset | (store ? layer.host_base | layer.host_row_stride | layer.host_page_stride
                                   : layer.local_base | layer.local_stride);
      step.copy = choose_box_copy(step.shape, dst_bits, stream);
      steps.push_back(step);
    }
  }

  template <Direction direction>
  static void copy_pages(const std::vector<Step>& steps, const LayerEntry& layer,
                         const BlockPair* pair, const BlockPair* end) {
    for (; pair != end; ++pair) {
      const BlockPair& next = pair + 1 != end ? pair[1] : pair[0];
      const uint64_t cache = cache_page(layer, *pair);
      const uint64_t canonical = canonical_page(layer, *pair);
      const uint64_t src = direction == Direction::Store ? cache : canonical;
      const uint64_t dst = direction == Direction::Store ? canonical : cache;
      const uint64_t next_page =
          direction == Direction::Store ? cache_page(layer, next) : canonical_page(layer, next);
      for (size_t s = 0; s < steps.size(); ++s) {
        const Step& step = steps[s];
        const uint64_t next_src = s + 1 < steps.size() ? src + steps[s + 1].src_offset
                                                       : next_page + steps[0].src_offset;
        step.copy(reinterpret_cast<uint8_t*>(dst + step.dst_offset),
                  reinterpret_cast<const uint8_t*>(src + step.src_offset), step.shape, next_src);
      }
    }
  }
};

}  // namespace

Mover* host_mover() {
  static auto* mover = new HostMover;
  return mover;
}

uint64_t host_streaming_bytes() { return streaming_threshold().load(); }

void set_host_streaming_bytes(uint64_t bytes) { streaming_threshold().store(bytes); }

}  // namespace vkvmap
