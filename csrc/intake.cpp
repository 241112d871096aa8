#include "intake.h"

#include <algorithm>

#include "refuse.h"
#include "tile.h"

namespace vkvmap {
namespace {

// How far ahead of a walk over ids their cells are asked for.
constexpr size_t kCellsAhead = 12;

bool moves_some(const GroupInfo& group, uint64_t page) {
  return std::any_of(group.elections.begin(), group.elections.end(), [&](const Election& election) {
    return election.num_writers == 1 ||
           is_elected(page, election.num_writers, election.writer_index);
  });
}

template <typename Ids>
std::vector<BlockPair> elected(const Ids& ids, const Election& election, uint32_t pages_per_row) {
  std::vector<BlockPair> pairs;
  if (election.num_writers == 1) {
    pairs.resize(ids.size());
    BlockPair* pair = pairs.data();
    if (pages_per_row == 1) {  // the usual case, and no division
      for (const auto& id : ids) *pair++ = {id.block, static_cast<uint32_t>(id.page), 0};
    } else {
      for (const auto& id : ids) *pair++ = make_pair(id.block, id.page, pages_per_row);
    }
    return pairs;
  }
  pairs.reserve(ids.size() / election.num_writers + 1);
  for (const auto& id : ids) {
    if (is_elected(id.page, election.num_writers, election.writer_index)) {
      pairs.push_back(make_pair(id.block, id.page, pages_per_row));
    }
  }
  return pairs;
}

}  // namespace

Transfer Intake::read(const SubmitRequest& request) {
  check(request);
  Transfer transfer;
  transfer.plan = request.plan;
  transfer.direction = request.direction;
  transfer.expedited = request.expedited;
  build(request, transfer);
  return transfer;
}

void Intake::check(const SubmitRequest& request) {
  const Plan& plan = *request.plan;
  const std::vector<GroupSpaces>& spaces = conflicts_.spaces_of(request.plan);
  const bool load = request.direction == Direction::Load;
  const char* verb = direction_name(request.direction);
  if (request.layers.first > request.layers.end) {
    refuse(verb, ": layers [", request.layers.first, ", ", request.layers.end,
           ") is not a range; pass (first, end) with first <= end");
  }
  if (request.progress.words && request.progress.count <= plan.max_layer_id()) {
    refuse(verb, ": progress has ", request.progress.count, " words, but the plan's layers count to ",
           plan.max_layer_id(), "; pass one uint32 per layer of the layer table");
  }
  const size_t num_lists = request.groups.size();
  for (size_t g = 0; g < num_lists; ++g) {
    const uint32_t group = request.groups[g].group;
    if (group >= plan.groups().size()) {
      refuse(verb, ": group ", group, " does not exist; the plan has groups 0 to ",
             plan.groups().size(), " (exclusive)");
    }
    for (size_t other = 0; other < g; ++other) {
      if (request.groups[other].group == group) {
        refuse(verb, ": group ", group, " is listed twice; pass one list per group");
      }
    }
  }
  // Lists of one place are claimed with one token, so that no destination is in two of them, and one
  // after the other: an id is one cell for groups that lie beside each other, too, whose claims are
  // not to be mixed up with these.
  if (ids_.size() < num_lists) ids_.resize(num_lists);
  auto place = [&](size_t g) {
    const GroupSpaces& space = spaces[request.groups[g].group];
    return load ? space.block_place : space.page_place;
  };
  for (size_t first = 0; first < num_lists; ++first) {
    bool begun = false;
    for (size_t g = 0; g < first && !begun; ++g) begun = place(g) == place(first);
    if (begun) continue;
    const uint64_t token = next_token_++;
    for (size_t g = first; g < num_lists; ++g) {
      if (place(g) != place(first)) continue;
      const GroupIds& list = request.groups[g];
      if (plan.groups()[list.group].classes.empty()) {  // its layers live on another stage
        ids_[g].clear();
        continue;
      }
      const GroupSpaces& space = spaces[list.group];
      copy_ids(list, plan, load ? *space.blocks : *space.pages, request.direction, token, ids_[g]);
    }
  }
}

void Intake::copy_ids(const GroupIds& list, const Plan& plan, Space& destinations,
                      Direction direction, uint64_t token, Ids& ids) {
  const GroupInfo& info = plan.groups()[list.group];
  const bool load = direction == Direction::Load;
  const int64_t* targets = load ? list.blocks : list.pages;
  auto name = [&] {
    const LayerClass& c = plan.classes()[info.classes.front()];
    return text(direction_name(direction), ": group ", list.group, " (",
                plan.layer_name(plan.layers()[c.first_layer].layer_id), ", ...)");
  };
  ids.resize(list.count);
  for (size_t i = 0; i < list.count; ++i) {
    if (i + kCellsAhead < list.count) {
      destinations.prefetch(static_cast<uint64_t>(targets[i + kCellsAhead]));
    }
    const BlockId id{static_cast<uint64_t>(list.blocks[i]), static_cast<uint64_t>(list.pages[i])};
    if (id.block >= info.num_blocks) {
      refuse(name(), ", index ", i, ": block ", list.blocks[i], " is not in [0, ", info.num_blocks,
             "), the blocks of the cache; pass ids of the cache this plan is for");
    }
    if (id.page >= info.num_pages) {
      refuse(name(), ", index ", i, ": page ", list.pages[i], " is not in [0, ", info.num_pages,
             "), the canonical pages of the region; pass chunk * ", info.pages_per_row, " + page");
    }
    if (!destinations.claim(load ? id.block : id.page, token)) {
      refuse(name(), ", index ", i, ": ", load ? "block " : "page ", load ? id.block : id.page,
             " is a destination twice in one transfer; list each destination once");
    }
    ids[i] = id;
  }
}

void Intake::build(const SubmitRequest& request, Transfer& transfer) const {
  const Plan& plan = *request.plan;
  const bool store = request.direction == Direction::Store;
  const bool by_layer = request.progress.words != nullptr;
  const LayerRange& wanted = request.layers;
  for (size_t g = 0; g < request.groups.size(); ++g) {
    const GroupInfo& info = plan.groups()[request.groups[g].group];
    const Ids& ids = ids_[g];
    if (ids.empty()) continue;
    std::vector<std::pair<Election, size_t>> built;  // which of transfer.pairs
    for (uint32_t k : info.classes) {
      const LayerClass& c = plan.classes()[k];
      if (plan.page_bytes(c, request.direction) == 0) continue;
      const Election election = store ? Election{c.num_writers, c.writer_index} : Election{1, 0};
      auto found = std::find_if(built.begin(), built.end(),
                                [&](const auto& entry) { return entry.first == election; });
      if (found == built.end()) {
        transfer.pairs.push_back(elected(ids, election, info.pages_per_row));
        built.emplace_back(election, transfer.pairs.size() - 1);
        found = std::prev(built.end());
      }
      const std::vector<BlockPair>& pairs = transfer.pairs[found->second];
      if (pairs.empty()) continue;
      for (uint32_t l = c.first_layer; l < c.first_layer + c.num_layers; ++l) {
        const uint32_t layer_id = plan.layers()[l].layer_id;
        if (layer_id < wanted.first || layer_id >= wanted.end) continue;
        const bool extends = !by_layer && !transfer.lists.empty() &&
                             transfer.lists.back().class_index == k &&
                             transfer.lists.back().first_layer + transfer.lists.back().num_layers == l;
        if (extends) {
          ++transfer.lists.back().num_layers;
        } else {
          transfer.lists.push_back({k, l, 1, pairs.size(), pairs.data(), 0});
        }
      }
    }
  }
  if (by_layer) {  // whoever waits for layers waits for them in the model's order
    std::stable_sort(transfer.lists.begin(), transfer.lists.end(),
                     [&](const WorkList& a, const WorkList& b) {
                       return plan.layers()[a.first_layer].layer_id <
                              plan.layers()[b.first_layer].layer_id;
                     });
  }
  for (WorkList& list : transfer.lists) {
    const LayerClass& c = plan.classes()[list.class_index];
    const uint64_t units = list.num_layers * list.num_pairs;
    list.first_unit = transfer.num_units;
    transfer.num_units += units;
    transfer.bytes += units * plan.page_bytes(c, request.direction);
    transfer.fragments += units * plan.page_fragments(c, request.direction);
  }
}

const std::vector<uint64_t>& Intake::note(const SubmitRequest& request, const Transfer& transfer,
                                          uint64_t seq, uint64_t oldest_live) {
  deps_.clear();
  const size_t num_groups = transfer.num_units == 0 ? 0 : request.groups.size();
  const std::vector<GroupSpaces>& spaces = conflicts_.spaces_of(request.plan);
  const bool store = request.direction == Direction::Store;
  for (size_t g = 0; g < num_groups; ++g) {
    const Ids& ids = ids_[g];
    if (ids.empty()) continue;
    const GroupInfo& info = request.plan->groups()[request.groups[g].group];
    Space& blocks = *spaces[request.groups[g].group].blocks;
    Space& pages = *spaces[request.groups[g].group].pages;
    blocks.use(seq, !store, oldest_live, deps_);
    pages.use(seq, store, oldest_live, deps_);
    for (size_t i = 0; i < ids.size(); ++i) {
      const BlockId id = ids[i];
      if (i + kCellsAhead < ids.size()) {
        blocks.prefetch(ids[i + kCellsAhead].block);
        pages.prefetch(ids[i + kCellsAhead].page);
      }
      if (store) {
        if (!moves_some(info, id.page)) continue;
        blocks.read(id.block, seq, oldest_live, deps_);
        pages.write(id.page, seq, oldest_live, deps_);
      } else {
        pages.read(id.page, seq, oldest_live, deps_);
        blocks.write(id.block, seq, oldest_live, deps_);
      }
    }
  }
  return deps_.before(seq);
}

}  // namespace vkvmap
