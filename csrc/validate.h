// A plan: a descriptor that has been proven harmless, and what transfers need to know about it.
//
// The constructor is the only way in. Afterwards, for either direction, every address that any
// (layer, block, tile) can touch lies inside one declared local range, every address that any
// (layer, row, page, tile) can touch lies inside one declared host range, each is a multiple of the
// tile's vector width, and no page is written twice by one tile table. Movers rely on this and
// check nothing. A plan never changes; threads share it freely.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "descriptor.h"

namespace vkvmap {

enum class Direction : uint8_t { Store = 0, Load = 1 };

constexpr const char* direction_name(Direction direction) {
  return direction == Direction::Store ? "store" : "load";
}

struct Range {
  uint64_t address;
  uint64_t bytes;
};

// Classes whose pages are stored by the same turn share one elected pair list in a transfer.
struct Election {
  uint32_t num_writers;
  uint32_t writer_index;
  bool operator==(const Election& other) const {
    return num_writers == other.num_writers && writer_index == other.writer_index;
  }
};

// A layer group as a transfer sees it: one list of (block, canonical page) for all its classes.
struct GroupInfo {
  uint64_t num_blocks = 0;  // the fewest of its classes: an id below it is good in all of them
  uint64_t num_pages = 0;   // rows * pages_per_row, likewise
  uint32_t pages_per_row = 0;
  std::vector<uint32_t> classes;
  std::vector<Election> elections;  // distinct, of the classes that store
};

class Mover;

class Plan {
 public:
  // `device` is where the local ranges are: "cpu", or what the caller calls its device. Throws
  // std::invalid_argument naming layer, value, rule and remedy.
  Plan(const void* descriptor, size_t size, std::vector<Range> local_ranges,
       std::vector<Range> host_ranges, std::vector<std::string> layer_names,
       std::string device = "cpu");
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(words_.data()); }
  size_t size() const { return header().total_bytes; }
  const DescriptorHeader& header() const {
    return *reinterpret_cast<const DescriptorHeader*>(words_.data());
  }
  const LayerClass* classes() const { return classes_; }
  const LayerEntry* layers() const { return layers_; }
  const Tile* tiles() const { return tiles_; }
  const std::vector<GroupInfo>& groups() const { return groups_; }
  const std::vector<Range>& local_ranges() const { return local_ranges_; }
  const std::vector<Range>& host_ranges() const { return host_ranges_; }
  const std::string& device() const { return device_; }

  uint32_t first_tile(const LayerClass& c, Direction d) const {
    return d == Direction::Store ? c.store_first_tile : c.load_first_tile;
  }
  uint32_t num_tiles(const LayerClass& c, Direction d) const {
    return d == Direction::Store ? c.store_num_tiles : c.load_num_tiles;
  }
  uint64_t page_bytes(const LayerClass& c, Direction d) const {
    return d == Direction::Store ? c.store_page_bytes : c.load_page_bytes;
  }
  uint64_t page_fragments(const LayerClass& c, Direction d) const {
    return d == Direction::Store ? c.store_page_fragments : c.load_page_fragments;
  }
  // Bytes from a page's base to behind the last byte that either tile table touches.
  uint64_t local_extent(uint32_t class_index) const { return local_extent_[class_index]; }
  uint64_t host_extent(uint32_t class_index) const { return host_extent_[class_index]; }

  uint32_t max_layer_id() const { return max_layer_id_; }
  std::string layer_name(uint32_t layer_id) const;

  // What somebody keeps per plan, for as long as the plan lives: made on first use, then shared.
  // `owner` is the address of something that lives for the whole process.
  std::shared_ptr<void> kept(const void* owner,
                             const std::function<std::shared_ptr<void>()>& make) const;
  // What a mover keeps (a device copy, a compiled program), by mover.prepare(plan).
  std::shared_ptr<void> mover_state(Mover& mover) const;

 private:
  void check_structure(size_t size);
  void check_tiles();
  void check_classes();
  void check_overlaps() const;

  std::vector<uint64_t> words_;  // the descriptor, aligned
  const LayerClass* classes_ = nullptr;
  const LayerEntry* layers_ = nullptr;
  const Tile* tiles_ = nullptr;
  std::vector<Range> local_ranges_;
  std::vector<Range> host_ranges_;
  std::vector<std::string> layer_names_;
  std::string device_;
  std::vector<GroupInfo> groups_;
  std::vector<uint64_t> local_extent_;
  std::vector<uint64_t> host_extent_;
  uint32_t max_layer_id_ = 0;
  mutable std::mutex kept_mutex_;
  mutable std::vector<std::pair<const void*, std::shared_ptr<void>>> kept_;
};

}  // namespace vkvmap
