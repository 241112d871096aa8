// Small random worlds: a cache and a region in memory, a valid descriptor over them, and an oracle
// that moves one byte at a time straight from the boxes' definition.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "descriptor.h"
#include "fastdiv.h"
#include "validate.h"

namespace vkvmap::test {

using Random = std::mt19937_64;

inline uint64_t pick(Random& random, uint64_t low, uint64_t high) {  // both included
  return std::uniform_int_distribution<uint64_t>(low, high)(random);
}

inline Tile make_tile(uint32_t bytes, uint16_t inner, uint16_t outer, uint64_t local,
                      uint64_t local0, uint64_t local1, uint64_t host, uint64_t host0,
                      uint64_t host1, uint16_t width_log2) {
  Tile tile{};
  tile.local_offset = local;
  tile.host_offset = host;
  tile.local_stride[0] = local0;
  tile.local_stride[1] = local1;
  tile.host_stride[0] = host0;
  tile.host_stride[1] = host1;
  tile.fragment_bytes = bytes;
  tile.count[0] = inner;
  tile.count[1] = outer;
  tile.bytes = bytes * inner * outer;
  tile.width_log2 = width_log2;
  tile.units_div = fastdiv_multiplier(bytes >> width_log2);
  tile.count_div = fastdiv_multiplier(inner);
  return tile;
}

struct Table {
  std::vector<Tile> tiles;
  uint64_t local_extent = 0;
  uint64_t host_extent = 0;
  uint64_t bytes = 0;
  uint64_t fragments = 0;
};

// Boxes one after the other on both sides, with gaps; then in any order.
inline Table random_table(Random& random, uint16_t width_log2, int max_tiles) {
  const uint64_t width = uint64_t{1} << width_log2;
  auto gap = [&] { return pick(random, 0, 2) == 0 ? pick(random, 0, 6) * width : 0; };
  Table table;
  const int num_tiles = static_cast<int>(pick(random, 1, static_cast<uint64_t>(max_tiles)));
  for (int t = 0; t < num_tiles; ++t) {
    const uint64_t units = pick(random, 0, 3) == 0 ? 64 / width + 1 : pick(random, 1, 20);
    const uint64_t bytes = std::min<uint64_t>(units * width, kTileBytes);
    const uint64_t room = kTileBytes / bytes;
    const uint64_t inner = pick(random, 1, std::min<uint64_t>(room, 9));
    const uint64_t outer = pick(random, 1, std::min<uint64_t>(room / inner, 5));
    const uint64_t local = table.local_extent + gap();
    const uint64_t host = table.host_extent + gap();
    const uint64_t local0 = bytes + gap();
    const uint64_t local1 = inner * local0 + gap();
    const uint64_t host0 = bytes * pick(random, 1, 4) + gap();
    const uint64_t host1 = inner * host0 + gap();
    table.tiles.push_back(make_tile(static_cast<uint32_t>(bytes), static_cast<uint16_t>(inner),
                                    static_cast<uint16_t>(outer), local, local0, local1, host,
                                    host0, host1, width_log2));
    table.local_extent = local + (inner - 1) * local0 + (outer - 1) * local1 + bytes;
    table.host_extent = host + (inner - 1) * host0 + (outer - 1) * host1 + bytes;
    table.bytes += table.tiles.back().bytes;
    table.fragments += inner * outer;
    if (pick(random, 0, 2) == 0) {  // the same box again, so that tiles can be joined
      Tile again = table.tiles.back();
      again.local_offset += outer * local1;
      again.host_offset += outer * host1;
      table.local_extent += outer * local1;
      table.host_extent += outer * host1;
      table.bytes += again.bytes;
      table.fragments += inner * outer;
      table.tiles.push_back(again);
    }
  }
  if (pick(random, 0, 1)) std::shuffle(table.tiles.begin(), table.tiles.end(), random);
  return table;
}

struct World {
  std::vector<LayerClass> classes;
  std::vector<LayerEntry> layers;
  std::vector<Tile> tiles;
  uint32_t num_groups = 1;
  std::vector<uint8_t> cache;
  std::vector<uint8_t> region;
  std::vector<std::string> names;

  std::vector<Range> local_ranges() const {
    return {{reinterpret_cast<uint64_t>(cache.data()), cache.size()}};
  }
  std::vector<Range> host_ranges() const {
    return {{reinterpret_cast<uint64_t>(region.data()), region.size()}};
  }

  std::vector<uint8_t> bytes() const {
    DescriptorHeader header{};
    header.magic = kDescriptorMagic;
    header.version = kDescriptorVersion;
    header.num_classes = static_cast<uint32_t>(classes.size());
    header.num_layers = static_cast<uint32_t>(layers.size());
    header.num_tiles = static_cast<uint32_t>(tiles.size());
    header.num_groups = num_groups;
    header.total_bytes = sizeof(header) + classes.size() * sizeof(LayerClass) +
                         layers.size() * sizeof(LayerEntry) + tiles.size() * sizeof(Tile);
    std::vector<uint8_t> out(header.total_bytes);
    uint8_t* at = out.data();
    auto put = [&](const void* data, size_t size) {
      if (size) std::memcpy(at, data, size);
      at += size;
    };
    put(&header, sizeof(header));
    put(classes.data(), classes.size() * sizeof(LayerClass));
    put(layers.data(), layers.size() * sizeof(LayerEntry));
    put(tiles.data(), tiles.size() * sizeof(Tile));
    return out;
  }

  std::shared_ptr<Plan> plan() const {
    const std::vector<uint8_t> descriptor = bytes();
    return std::make_shared<Plan>(descriptor.data(), descriptor.size(), local_ranges(),
                                  host_ranges(), names);
  }

  void scramble(Random& random) {
    for (uint8_t& byte : cache) byte = static_cast<uint8_t>(random());
    for (uint8_t& byte : region) byte = static_cast<uint8_t>(random());
  }
};

// Each class is a group of its own; rows hold the pages of all layers of a class side by side.
inline World random_world(Random& random, int max_classes = 3, int max_tiles = 4,
                          bool distinct_store = true) {
  World world;
  const auto num_classes = pick(random, 1, static_cast<uint64_t>(max_classes));
  world.num_groups = static_cast<uint32_t>(num_classes);
  struct Offsets {
    uint64_t local, host;
  };
  std::vector<Offsets> offsets;
  uint64_t cache_bytes = 64;
  uint64_t region_bytes = 64;
  for (uint32_t k = 0; k < num_classes; ++k) {
    const auto width_log2 = static_cast<uint16_t>(pick(random, 0, 4));
    const uint64_t width = uint64_t{1} << width_log2;
    const Table load = random_table(random, width_log2, max_tiles);
    const bool same = !distinct_store || pick(random, 0, 2) != 0;
    const Table store = same ? load : random_table(random, width_log2, max_tiles);
    LayerClass c{};
    c.first_layer = static_cast<uint32_t>(world.layers.size());
    c.num_layers = static_cast<uint32_t>(pick(random, 1, 3));
    c.group = k;
    c.num_writers = static_cast<uint32_t>(pick(random, 1, 3));
    c.writer_index = static_cast<uint32_t>(pick(random, 0, c.num_writers - 1));
    c.pages_per_row = static_cast<uint32_t>(pick(random, 1, 4));
    c.num_blocks = pick(random, 4, 12);
    c.num_rows = pick(random, 2, 5);
    c.load_first_tile = static_cast<uint32_t>(world.tiles.size());
    c.load_num_tiles = static_cast<uint32_t>(load.tiles.size());
    world.tiles.insert(world.tiles.end(), load.tiles.begin(), load.tiles.end());
    c.store_first_tile = same ? c.load_first_tile : static_cast<uint32_t>(world.tiles.size());
    c.store_num_tiles = static_cast<uint32_t>(store.tiles.size());
    if (!same) world.tiles.insert(world.tiles.end(), store.tiles.begin(), store.tiles.end());
    c.load_page_bytes = load.bytes;
    c.load_page_fragments = load.fragments;
    c.store_page_bytes = store.bytes;
    c.store_page_fragments = store.fragments;
    world.classes.push_back(c);
    auto aligned = [&](uint64_t bytes) { return (bytes + width - 1) / width * width; };
    const uint64_t page = aligned(std::max(load.local_extent, store.local_extent));
    const uint64_t canonical = aligned(std::max(load.host_extent, store.host_extent));
    const uint64_t row = canonical * c.pages_per_row * c.num_layers + width * pick(random, 0, 3);
    region_bytes = (region_bytes + 63) / 64 * 64;
    for (uint32_t l = 0; l < c.num_layers; ++l) {
      LayerEntry entry{};
      entry.local_stride = page + width * pick(random, 0, 5);
      entry.host_row_stride = row;
      entry.host_page_stride = canonical;
      entry.layer_id = static_cast<uint32_t>(world.layers.size());
      cache_bytes = (cache_bytes + 15) / 16 * 16 + 16 * pick(random, 0, 3);
      offsets.push_back({cache_bytes, region_bytes + l * canonical * c.pages_per_row});
      cache_bytes += (c.num_blocks - 1) * entry.local_stride + page;
      world.names.push_back("model.layers." + std::to_string(entry.layer_id));
      world.layers.push_back(entry);
    }
    region_bytes += c.num_rows * row;
  }
  world.cache.resize(cache_bytes);
  world.region.resize(region_bytes);
  for (size_t l = 0; l < offsets.size(); ++l) {
    world.layers[l].local_base = reinterpret_cast<uint64_t>(world.cache.data()) + offsets[l].local;
    world.layers[l].host_base = reinterpret_cast<uint64_t>(world.region.data()) + offsets[l].host;
  }
  return world;
}

// Moves one page of one layer, byte by byte.
inline void oracle_page(const World& world, uint32_t class_index, uint32_t layer, uint64_t block,
                        uint64_t page, Direction direction) {
  const LayerClass& c = world.classes[class_index];
  const LayerEntry& e = world.layers[layer];
  const bool store = direction == Direction::Store;
  const uint32_t first = store ? c.store_first_tile : c.load_first_tile;
  const uint32_t count = store ? c.store_num_tiles : c.load_num_tiles;
  const uint64_t local = e.local_base + block * e.local_stride;
  const uint64_t host = e.host_base + page / c.pages_per_row * e.host_row_stride +
                        page % c.pages_per_row * e.host_page_stride;
  for (uint32_t t = first; t < first + count; ++t) {
    const Tile& tile = world.tiles[t];
    for (uint64_t j = 0; j < tile.count[1]; ++j) {
      for (uint64_t i = 0; i < tile.count[0]; ++i) {
        for (uint64_t b = 0; b < tile.fragment_bytes; ++b) {
          auto* cache_byte = reinterpret_cast<uint8_t*>(
              local + tile.local_offset + i * tile.local_stride[0] + j * tile.local_stride[1] + b);
          auto* canonical_byte = reinterpret_cast<uint8_t*>(
              host + tile.host_offset + i * tile.host_stride[0] + j * tile.host_stride[1] + b);
          if (store) {
            *canonical_byte = *cache_byte;
          } else {
            *cache_byte = *canonical_byte;
          }
        }
      }
    }
  }
}

// Distinct ids below `limit`, in any order.
inline std::vector<int64_t> distinct(Random& random, uint64_t limit, uint64_t count) {
  std::vector<int64_t> all(limit);
  for (uint64_t i = 0; i < limit; ++i) all[i] = static_cast<int64_t>(i);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(std::min(limit, count));
  return all;
}

}  // namespace vkvmap::test
