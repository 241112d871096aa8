// From a caller's request to a transfer: every id is checked and copied, writers are elected, and the
// submissions that it overlaps with are found.
//
// What a request costs depends on its block pairs alone: nothing here is per layer times pair, per
// tile or per byte. Contract: one caller at a time; read() before note().
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "conflicts.h"
#include "mover.h"

namespace vkvmap {

struct GroupIds {
  uint32_t group;
  const int64_t* blocks;
  const int64_t* pages;
  size_t count;
};

struct LayerRange {  // of layer ids, half open
  uint32_t first = 0;
  uint32_t end = UINT32_MAX;
};

// Where a transfer says, per layer id, that the last byte of that layer is in place.
struct ProgressWords {
  uint32_t* words = nullptr;  // one per layer id; null: not asked for
  uint64_t count = 0;
  uint32_t value = 1;  // written with release order
};

struct SubmitRequest {
  std::shared_ptr<const Plan> plan;
  Direction direction = Direction::Store;
  std::vector<GroupIds> groups;
  bool expedited = false;  // loads only: ahead of everything else
  LayerRange layers;
  ProgressWords progress;
  uint64_t tag = 0;  // the caller's, handed back
  Mover* mover = nullptr;
  uintptr_t stream = 0;  // what the mover's admit() gets
  bool report = true;    // list it in finished()
  bool notify = false;   // list it in wait_notified()
  std::shared_ptr<void> keep;
};

class Intake {
 public:
  // The transfer that the request asks for. Throws std::invalid_argument naming list, index, value
  // and rule; nothing is remembered of such a request. The caller's arrays are read once: what is
  // checked here is what is moved later.
  Transfer read(const SubmitRequest& request);

  // Remembers who touches what as submission `seq`, for the request that was read last and what
  // became of it. Returns the earlier submissions that it has to wait for: ascending, without those
  // below `oldest_live`, which have finished.
  const std::vector<uint64_t>& note(const SubmitRequest& request, const Transfer& transfer,
                                    uint64_t seq, uint64_t oldest_live);

 private:
  struct BlockId {
    uint64_t block;
    uint64_t page;
  };
  using Ids = std::vector<BlockId>;

  void check(const SubmitRequest& request);
  static void copy_ids(const GroupIds& list, const Plan& plan, Space& destinations,
                       Direction direction, uint64_t token, Ids& ids);
  void build(const SubmitRequest& request, Transfer& transfer) const;

  Conflicts conflicts_;
  Dependencies deps_;
  uint64_t next_token_ = 1;
  std::vector<Ids> ids_;  // by list of the request
};

}  // namespace vkvmap
