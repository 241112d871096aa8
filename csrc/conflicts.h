// Who touches what: the order that overlapping transfers need, found at submission.
//
// Two transfers that touch one canonical page, or one cache block, are ordered by submission when
// either of them writes it; all others run as they come. A `Space` is a set of pages (or blocks) that
// the same ids name: all plans and layer groups of an engine whose layers lie on the same memory at
// the same strides share one, so that a page is known by its place and not by the plan that names it.
// Spaces that overlap without agreeing on what an id means are rivals: their transfers are ordered
// as a whole, which is always right and only costs overlap.
//
// Contract: one caller at a time. `seq` numbers ascend with submission and are never
// reused; a seq below `oldest_live` has finished. Cost per id: one cell of 32 bytes.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "validate.h"

namespace vkvmap {

// Submissions that a new one has to wait for; may repeat, may name finished ones.
class Dependencies {
 public:
  void add(uint64_t seq) {
    if (!seqs_.empty() && seqs_.back() == seq) return;
    seqs_.push_back(seq);
  }
  void clear() { seqs_.clear(); }
  // Ascending, each once, those below `seq`: a transfer that touches one cell from two of its groups
  // finds itself there and must not wait for that.
  const std::vector<uint64_t>& before(uint64_t seq);

 private:
  std::vector<uint64_t> seqs_;
};

// The pages of one layer, wherever (outer, inner) puts them: blocks use the outer axis alone.
struct Area {
  uint64_t base;
  uint64_t outer_stride;
  uint64_t outer_count;
  uint64_t inner_stride;
  uint64_t inner_count;
  uint64_t extent;

  uint64_t end() const {  // validate.cpp has proven that this does not wrap
    return base + (outer_count - 1) * outer_stride + (inner_count - 1) * inner_stride + extent;
  }
};

enum class Relation : uint8_t { Disjoint, SameIds, SamePlace, Clash };
Relation relation(const Area& a, const Area& b);

class Space {
 public:
  // For the walk over a long list: the cells of ids further down.
  void prefetch(uint64_t id) const {
    const uint64_t chunk = id / kChunk;
    if (chunk < chunks_.size() && chunks_[chunk]) {
      __builtin_prefetch(&chunks_[chunk][id % kChunk], 1);
    }
  }

  // False if `id` was already claimed with this token: a duplicate destination.
  bool claim(uint64_t id, uint64_t token) {
    Cell& cell = at(id);
    if (cell.stamp == token) return false;
    cell.stamp = token;
    return true;
  }

  void write(uint64_t id, uint64_t seq, uint64_t oldest_live, Dependencies& deps) {
    Cell& cell = at(id);
    if (cell.writer >= oldest_live) deps.add(cell.writer);
    if (cell.readers != 0) add_readers(cell, oldest_live, deps);
    cell.writer = seq;
    cell.readers = 0;
  }

  void read(uint64_t id, uint64_t seq, uint64_t oldest_live, Dependencies& deps) {
    Cell& cell = at(id);
    if (cell.writer >= oldest_live) deps.add(cell.writer);
    note_reader(cell, seq, oldest_live, deps);
  }

  // The use of the space as a whole, for its rivals.
  void use(uint64_t seq, bool writes, uint64_t oldest_live, Dependencies& deps);

 private:
  friend class Conflicts;
  static constexpr uint64_t kChunk = 4096;

  struct Cell {
    uint64_t stamp = 0;        // token of the last claim
    uint64_t writer = 0;       // last submission that writes it
    uint64_t first_reader = 0;  // bit j of readers: submission first_reader + j reads it
    uint64_t readers = 0;
  };
  struct Use {
    uint64_t seq;
    bool writes;
  };

  Cell& at(uint64_t id) {
    const uint64_t chunk = id / kChunk;
    if (chunk >= chunks_.size() || !chunks_[chunk]) grow(chunk);
    return chunks_[chunk][id % kChunk];
  }
  void grow(uint64_t chunk);
  static void add_readers(const Cell& cell, uint64_t oldest_live, Dependencies& deps);
  static void note_reader(Cell& cell, uint64_t seq, uint64_t oldest_live, Dependencies& deps) {
    if (cell.readers == 0 || cell.first_reader + 63 < oldest_live) {  // none that is still at work
      cell.first_reader = seq;
      cell.readers = 1;
    } else {
      add_reader(cell, seq, oldest_live, deps);
    }
  }
  static void add_reader(Cell& cell, uint64_t seq, uint64_t oldest_live, Dependencies& deps);

  std::vector<std::unique_ptr<Cell[]>> chunks_;
  std::vector<Area> areas_;
  uint64_t first_ = UINT64_MAX;  // bounding box of the areas
  uint64_t end_ = 0;
  std::vector<std::weak_ptr<Space>> rivals_;
  std::deque<Use> uses_;
};

struct GroupSpaces {
  std::shared_ptr<Space> blocks;
  std::shared_ptr<Space> pages;
  // The first group of the plan in which an id means the same bytes, directly or by way of others;
  // its own index if there is none.
  size_t block_place = 0;
  size_t page_place = 0;
};

class Conflicts {
 public:
  // By group; made on the first transfer of a plan, dropped after the plan.
  const std::vector<GroupSpaces>& spaces_of(const std::shared_ptr<const Plan>& plan);

 private:
  struct Record {
    std::weak_ptr<const Plan> plan;
    std::vector<GroupSpaces> groups;
  };

  std::shared_ptr<Space> join(std::vector<std::weak_ptr<Space>>& registry,
                              const std::vector<Area>& areas);
  void forget_dead_plans();

  std::unordered_map<const Plan*, Record> records_;
  std::vector<std::weak_ptr<Space>> block_spaces_;
  std::vector<std::weak_ptr<Space>> page_spaces_;
};

}  // namespace vkvmap
