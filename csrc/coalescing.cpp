#include "coalescing.h"

#include <algorithm>

#include "tile.h"

namespace vkvmap {

namespace {

constexpr uint32_t kLanes = 32;

// Distinct aligned pieces of `size` bytes that `count` accesses of `width` bytes touch.
uint64_t distinct(const uint64_t* addresses, uint32_t count, uint64_t width, uint64_t size) {
  uint64_t pieces[2 * kLanes];
  uint32_t n = 0;
  for (uint32_t i = 0; i < count; ++i) {
    pieces[n++] = addresses[i] / size;
    pieces[n++] = (addresses[i] + width - 1) / size;
  }
  std::sort(pieces, pieces + n);
  return static_cast<uint64_t>(std::unique(pieces, pieces + n) - pieces);
}

}  // namespace

AccessCounts count_accesses(const Plan& plan, Direction direction, uint32_t class_index) {
  AccessCounts counts;
  const LayerClass& c = plan.classes()[class_index];
  const Tile* tiles = plan.tiles() + plan.first_tile(c, direction);
  const BlockPair first = {0, 0, 0};
  for (uint32_t l = 0; l < c.num_layers; ++l) {
    const LayerEntry& layer = plan.layers()[c.first_layer + l];
    const uint64_t local_page = cache_page(layer, first);
    const uint64_t host_page = canonical_page(layer, first);
    for (uint32_t t = 0; t < plan.num_tiles(c, direction); ++t) {
      const Tile& tile = tiles[t];
      const uint32_t units = tile_units(tile);
      const uint64_t width = uint64_t{1} << tile.width_log2;
      counts.bytes += tile.bytes;
      ++counts.tiles;
      for (uint32_t at = 0; at < units; at += kLanes) {
        uint64_t local[kLanes], host[kLanes];
        const uint32_t active = std::min(kLanes, units - at);
        for (uint32_t lane = 0; lane < active; ++lane) {
          const UnitOffset o = unit_offset(tile, at + lane);
          local[lane] = local_page + o.local;
          host[lane] = host_page + o.host;
        }
        ++counts.requests;
        counts.host_lines += distinct(host, active, width, 128);
        counts.host_sectors += distinct(host, active, width, 32);
        counts.device_lines += distinct(local, active, width, 128);
        counts.device_sectors += distinct(local, active, width, 32);
      }
    }
  }
  return counts;
}

}  // namespace vkvmap
