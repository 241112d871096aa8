#include "cuda_direct.h"

#include <algorithm>
#include <stdexcept>

#include "cuda_plan.h"
#include "tile.h"

namespace vkvmap {

namespace {

std::string where(Direction direction, uint32_t group, size_t index) {
  return std::string(direction_name(direction)) + ": group " + std::to_string(group) + ", index " +
         std::to_string(index) + ": ";
}

void check_ids(const Plan& plan, Direction direction, const DirectIds& ids) {
  if (ids.group >= plan.groups().size())
    throw std::invalid_argument(std::string(direction_name(direction)) + ": group " +
                                std::to_string(ids.group) + " does not exist; the plan has " +
                                std::to_string(plan.groups().size()) + " groups");
  const GroupInfo& info = plan.groups()[ids.group];
  std::vector<int64_t> targets(ids.count);
  for (size_t i = 0; i < ids.count; ++i) {
    if (static_cast<uint64_t>(ids.blocks[i]) >= info.num_blocks)
      throw std::invalid_argument(where(direction, ids.group, i) + "block " +
                                  std::to_string(ids.blocks[i]) + " is not in [0, " +
                                  std::to_string(info.num_blocks) + "), the blocks of the cache");
    if (static_cast<uint64_t>(ids.pages[i]) >= info.num_pages)
      throw std::invalid_argument(where(direction, ids.group, i) + "page " +
                                  std::to_string(ids.pages[i]) + " is not in [0, " +
                                  std::to_string(info.num_pages) +
                                  "), the canonical pages of the region");
    targets[i] = direction == Direction::Load ? ids.blocks[i] : ids.pages[i];
  }
  std::sort(targets.begin(), targets.end());
  const auto twice = std::adjacent_find(targets.begin(), targets.end());
  if (twice != targets.end())
    throw std::invalid_argument(std::string(direction_name(direction)) + ": group " +
                                std::to_string(ids.group) + ": " +
                                (direction == Direction::Load ? "block " : "page ") +
                                std::to_string(*twice) + " is a destination twice");
}

std::vector<BlockPair> elected(const GroupInfo& info, const LayerClass& c, Direction direction,
                               const DirectIds& ids) {
  std::vector<BlockPair> pairs;
  for (size_t i = 0; i < ids.count; ++i) {
    const uint64_t page = static_cast<uint64_t>(ids.pages[i]);
    if (direction == Direction::Store && !is_elected(page, c.num_writers, c.writer_index)) continue;
    pairs.push_back(make_pair(static_cast<uint64_t>(ids.blocks[i]), page, info.pages_per_row));
  }
  return pairs;
}

void add_list(Transfer& transfer, uint32_t class_index, std::vector<BlockPair> pairs) {
  const LayerClass& c = transfer.plan->classes()[class_index];
  if (pairs.empty() || transfer.plan->num_tiles(c, transfer.direction) == 0) return;
  transfer.pairs.push_back(std::move(pairs));
  const std::vector<BlockPair>& own = transfer.pairs.back();
  const uint64_t units = c.num_layers * own.size();
  transfer.lists.push_back({class_index, c.first_layer, c.num_layers, own.size(), own.data(),
                            transfer.num_units});
  transfer.num_units += units;
  transfer.bytes += units * transfer.plan->page_bytes(c, transfer.direction);
  transfer.fragments += units * transfer.plan->page_fragments(c, transfer.direction);
}

}  // namespace

Transfer make_direct_transfer(std::shared_ptr<const Plan> plan, Direction direction,
                              const std::vector<DirectIds>& groups) {
  Transfer transfer;
  transfer.plan = std::move(plan);
  transfer.direction = direction;
  for (const DirectIds& ids : groups) {
    check_ids(*transfer.plan, direction, ids);
    const GroupInfo& info = transfer.plan->groups()[ids.group];
    for (const uint32_t c : info.classes)
      add_list(transfer, c, elected(info, transfer.plan->classes()[c], direction, ids));
  }
  return transfer;
}

GraphTransfer::GraphTransfer(std::shared_ptr<const Plan> plan, Direction direction,
                             const std::vector<Capacity>& capacities, const KernelTuning& tuning)
    : plan_(plan), direction_(direction) {
  shape_.plan = plan;
  shape_.direction = direction;
  for (const Capacity& capacity : capacities) {
    if (capacity.group >= plan->groups().size())
      throw std::invalid_argument("group " + std::to_string(capacity.group) +
                                  " does not exist; the plan has " +
                                  std::to_string(plan->groups().size()) + " groups");
    for (const uint32_t c : plan->groups()[capacity.group].classes)
      add_list(shape_, c, std::vector<BlockPair>(capacity.pairs, BlockPair{0, 0, 0}));
  }
  shape_.state = plan->mover_state(kernel_mover());
  captured_ = std::make_unique<CapturedTransfer>(shape_, tuning);
  set_ids({});
}

void GraphTransfer::set_ids(const std::vector<DirectIds>& groups) {
  for (const DirectIds& ids : groups) check_ids(*plan_, direction_, ids);
  for (size_t list = 0; list < shape_.lists.size(); ++list) {
    const LayerClass& c = plan_->classes()[shape_.lists[list].class_index];
    std::vector<BlockPair> pairs;
    for (const DirectIds& ids : groups)
      if (ids.group == c.group) pairs = elected(plan_->groups()[c.group], c, direction_, ids);
    captured_->set_pairs(list, pairs.data(), pairs.size());
  }
}

int cache_device(const Plan& plan) {
  for (const Range& range : plan.local_ranges()) {
    cudaPointerAttributes attributes = {};
    cuda::check(
        cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(range.address)),
        "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeUnregistered || attributes.type == cudaMemoryTypeHost)
      return -1;
  }
  return cuda::device_of(plan);
}

uint64_t mean_run_bytes(const Plan& plan, Direction direction) {
  // In doubles: the answer picks a size class, and page sizes are unlimited.
  double bytes = 0, weighted = 0;
  for (uint32_t k = 0; k < plan.header().num_classes; ++k) {
    const LayerClass& c = plan.classes()[k];
    for (const cuda::CopyBox& box : cuda::merge_tiles(plan.tiles() + plan.first_tile(c, direction),
                                                      plan.num_tiles(c, direction))) {
      const double moved = static_cast<double>(c.num_layers) * box.bytes * box.rows;
      bytes += moved;
      weighted += moved * box.bytes;
    }
  }
  return bytes == 0 ? 0 : static_cast<uint64_t>(weighted / bytes);
}

}  // namespace vkvmap
