#include "conflicts.h"

#include <algorithm>

namespace vkvmap {
namespace {

// Comparing all layers of two large plans is quadratic; beyond this many pairs, spaces whose
// bounding boxes meet are simply taken for rivals.
constexpr uint64_t kMaxComparisons = uint64_t{1} << 22;

struct GroupAreas {
  std::vector<Area> blocks;
  std::vector<Area> pages;
};

bool share_a_place(const std::vector<Area>& some, const std::vector<Area>& others) {
  if (some.size() * uint64_t{others.size()} > kMaxComparisons) return false;
  for (const Area& a : some) {
    for (const Area& b : others) {
      if (relation(a, b) == Relation::SamePlace) return true;
    }
  }
  return false;
}

void unite(std::vector<GroupSpaces>& groups, size_t GroupSpaces::* place, size_t g, size_t other) {
  const size_t kept = std::min(groups[g].*place, groups[other].*place);
  const size_t given_up = std::max(groups[g].*place, groups[other].*place);
  for (GroupSpaces& group : groups) {
    if (group.*place == given_up) group.*place = kept;
  }
}

}  // namespace

const std::vector<uint64_t>& Dependencies::before(uint64_t seq) {
  std::sort(seqs_.begin(), seqs_.end());
  seqs_.erase(std::unique(seqs_.begin(), seqs_.end()), seqs_.end());
  seqs_.erase(std::lower_bound(seqs_.begin(), seqs_.end(), seq), seqs_.end());
  return seqs_;
}

Relation relation(const Area& a, const Area& b) {
  if (a.base > b.base) return relation(b, a);
  if (a.end() <= b.base) return Relation::Disjoint;
  const bool same_axes = a.outer_stride == b.outer_stride && a.inner_stride == b.inner_stride &&
                         a.inner_count == b.inner_count;
  const uint64_t apart = b.base - a.base;
  if (same_axes && apart == 0) return Relation::SamePlace;
  if (a.outer_stride == b.outer_stride && a.outer_stride != 0) {
    // Layers side by side in the rows of one tensor (or section): compare places within a row.
    const uint64_t row = a.outer_stride;
    const uint64_t a_span = (a.inner_count - 1) * a.inner_stride + a.extent;
    const uint64_t b_span = (b.inner_count - 1) * b.inner_stride + b.extent;
    const uint64_t phase = apart % row;
    if (a_span <= row && b_span <= row && phase >= a_span && phase + b_span <= row) {
      return Relation::Disjoint;
    }
    const uint64_t step = a.inner_count > 1 ? a.inner_stride : row;
    if (same_axes && apart + b.extent <= step && a.extent <= step) return Relation::SameIds;
  }
  return Relation::Clash;
}

void Space::grow(uint64_t chunk) {
  if (chunk >= chunks_.size()) chunks_.resize(chunk + 1);
  chunks_[chunk] = std::make_unique<Cell[]>(kChunk);
}

void Space::add_readers(const Cell& cell, uint64_t oldest_live, Dependencies& deps) {
  for (uint64_t bits = cell.readers; bits != 0; bits &= bits - 1) {
    const uint64_t seq = cell.first_reader + static_cast<uint64_t>(__builtin_ctzll(bits));
    if (seq >= oldest_live) deps.add(seq);
  }
}

void Space::add_reader(Cell& cell, uint64_t seq, uint64_t oldest_live, Dependencies& deps) {
  uint64_t distance = seq - cell.first_reader;
  if (distance >= 64) {
    // The window of 64 submissions moves on. A reader that falls out of it while still at work is
    // waited for by this one instead, so that whoever waits for this one has waited for both.
    const uint64_t shift = distance - 63;
    const uint64_t fallen = shift >= 64 ? cell.readers : cell.readers & ((uint64_t{1} << shift) - 1);
    add_readers(Cell{0, 0, cell.first_reader, fallen}, oldest_live, deps);
    cell.readers = shift >= 64 ? 0 : cell.readers >> shift;
    cell.first_reader += shift;
    distance = 63;
  }
  cell.readers |= uint64_t{1} << distance;
}

void Space::use(uint64_t seq, bool writes, uint64_t oldest_live, Dependencies& deps) {
  while (!uses_.empty() && uses_.front().seq < oldest_live) uses_.pop_front();
  uses_.push_back({seq, writes});
  for (const std::weak_ptr<Space>& held : rivals_) {
    const std::shared_ptr<Space> rival = held.lock();
    if (!rival) continue;
    for (const Use& other : rival->uses_) {
      if (other.seq != seq && other.seq >= oldest_live && (writes || other.writes)) {
        deps.add(other.seq);
      }
    }
  }
}

const std::vector<GroupSpaces>& Conflicts::spaces_of(const std::shared_ptr<const Plan>& plan) {
  auto found = records_.find(plan.get());
  if (found != records_.end() && !found->second.plan.expired()) return found->second.groups;
  forget_dead_plans();

  Record record;
  record.plan = plan;
  std::vector<GroupAreas> areas(plan->groups().size());
  for (size_t g = 0; g < areas.size(); ++g) {
    auto& [blocks, pages] = areas[g];
    const GroupInfo& group = plan->groups()[g];
    for (uint32_t k : group.classes) {
      const LayerClass& c = plan->classes()[k];
      if (plan->local_extent(k) == 0) continue;  // moves nothing in either direction
      for (uint32_t l = c.first_layer; l < c.first_layer + c.num_layers; ++l) {
        const LayerEntry& e = plan->layers()[l];
        blocks.push_back(
            {e.local_base, e.local_stride, c.num_blocks, 0, 1, plan->local_extent(k)});
        pages.push_back({e.host_base, e.host_row_stride, c.num_rows, e.host_page_stride,
                         c.pages_per_row, plan->host_extent(k)});
      }
    }
    GroupSpaces spaces;
    spaces.blocks = join(block_spaces_, blocks);
    spaces.pages = join(page_spaces_, pages);
    record.groups.push_back(std::move(spaces));
  }
  for (size_t g = 0; g < areas.size(); ++g) {
    record.groups[g].block_place = record.groups[g].page_place = g;
    for (size_t other = 0; other < g; ++other) {
      const GroupSpaces& one = record.groups[g];
      const GroupSpaces& two = record.groups[other];
      if (one.blocks == two.blocks && share_a_place(areas[g].blocks, areas[other].blocks)) {
        unite(record.groups, &GroupSpaces::block_place, g, other);
      }
      if (one.pages == two.pages && share_a_place(areas[g].pages, areas[other].pages)) {
        unite(record.groups, &GroupSpaces::page_place, g, other);
      }
    }
  }
  return (records_[plan.get()] = std::move(record)).groups;
}

std::shared_ptr<Space> Conflicts::join(std::vector<std::weak_ptr<Space>>& registry,
                                       const std::vector<Area>& areas) {
  uint64_t first = UINT64_MAX;
  uint64_t end = 0;
  for (const Area& area : areas) {
    first = std::min(first, area.base);
    end = std::max(end, area.end());
  }
  std::shared_ptr<Space> home;
  std::vector<std::shared_ptr<Space>> rivals;
  for (const std::weak_ptr<Space>& held : registry) {
    const std::shared_ptr<Space> space = held.lock();
    if (!space || space->end_ <= first || end <= space->first_) continue;
    bool clash = areas.size() * uint64_t{space->areas_.size()} > kMaxComparisons;
    bool same = false;
    for (size_t i = 0; i < areas.size() && !clash; ++i) {
      for (size_t j = 0; j < space->areas_.size() && !clash; ++j) {
        switch (relation(areas[i], space->areas_[j])) {
          case Relation::Disjoint: break;
          case Relation::SameIds:
          case Relation::SamePlace: same = true; break;
          case Relation::Clash: clash = true; break;
        }
      }
    }
    if (clash || (home && same)) {
      rivals.push_back(space);
    } else if (same) {
      home = space;
    }
  }
  if (!home) {
    home = std::make_shared<Space>();
    registry.push_back(home);
  }
  for (const Area& area : areas) {
    const bool known = std::any_of(
        home->areas_.begin(), home->areas_.end(), [&](const Area& other) {
          return other.base == area.base && other.end() >= area.end() &&
                 relation(other, area) == Relation::SamePlace;
        });
    if (!known) home->areas_.push_back(area);
  }
  home->first_ = std::min(home->first_, first);
  home->end_ = std::max(home->end_, end);
  for (const std::shared_ptr<Space>& rival : rivals) {
    home->rivals_.push_back(rival);
    rival->rivals_.push_back(home);
  }
  return home;
}

void Conflicts::forget_dead_plans() {
  for (auto it = records_.begin(); it != records_.end();) {
    it = it->second.plan.expired() ? records_.erase(it) : std::next(it);
  }
  auto expired = [](const std::weak_ptr<Space>& space) { return space.expired(); };
  for (auto* registry : {&block_spaces_, &page_spaces_}) {
    registry->erase(std::remove_if(registry->begin(), registry->end(), expired), registry->end());
    for (const std::weak_ptr<Space>& held : *registry) {
      auto& rivals = held.lock()->rivals_;
      rivals.erase(std::remove_if(rivals.begin(), rivals.end(), expired), rivals.end());
    }
  }
}

}  // namespace vkvmap
