// Why a descriptor is checked here although vkvmap packed it: movers run without any check, on
// addresses, so this file is what stands between a bug (or a hostile byte) and someone's memory.
// All sums and products are checked, memory is bounded by the size of the input, and a refusal names
// layer, value, rule and remedy.
#include "validate.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "checked.h"
#include "fastdiv.h"
#include "mover.h"
#include "refuse.h"

namespace vkvmap {
namespace {

constexpr uint32_t kMaxGroups = 4096;
constexpr uint32_t kMaxLayerId = 1u << 20;
constexpr uint64_t kMaxBlocks = uint64_t{1} << 32;
constexpr uint64_t kMaxPages = uint64_t{1} << 36;
constexpr const char* kRepack = "pack the descriptor with the vkvmap of this very build";

struct Hex {
  uint64_t value;
};
std::ostream& operator<<(std::ostream& out, Hex hex) {
  const auto flags = out.flags();
  out << "0x" << std::hex << hex.value;
  out.flags(flags);
  return out;
}

// Overlapping ranges are one stretch of memory (tensors that share a storage are declared once
// each); ranges that merely touch stay apart, since they may be different allocations.
std::vector<Range> normalized(std::vector<Range> ranges, const char* side) {
  for (const Range& range : ranges) {
    if (!Checked(range.address).add(range.bytes).ok()) {
      refuse(side, " range at ", Hex{range.address}, " of ", range.bytes,
             " bytes: a range must end inside the 64-bit address space; pass (address, bytes)");
    }
  }
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(),
                              [](const Range& range) { return range.bytes == 0; }),
               ranges.end());
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.address < b.address; });
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (!merged.empty() && range.address < merged.back().address + merged.back().bytes) {
      const uint64_t end = std::max(merged.back().address + merged.back().bytes,
                                    range.address + range.bytes);
      merged.back().bytes = end - merged.back().address;
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

bool inside_one(const std::vector<Range>& ranges, uint64_t first, uint64_t end) {
  auto after = std::upper_bound(ranges.begin(), ranges.end(), first,
                                [](uint64_t address, const Range& r) { return address < r.address; });
  if (after == ranges.begin()) return false;
  const Range& range = *std::prev(after);
  return end <= range.address + range.bytes;
}

// What a tile table needs of the pages it is applied to.
struct TableNeeds {
  uint64_t bytes = 0;
  uint64_t fragments = 0;
  uint64_t local_extent = 0;
  uint64_t host_extent = 0;
  uint32_t width_log2 = 0;
};

using TableKey = std::pair<uint32_t, uint32_t>;  // first tile, number of tiles
using Tables = std::map<TableKey, TableNeeds>;

uint64_t box_extent(uint64_t offset, const uint64_t stride[2], const Tile& tile, uint32_t index,
                    const char* side) {
  Checked end(offset);
  end.add_product(tile.count[0] - 1u, stride[0])
      .add_product(tile.count[1] - 1u, stride[1])
      .add(tile.fragment_bytes);
  if (!end.ok()) {
    refuse("tile ", index, ": its ", side, " offsets wrap around 64 bits (offset ", offset,
           ", strides ", stride[0], ", ", stride[1], ", counts ", tile.count[0], ", ",
           tile.count[1], "); ", kRepack);
  }
  return end.value();
}

void check_tile(const Tile& tile, uint32_t index) {
  auto bad = [&](const char* field, uint64_t value, const char* rule) {
    refuse("tile ", index, ": ", field, " is ", value, ", but ", rule, "; ", kRepack);
  };
  if (tile.fragment_bytes == 0 || tile.fragment_bytes > kTileBytes) {
    bad("fragment_bytes", tile.fragment_bytes, "a fragment has 1 to 4096 bytes");
  }
  if (tile.count[0] == 0 || tile.count[0] > kTileBytes) {
    bad("count[0]", tile.count[0], "a tile has 1 to 4096 fragments per axis");
  }
  if (tile.count[1] == 0 || tile.count[1] > kTileBytes) {
    bad("count[1]", tile.count[1], "a tile has 1 to 4096 fragments per axis");
  }
  const uint64_t bytes = uint64_t{tile.fragment_bytes} * tile.count[0] * tile.count[1];
  if (bytes > kTileBytes || bytes != tile.bytes) {
    bad("bytes", tile.bytes, "it must be fragment_bytes * count[0] * count[1] and at most 4096");
  }
  if (tile.reserved0 != 0) bad("reserved0", tile.reserved0, "reserved fields are zero");
  if (tile.reserved1 != 0) bad("reserved1", tile.reserved1, "reserved fields are zero");
  if (tile.width_log2 > 4) bad("width_log2", tile.width_log2, "vectors have 1 to 16 bytes");
  const uint64_t mask = (uint64_t{1} << tile.width_log2) - 1;
  if (tile.fragment_bytes & mask) {
    bad("fragment_bytes", tile.fragment_bytes, "the vector width must divide it");
  }
  if (tile.local_offset & mask) {
    bad("local_offset", tile.local_offset, "the vector width must divide it");
  }
  if (tile.host_offset & mask) {
    bad("host_offset", tile.host_offset, "the vector width must divide it");
  }
  for (int axis = 0; axis < 2; ++axis) {
    if (tile.count[axis] == 1) continue;  // a stride that is never taken
    if (tile.local_stride[axis] & mask) {
      bad("local_stride", tile.local_stride[axis], "the vector width must divide it");
    }
    if (tile.host_stride[axis] & mask) {
      bad("host_stride", tile.host_stride[axis], "the vector width must divide it");
    }
  }
  if (tile.units_div != fastdiv_multiplier(tile.fragment_bytes >> tile.width_log2)) {
    bad("units_div", tile.units_div, "it must be the multiplier of fragment_bytes >> width_log2");
  }
  if (tile.count_div != fastdiv_multiplier(tile.count[0])) {
    bad("count_div", tile.count_div, "it must be the multiplier of count[0]");
  }
}

// Tables are shared whole or not at all. This keeps all checks linear in the descriptor's size.
Tables collect_tables(const LayerClass* classes, uint32_t num_classes, uint32_t num_tiles) {
  Tables tables;
  for (uint32_t k = 0; k < num_classes; ++k) {
    for (const TableKey& key : {TableKey{classes[k].store_first_tile, classes[k].store_num_tiles},
                                TableKey{classes[k].load_first_tile, classes[k].load_num_tiles}}) {
      if (key.second == 0) continue;
      if (uint64_t{key.first} + key.second > num_tiles) {
        refuse("class ", k, ": its tiles are [", key.first, ", ", uint64_t{key.first} + key.second,
               "), but the descriptor has ", num_tiles, "; ", kRepack);
      }
      tables.emplace(key, TableNeeds{});
    }
  }
  const TableKey* previous = nullptr;
  for (const auto& entry : tables) {
    if (previous && previous->first + previous->second > entry.first.first) {
      refuse("tile tables [", previous->first, ", ", previous->first + previous->second, ") and [",
             entry.first.first, ", ", entry.first.first + entry.first.second,
             ") share some tiles but not all; ", kRepack);
    }
    previous = &entry.first;
  }
  return tables;
}

struct Interval {
  uint64_t first;
  uint64_t end;
};

// The bytes that a table writes must be written once. Python has certified that; this repeats it
// where it costs little, and leaves out tables whose fragments outnumber the budget.
void check_written_once(const Tile* tiles, TableKey key, bool to_host, uint64_t budget) {
  std::vector<Interval> intervals;
  for (uint32_t t = key.first; t < key.first + key.second; ++t) {
    const Tile& tile = tiles[t];
    const uint64_t* stride = to_host ? tile.host_stride : tile.local_stride;
    const uint64_t offset = to_host ? tile.host_offset : tile.local_offset;
    uint64_t length = tile.fragment_bytes;
    uint32_t inner = tile.count[0];
    if (inner > 1 && stride[0] == length) {
      length *= inner;
      inner = 1;
    }
    if (intervals.size() + uint64_t{inner} * tile.count[1] > budget) return;
    for (uint32_t j = 0; j < tile.count[1]; ++j) {
      for (uint32_t i = 0; i < inner; ++i) {
        const uint64_t first = offset + i * stride[0] + j * stride[1];
        intervals.push_back({first, first + length});
      }
    }
  }
  auto before = [](const Interval& a, const Interval& b) { return a.first < b.first; };
  if (!std::is_sorted(intervals.begin(), intervals.end(), before)) {
    std::sort(intervals.begin(), intervals.end(), before);
  }
  for (size_t i = 1; i < intervals.size(); ++i) {
    if (intervals[i].first < intervals[i - 1].end) {
      refuse("tiles [", key.first, ", ", key.first + key.second, "): byte ", intervals[i].first,
             " of the ", to_host ? "canonical" : "cache",
             " page is written twice; a transfer writes each byte once: certify the mapping");
    }
  }
}

}  // namespace

Plan::Plan(const void* descriptor, size_t size, std::vector<Range> local_ranges,
           std::vector<Range> host_ranges, std::vector<std::string> layer_names,
           std::string device)
    : local_ranges_(normalized(std::move(local_ranges), "local")),
      host_ranges_(normalized(std::move(host_ranges), "host")),
      layer_names_(std::move(layer_names)),
      device_(std::move(device)) {
  words_.resize((std::max(size, sizeof(DescriptorHeader)) + 7) / 8);
  if (size != 0) std::memcpy(words_.data(), descriptor, size);
  check_structure(size);
  check_tiles();
  check_classes();
  check_overlaps();
}

std::string Plan::layer_name(uint32_t layer_id) const {
  if (layer_id < layer_names_.size()) return layer_names_[layer_id];
  return "layer " + std::to_string(layer_id);
}

std::shared_ptr<void> Plan::kept(const void* owner,
                                 const std::function<std::shared_ptr<void>()>& make) const {
  std::lock_guard<std::mutex> lock(kept_mutex_);
  for (const auto& [known, state] : kept_) {
    if (known == owner) return state;
  }
  kept_.emplace_back(owner, make());
  return kept_.back().second;
}

std::shared_ptr<void> Plan::mover_state(Mover& mover) const {
  return kept(&mover, [&] { return mover.prepare(*this); });
}

void Plan::check_structure(size_t size) {
  if (size < sizeof(DescriptorHeader)) {
    refuse("descriptor of ", size, " bytes: it is shorter than its own header of ",
           sizeof(DescriptorHeader), "; ", kRepack);
  }
  const DescriptorHeader& h = header();
  if (h.magic != kDescriptorMagic) {
    refuse("descriptor: its magic is ", Hex{h.magic}, ", not ", Hex{kDescriptorMagic}, "; ",
           kRepack);
  }
  if (h.version != kDescriptorVersion) {
    refuse("descriptor: its version is ", h.version, ", this build reads ", kDescriptorVersion,
           "; ", kRepack);
  }
  Checked total(sizeof(DescriptorHeader));
  total.add_product(h.num_classes, sizeof(LayerClass))
      .add_product(h.num_layers, sizeof(LayerEntry))
      .add_product(h.num_tiles, sizeof(Tile));
  if (!total.ok() || total.value() != size || h.total_bytes != size) {
    refuse("descriptor of ", size, " bytes: its header says ", h.total_bytes, " and counts ",
           h.num_classes, " classes, ", h.num_layers, " layers and ", h.num_tiles,
           " tiles, which take ", total.value(), "; ", kRepack);
  }
  if (h.num_groups > kMaxGroups) {
    refuse("descriptor: it has ", h.num_groups, " groups, the most is ", kMaxGroups, "; ", kRepack);
  }
  classes_ = reinterpret_cast<const LayerClass*>(bytes() + sizeof(DescriptorHeader));
  layers_ = reinterpret_cast<const LayerEntry*>(classes_ + h.num_classes);
  tiles_ = reinterpret_cast<const Tile*>(layers_ + h.num_layers);
}

void Plan::check_tiles() {
  for (uint32_t t = 0; t < header().num_tiles; ++t) check_tile(tiles_[t], t);
}

void Plan::check_classes() {
  const DescriptorHeader& h = header();
  Tables tables = collect_tables(classes_, h.num_classes, h.num_tiles);
  for (auto& [key, needs] : tables) {
    for (uint32_t t = key.first; t < key.first + key.second; ++t) {
      const Tile& tile = tiles_[t];
      needs.bytes += tile.bytes;
      needs.fragments += uint32_t{tile.count[0]} * tile.count[1];
      needs.local_extent = std::max(
          needs.local_extent, box_extent(tile.local_offset, tile.local_stride, tile, t, "local"));
      needs.host_extent = std::max(
          needs.host_extent, box_extent(tile.host_offset, tile.host_stride, tile, t, "host"));
      needs.width_log2 = std::max<uint32_t>(needs.width_log2, tile.width_log2);
    }
  }
  auto needs_of = [&](uint32_t first, uint32_t count) {
    return count == 0 ? TableNeeds{} : tables.at({first, count});
  };

  groups_.resize(h.num_groups);
  local_extent_.resize(h.num_classes);
  host_extent_.resize(h.num_classes);
  std::set<std::pair<uint32_t, std::pair<uint32_t, uint32_t>>> elections;  // seen, by group
  uint64_t next_layer = 0;
  for (uint32_t k = 0; k < h.num_classes; ++k) {
    const LayerClass& c = classes_[k];
    auto bad = [&](const char* field, uint64_t value, const char* rule) {
      refuse("class ", k, ": ", field, " is ", value, ", but ", rule, "; ", kRepack);
    };
    if (c.first_layer != next_layer) {
      bad("first_layer", c.first_layer, "classes hold all layers, one class after the other");
    }
    if (c.num_layers == 0) bad("num_layers", c.num_layers, "a class has at least one layer");
    next_layer += c.num_layers;
    if (next_layer > h.num_layers) bad("num_layers", c.num_layers, "that many are not left");
    if (c.group >= h.num_groups) bad("group", c.group, "it must be below the number of groups");
    if (c.num_writers == 0) bad("num_writers", c.num_writers, "somebody has to write");
    if (c.writer_index >= c.num_writers) {
      bad("writer_index", c.writer_index, "it must be below num_writers");
    }
    if (c.num_blocks == 0 || c.num_blocks > kMaxBlocks) {
      bad("num_blocks", c.num_blocks, "a cache has 1 to 2^32 blocks");
    }
    if (c.pages_per_row == 0) bad("pages_per_row", c.pages_per_row, "a chunk has pages");
    if (c.num_rows == 0 || c.num_rows > kMaxPages / c.pages_per_row ||
        c.num_rows > (uint64_t{1} << 32)) {
      bad("num_rows", c.num_rows, "a region has 1 to 2^32 rows and at most 2^36 pages");
    }
    const TableNeeds store = needs_of(c.store_first_tile, c.store_num_tiles);
    const TableNeeds load = needs_of(c.load_first_tile, c.load_num_tiles);
    if (c.store_page_bytes != store.bytes || c.store_page_fragments != store.fragments) {
      bad("store_page_bytes", c.store_page_bytes, "it must be what the store tiles add up to");
    }
    if (c.load_page_bytes != load.bytes || c.load_page_fragments != load.fragments) {
      bad("load_page_bytes", c.load_page_bytes, "it must be what the load tiles add up to");
    }
    local_extent_[k] = std::max(store.local_extent, load.local_extent);
    host_extent_[k] = std::max(store.host_extent, load.host_extent);
    const uint64_t mask =
        (uint64_t{1} << std::max(store.width_log2, load.width_log2)) - 1;

    for (uint32_t l = c.first_layer; l < c.first_layer + c.num_layers; ++l) {
      const LayerEntry& e = layers_[l];
      if (e.layer_id >= (layer_names_.empty() ? kMaxLayerId : layer_names_.size())) {
        refuse("layer entry ", l, ": layer_id is ", e.layer_id, ", but the layer table has ",
               layer_names_.size(), " layers; ", kRepack);
      }
      max_layer_id_ = std::max(max_layer_id_, e.layer_id);
      auto wrong = [&](const char* field, uint64_t value, const auto&... rule) {
        refuse(layer_name(e.layer_id), ": ", field, " is ", value, ", but ", rule...);
      };
      if (e.reserved != 0) wrong("reserved", e.reserved, "reserved fields are zero; ", kRepack);
      if (e.local_base & mask) {
        wrong("local_base", e.local_base, "the vector width ", mask + 1,
              " of its tiles must divide it; pack with narrower tiles");
      }
      if (e.host_base & mask) {
        wrong("host_base", e.host_base, "the vector width ", mask + 1,
              " of its tiles must divide it; pack with narrower tiles");
      }
      auto check_stride = [&](const char* field, uint64_t stride, uint64_t count) {
        if (count == 1) return;
        if (stride == 0) wrong(field, stride, count, " pages would lie on one place; ", kRepack);
        if (stride & mask) {
          wrong(field, stride, "the vector width ", mask + 1,
                " of its tiles must divide it; pack with narrower tiles");
        }
      };
      check_stride("local_stride", e.local_stride, c.num_blocks);
      check_stride("host_row_stride", e.host_row_stride, c.num_rows);
      check_stride("host_page_stride", e.host_page_stride, c.pages_per_row);

      Checked local_end(e.local_base);
      local_end.add_product(c.num_blocks - 1, e.local_stride).add(local_extent_[k]);
      if (local_extent_[k] != 0 &&
          (!local_end.ok() || !inside_one(local_ranges_, e.local_base, local_end.value()))) {
        wrong("num_blocks", c.num_blocks, "the pages of blocks 0 to ", c.num_blocks - 1,
              ", from address ", Hex{e.local_base}, " at stride ", e.local_stride,
              ", must lie inside one declared cache tensor; declare the tensor that this plan is "
              "for, or fewer blocks");
      }
      Checked host_end(e.host_base);
      host_end.add_product(c.num_rows - 1, e.host_row_stride)
          .add_product(c.pages_per_row - 1u, e.host_page_stride)
          .add(host_extent_[k]);
      if (host_extent_[k] != 0 &&
          (!host_end.ok() || !inside_one(host_ranges_, e.host_base, host_end.value()))) {
        wrong("num_rows", c.num_rows, "rows 0 to ", c.num_rows - 1, " of ", c.pages_per_row,
              " pages, from address ", Hex{e.host_base}, " at stride ", e.host_row_stride,
              ", must lie inside one declared region section; declare a larger region, or fewer "
              "rows");
      }
    }

    GroupInfo& group = groups_[c.group];
    if (group.classes.empty()) {
      group.num_blocks = c.num_blocks;
      group.num_pages = c.num_rows * c.pages_per_row;
      group.pages_per_row = c.pages_per_row;
    } else if (group.pages_per_row != c.pages_per_row) {
      bad("pages_per_row", c.pages_per_row, "all classes of a group have the same");
    }
    group.num_blocks = std::min(group.num_blocks, c.num_blocks);
    group.num_pages = std::min(group.num_pages, c.num_rows * c.pages_per_row);
    group.classes.push_back(k);
    const Election election{c.num_writers, c.writer_index};
    if (c.store_num_tiles != 0 &&
        elections.insert({c.group, {c.num_writers, c.writer_index}}).second) {
      group.elections.push_back(election);
    }
  }
  if (next_layer != h.num_layers) {
    refuse("descriptor: its classes hold ", next_layer, " layers of ", h.num_layers, "; ", kRepack);
  }
}

void Plan::check_overlaps() const {
  const uint64_t budget = (uint64_t{1} << 20) + 64 * uint64_t{header().num_tiles};
  std::map<TableKey, int> seen;  // bit 0: checked as a store table, bit 1: as a load table
  for (uint32_t k = 0; k < header().num_classes; ++k) {
    const LayerClass& c = classes_[k];
    int& store = seen[{c.store_first_tile, c.store_num_tiles}];
    if (!(store & 1) && c.store_num_tiles != 0) {
      check_written_once(tiles_, {c.store_first_tile, c.store_num_tiles}, true, budget);
    }
    store |= 1;
    int& load = seen[{c.load_first_tile, c.load_num_tiles}];
    if (!(load & 2) && c.load_num_tiles != 0) {
      check_written_once(tiles_, {c.load_first_tile, c.load_num_tiles}, false, budget);
    }
    load |= 2;
  }
}

}  // namespace vkvmap
