// The copy-engine mover: the plan's tiles merged into the longest runs both sides allow, handed to
// the DMA engines. It takes no multiprocessor, reaches memory that is not page-locked, and pays for
// every run (published: 0.5-0.63 us of CPU each), so it is for long runs.
//
// What must stay true: never part of a graph (batched copies cannot be captured); never on the legacy
// default stream (batched copies refuse it); copies within a batch have no order, which is fine since
// a validated transfer writes no byte twice; no copy leaves one allocation or registration for the
// next, which CUDA refuses.
#include <algorithm>
#include <array>
#include <mutex>

#include "cuda_mover.h"
#include "cuda_plan.h"
#include "cuda_transfer.h"
#include "pinning.h"
#include "tile.h"

namespace vkvmap {

namespace {

using cuda::check;
using cuda::CopyBox;

constexpr size_t kBatch = 4096;                       // descriptors per call
constexpr uint64_t kMaxPitch = (uint64_t{1} << 31) - 1;  // of a two-dimensional copy

// cuMemcpyBatchAsync as drivers have had it since CUDA 12.8. Asked for by that version, so that
// neither the toolkit this is built with nor a later signature matters.
struct Attributes {
  int source_order;  // 1: in stream order
  struct Location {
    int type, id;
  } source_hint, target_hint;
  unsigned flags;
};
using BatchedCopy = int (*)(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                            Attributes* attributes, size_t* attribute_starts,
                            size_t num_attributes, size_t* failed, cudaStream_t stream);

BatchedCopy batched_copy() {
  static const BatchedCopy found = []() -> BatchedCopy {
#if CUDART_VERSION >= 12050
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (cuda::succeeded(cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &entry, 12080,
                                                         cudaEnableDefault, &result)) &&
        result == cudaDriverEntryPointSuccess)
      return reinterpret_cast<BatchedCopy>(entry);
#endif
    return nullptr;
  }();
  return found;
}

struct CopyPlan {
  int device;
  bool pinned;
  std::vector<std::array<std::vector<CopyBox>, 2>> boxes;  // per class and direction
};

// Gathers contiguous copies, joining neighbours, and sends them on.
class Batch {
 public:
  // `starts`: addresses at which allocations and registrations begin, ascending.
  Batch(Direction direction, bool batched, cudaStream_t stream, std::vector<uint64_t> starts)
      : kind_(direction == Direction::Store ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice),
        store_(direction == Direction::Store),
        batched_(batched),
        stream_(stream),
        starts_(std::move(starts)) {}

  void add(uint64_t local, uint64_t host, uint64_t bytes) {
    for (uint64_t cut; (cut = first_start_within(host, bytes)) != 0;) {
      add_whole(local, host, cut);
      local += cut;
      host += cut;
      bytes -= cut;
    }
    add_whole(local, host, bytes);
  }

  void add_box(const CopyBox& box, uint64_t local_page, uint64_t host_page) {
    const uint64_t local = local_page + box.local_offset, host = host_page + box.host_offset;
    const uint64_t span = (box.rows - 1) * box.host_stride + box.bytes;
    if (box.rows == 1 || std::max(box.local_stride, box.host_stride) > kMaxPitch ||
        first_start_within(host, span) != 0) {
      for (uint64_t r = 0; r < box.rows; ++r)
        add(local + r * box.local_stride, host + r * box.host_stride, box.bytes);
      return;
    }
    void* target = reinterpret_cast<void*>(store_ ? host : local);
    const void* source = reinterpret_cast<const void*>(store_ ? local : host);
    check(cudaMemcpy2DAsync(target, store_ ? box.host_stride : box.local_stride, source,
                            store_ ? box.local_stride : box.host_stride, box.bytes, box.rows, kind_,
                            stream_),
          "cudaMemcpy2DAsync");
  }

  void flush() {
    if (sizes_.empty()) return;
    if (batched_) {
      Attributes attributes = {};
      attributes.source_order = 1;
      size_t start = 0, failed = 0;
      const int error = batched_copy()(targets_.data(), sources_.data(), sizes_.data(),
                                       sizes_.size(), &attributes, &start, 1, &failed, stream_);
      if (error != 0)
        throw cuda::CudaError("cuMemcpyBatchAsync failed with driver error " +
                                  std::to_string(error),
                              cudaErrorUnknown);
    } else {
      for (size_t i = 0; i < sizes_.size(); ++i)
        check(cudaMemcpyAsync(reinterpret_cast<void*>(targets_[i]),
                              reinterpret_cast<const void*>(sources_[i]), sizes_[i], kind_,
                              stream_),
              "cudaMemcpyAsync");
    }
    sources_.clear();
    targets_.clear();
    sizes_.clear();
  }

 private:
  bool is_start(uint64_t address) const {
    return std::binary_search(starts_.begin(), starts_.end(), address);
  }
  // How far from `address` the first of them is that lies behind it and before its `bytes` end; 0 if
  // there is none.
  uint64_t first_start_within(uint64_t address, uint64_t bytes) const {
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), address);
    return next != starts_.end() && *next - address < bytes ? *next - address : 0;
  }

  void add_whole(uint64_t local, uint64_t host, uint64_t bytes) {
    const uint64_t source = store_ ? local : host, target = store_ ? host : local;
    if (!sizes_.empty() && sources_.back() + sizes_.back() == source &&
        targets_.back() + sizes_.back() == target && !is_start(local) && !is_start(host)) {
      sizes_.back() += bytes;
      return;
    }
    if (sizes_.size() == kBatch) flush();
    sources_.push_back(source);
    targets_.push_back(target);
    sizes_.push_back(bytes);
  }

  const cudaMemcpyKind kind_;
  const bool store_, batched_;
  const cudaStream_t stream_;
  const std::vector<uint64_t> starts_;
  std::vector<uint64_t> sources_, targets_;
  std::vector<size_t> sizes_;
};

std::vector<uint64_t> memory_starts(const Plan& plan) {
  std::vector<uint64_t> starts;
  for (const Range& range : plan.local_ranges()) starts.push_back(range.address);
  for (const Range& range : plan.host_ranges()) {
    starts.push_back(range.address);
    const std::vector<uint64_t> pieces = piece_starts(range.address, range.address + range.bytes);
    starts.insert(starts.end(), pieces.begin(), pieces.end());
  }
  std::sort(starts.begin(), starts.end());
  return starts;
}

void copy_units(const Transfer& transfer, uint64_t first, uint64_t last, cudaStream_t stream) {
  const auto& copies = *static_cast<const CopyPlan*>(transfer.state.get());
  const bool batched = copies.pinned && batched_copy() != nullptr && stream != nullptr &&
                       stream != cudaStreamLegacy;
  Batch batch(transfer.direction, batched, stream, memory_starts(*transfer.plan));
  for (const WorkList& list : transfer.lists) {
    const uint64_t end = list.first_unit + list.num_layers * list.num_pairs;
    const auto& boxes =
        copies.boxes[list.class_index][static_cast<unsigned>(transfer.direction)];
    for (uint64_t unit = std::max(first, list.first_unit); unit < std::min(last, end); ++unit) {
      const uint64_t at = unit - list.first_unit;
      const LayerEntry& layer = transfer.plan->layers()[list.first_layer + at / list.num_pairs];
      const BlockPair& pair = list.pairs[at % list.num_pairs];
      for (const CopyBox& box : boxes)
        batch.add_box(box, cache_page(layer, pair), canonical_page(layer, pair));
    }
  }
  batch.flush();
}

}  // namespace

CopyEngineMover& copy_engine_mover() {
  static auto& mover = *new CopyEngineMover;
  return mover;
}

bool CopyEngineMover::has_batched_copies() { return batched_copy() != nullptr; }

std::shared_ptr<void> CopyEngineMover::prepare(const Plan& plan) {
  cuda::CaptureModeGuard relaxed;
  auto copies = std::make_shared<CopyPlan>();
  copies->device = cuda::device_of(plan);
  cuda::DeviceGuard guard(copies->device);
  copies->pinned = cuda::is_pinned(plan);
  for (uint32_t c = 0; c < plan.header().num_classes; ++c) {
    const LayerClass& layer_class = plan.classes()[c];
    std::array<std::vector<CopyBox>, 2> boxes;
    for (const Direction d : {Direction::Store, Direction::Load})
      boxes[static_cast<unsigned>(d)] = cuda::merge_tiles(
          plan.tiles() + plan.first_tile(layer_class, d), plan.num_tiles(layer_class, d));
    copies->boxes.push_back(std::move(boxes));
  }
  return copies;
}

std::shared_ptr<void> CopyEngineMover::admit(const Transfer& transfer, uintptr_t stream) {
  return cuda::record_caller(static_cast<const CopyPlan*>(transfer.state.get())->device, stream);
}

void CopyEngineMover::move(const Transfer& transfer, uint64_t first, uint64_t last,
                           MoveReport& report) {
  const int device = static_cast<const CopyPlan*>(transfer.state.get())->device;
  cuda::run_on_lane(transfer, first, last, device, report,
                    [&](cudaStream_t stream) { copy_units(transfer, first, last, stream); });
}

void CopyEngineMover::enqueue(const Transfer& transfer, uintptr_t stream) {
  const int device = static_cast<const CopyPlan*>(transfer.state.get())->device;
  cuda::run_on_caller(device, stream,
                      [&](cudaStream_t s) { copy_units(transfer, 0, transfer.num_units, s); });
}

}  // namespace vkvmap
