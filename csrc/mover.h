// The seam between the engine, which knows jobs, and the movers, which carry bytes.
//
// The engine calls prepare() once per plan, admit() on the submitting thread, and move() on its own
// threads, possibly several at once on disjoint unit ranges of one transfer. Everything a mover sees
// has been validated: ids are in range, destinations are distinct, addresses are aligned. A mover
// that cannot carry a page says so in the report; it never throws for that, and never stops the rest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "descriptor.h"
#include "validate.h"

namespace vkvmap {

// A dense (layer, pair) grid of one class; the tiles of each page come from the plan.
struct WorkList {
  uint32_t class_index;
  uint32_t first_layer;  // absolute index into LayerEntry[]
  uint32_t num_layers;
  uint64_t num_pairs;
  const BlockPair* pairs;
  uint64_t first_unit;  // units of the lists before this one
};

// A validated store or load. A unit is one page: unit - first_unit = layer * num_pairs + pair, so
// layers finish one after the other and pairs of one layer are neighbours on the host.
struct Transfer {
  std::shared_ptr<const Plan> plan;
  Direction direction = Direction::Store;
  bool expedited = false;  // goes ahead of other work wherever the mover has a say
  std::vector<WorkList> lists;
  std::vector<std::vector<BlockPair>> pairs;  // owns what the lists point to
  uint64_t num_units = 0;
  uint64_t bytes = 0;
  uint64_t fragments = 0;
  std::shared_ptr<void> state;   // of prepare()
  std::shared_ptr<void> ticket;  // of admit()
};

// Calls use(list, layer, first_pair, last_pair) for each stretch of one layer's pairs among the
// units [first, last), in order; `layer` counts from the list's first_layer.
template <typename Use>
void for_each_stretch(const Transfer& transfer, uint64_t first, uint64_t last, Use use) {
  for (const WorkList& list : transfer.lists) {
    const uint64_t end = list.first_unit + list.num_layers * list.num_pairs;
    if (end <= first) continue;
    if (list.first_unit >= last) break;
    while (first < end && first < last) {
      const uint64_t unit = first - list.first_unit;
      const uint64_t layer = unit / list.num_pairs;
      const uint64_t pair = unit - layer * list.num_pairs;
      const uint64_t length = std::min(list.num_pairs - pair, last - first);
      use(list, static_cast<uint32_t>(layer), pair, pair + length);
      first += length;
    }
  }
}

struct PageFailure {
  uint32_t layer_id;
  uint64_t block;
  uint64_t page;  // canonical page id
  std::string why;
};

struct MoveReport {
  uint64_t bytes = 0;
  uint64_t fragments = 0;
  uint64_t pages = 0;
  std::vector<PageFailure> failures;
};

class Mover {
 public:
  virtual ~Mover() = default;
  virtual const char* name() const noexcept = 0;

  // About how many bytes one move() should carry; the default is the whole transfer.
  virtual uint64_t slice_bytes() const noexcept { return std::numeric_limits<uint64_t>::max(); }

  // True if move() mostly waits for a device: it then gets a thread per lane of its own, so that
  // waiting never holds up the threads that copy.
  virtual bool waits() const noexcept { return false; }

  // Once per plan, on the first submitting thread; kept by the plan. Throws if it cannot.
  virtual std::shared_ptr<void> prepare(const Plan& plan) { return (void)plan, nullptr; }

  // On the submitting thread, in submission order, with the caller's stream: the place to record
  // the event that the transfer has to wait for. Throws if it cannot; nothing is queued then.
  virtual std::shared_ptr<void> admit(const Transfer& transfer, uintptr_t stream) {
    return (void)transfer, (void)stream, nullptr;
  }

  // Carries units [first, last) of the transfer and returns when their bytes are in place.
  virtual void move(const Transfer& transfer, uint64_t first, uint64_t last,
                    MoveReport& report) = 0;
};

// All movers of this build by name ("host", and with CUDA "kernel" and "copy_engine"). They live as
// long as the process. Throws std::invalid_argument for a name that is not one of them.
Mover& find_mover(const std::string& name);
std::vector<std::string> mover_names();

}  // namespace vkvmap
