#include "cuda_direct.h"

#include <algorithm>
#include <mutex>

#include "cuda_plan.h"
#include "intake.h"
#include "refuse.h"

namespace vkvmap {

namespace {

// Where the ids of one plan's direct transfers are checked; nothing is remembered of them, since
// nobody orders them.
struct Desk {
  std::mutex mutex;
  Intake intake;
};

void add_list(Transfer& transfer, uint32_t class_index, uint64_t num_pairs) {
  const LayerClass& c = transfer.plan->classes()[class_index];
  if (num_pairs == 0 || transfer.plan->page_bytes(c, transfer.direction) == 0) return;
  transfer.pairs.emplace_back(num_pairs, BlockPair{0, 0, 0});
  transfer.lists.push_back({class_index, c.first_layer, c.num_layers, num_pairs,
                            transfer.pairs.back().data(), transfer.num_units});
  transfer.num_units += c.num_layers * num_pairs;
}

}  // namespace

Transfer make_direct_transfer(std::shared_ptr<const Plan> plan, Direction direction,
                              const std::vector<GroupIds>& groups) {
  static const char owner = 0;
  const auto desk = std::static_pointer_cast<Desk>(
      plan->kept(&owner, [] { return std::make_shared<Desk>(); }));
  SubmitRequest request;
  request.plan = std::move(plan);
  request.direction = direction;
  request.groups = groups;
  std::lock_guard<std::mutex> lock(desk->mutex);
  return desk->intake.read(request);
}

GraphTransfer::GraphTransfer(std::shared_ptr<const Plan> plan, Direction direction,
                             const std::vector<Capacity>& capacities, const KernelTuning& tuning)
    : plan_(plan), direction_(direction) {
  const uint32_t num_groups = static_cast<uint32_t>(plan->groups().size());
  capacities_.resize(num_groups, 0);
  std::vector<bool> listed(num_groups, false);
  shape_.plan = plan;
  shape_.direction = direction;
  for (const Capacity& capacity : capacities) {
    if (capacity.group >= num_groups)
      refuse("group ", capacity.group, " does not exist; the plan has groups 0 to ", num_groups,
             " (exclusive)");
    if (listed[capacity.group])
      refuse("group ", capacity.group, " is listed twice; give one capacity per group");
    listed[capacity.group] = true;
    const GroupInfo& group = plan->groups()[capacity.group];
    // Destinations are distinct, so a replay cannot use more.
    const uint64_t most = direction == Direction::Load ? group.num_blocks : group.num_pages;
    capacities_[capacity.group] = std::min(capacity.pairs, most);
    for (const uint32_t c : group.classes) add_list(shape_, c, capacities_[capacity.group]);
  }
  shape_.state = plan->mover_state(kernel_mover());
  captured_ = std::make_unique<CapturedTransfer>(shape_, tuning);
  set_ids({});
}

void GraphTransfer::set_ids(const std::vector<GroupIds>& groups) {
  const Transfer wanted = make_direct_transfer(plan_, direction_, groups);
  // Everything is checked before anything is changed: a refused call leaves the ids of before.
  for (const WorkList& list : wanted.lists) {
    const uint32_t group = plan_->classes()[list.class_index].group;
    if (list.num_pairs > capacities_[group])
      refuse(direction_name(direction_), ": group ", group, ": ", list.num_pairs,
             " pairs, but the transfer was made for ", capacities_[group],
             "; make it with a larger capacity, or move fewer pages per replay");
  }
  for (size_t i = 0; i < shape_.lists.size(); ++i) {
    const auto found = std::find_if(
        wanted.lists.begin(), wanted.lists.end(),
        [&](const WorkList& list) { return list.class_index == shape_.lists[i].class_index; });
    if (found == wanted.lists.end())
      captured_->set_pairs(i, nullptr, 0);
    else
      captured_->set_pairs(i, found->pairs, found->num_pairs);
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
