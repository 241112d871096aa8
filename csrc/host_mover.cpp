// The host mover: the plan executed by the engine's threads, where both sides are in host memory.
//
// It walks layer by layer, four pages side by side, box by box; each box is told where reading goes on,
// so that prefetches never run dry between pages. Whether stores bypass the caches is decided once per
// transfer, by its size: streaming is faster on data that no cache holds, and slower where source and
// destination would have stayed in one (benchmarks/host_mover.py --warm).
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "host_copy.h"
#include "host_mover.h"
#include "host_program.h"
#include "mover.h"
#include "refuse.h"
#include "tile.h"

namespace vkvmap {
namespace {

// A slice begins with empty prefetches and ends with a fence; a waiting expedited load gets
// its turn after at most this much.
constexpr uint64_t kSliceBytes = 2 * 1024 * 1024;
constexpr uint64_t kAhead = 1536;  // prefetch distance of each strand

// From here on a transfer is taken to find and leave its bytes in no cache. About where both ways took
// the same time (docs/performance.md): below, stores through the caches won; above, streaming. The size
// of the last cache is no guide: it is shared, and what the system reports may be the sum of several.
constexpr uint64_t kStreamingBytes = uint64_t{4} << 20;

std::atomic<uint64_t>& streaming_threshold() {
  static std::atomic<uint64_t> bytes{kStreamingBytes};
  return bytes;
}

// A box in one direction, ready to run.
struct Step {
  uint64_t src_offset;
  uint64_t dst_offset;
  BoxShape shape;
  BoxCopies copy;
};

class HostMover : public Mover {
 public:
  const char* name() const noexcept override { return "host"; }
  uint64_t slice_bytes() const noexcept override { return kSliceBytes; }

  std::shared_ptr<void> prepare(const Plan& plan) override {
    if (plan.device() != "cpu")
      refuse("the caches are on ", plan.device(),
             ", which the host mover cannot reach; use the kernel or the copy_engine mover");
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
      step.shape.ahead = kAhead;
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
    while (end - pair >= kStrands) {
      const bool more = end - pair >= 2 * kStrands;
      walk<direction, kStrands>(steps, layer, pair, more ? pair + kStrands : pair);
      pair += kStrands;
    }
    for (; pair != end; ++pair) {
      walk<direction, 1>(steps, layer, pair, pair + 1 != end ? pair + 1 : pair);
    }
  }

  // kPages pages, box by box; `next` are the pages after them, for the prefetches.
  template <Direction direction, int kPages>
  static void walk(const std::vector<Step>& steps, const LayerEntry& layer, const BlockPair* pair,
                   const BlockPair* next) {
    constexpr bool kStore = direction == Direction::Store;
    uint64_t src[kPages];
    uint64_t dst[kPages];
    uint64_t next_page[kPages];
    for (int p = 0; p < kPages; ++p) {
      const uint64_t cache = cache_page(layer, pair[p]);
      const uint64_t canonical = canonical_page(layer, pair[p]);
      src[p] = kStore ? cache : canonical;
      dst[p] = kStore ? canonical : cache;
      next_page[p] = kStore ? cache_page(layer, next[p]) : canonical_page(layer, next[p]);
    }
    for (size_t s = 0; s < steps.size(); ++s) {
      const Step& step = steps[s];
      uint8_t* to[kPages];
      const uint8_t* from[kPages];
      uintptr_t after[kPages];
      for (int p = 0; p < kPages; ++p) {
        to[p] = reinterpret_cast<uint8_t*>(dst[p] + step.dst_offset);
        from[p] = reinterpret_cast<const uint8_t*>(src[p] + step.src_offset);
        after[p] = s + 1 < steps.size() ? src[p] + steps[s + 1].src_offset
                                        : next_page[p] + steps[0].src_offset;
      }
      (kPages == 1 ? step.copy.one : step.copy.strands)(to, from, step.shape, after);
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
