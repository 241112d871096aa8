// Index arithmetic of the descriptor: the only place where it is written down.
//
// Host mover, CUDA kernel and tests all go from (layer, pair, tile, unit) to addresses through these
// functions, so that what is proven on a CPU holds on a GPU. Nothing here divides by a run-time
// value except per block pair, and nothing overflows for a descriptor that passed validate.cpp.
#pragma once

#include "descriptor.h"
#include "fastdiv.h"

namespace vkvmap {

// A unit is one vector (1 << width_log2 bytes) of a tile; units ascend in host order.
struct UnitOffset {
  uint64_t local;  // from the start of the cache page
  uint64_t host;   // from the start of the canonical page
};

VKVMAP_HD uint32_t tile_units(const Tile& tile) { return tile.bytes >> tile.width_log2; }

VKVMAP_HD UnitOffset unit_offset(const Tile& tile, uint32_t unit) {
  const uint32_t units_per_fragment = tile.fragment_bytes >> tile.width_log2;
  const uint32_t fragment = fastdiv(unit, tile.units_div);
  const uint64_t inside = static_cast<uint64_t>(unit - fragment * units_per_fragment)
                          << tile.width_log2;
  const uint32_t outer = fastdiv(fragment, tile.count_div);
  const uint32_t inner = fragment - outer * tile.count[0];
  return {tile.local_offset + inner * tile.local_stride[0] + outer * tile.local_stride[1] + inside,
          tile.host_offset + inner * tile.host_stride[0] + outer * tile.host_stride[1] + inside};
}

VKVMAP_HD uint64_t cache_page(const LayerEntry& layer, const BlockPair& pair) {
  return layer.local_base + pair.block * layer.local_stride;
}

VKVMAP_HD uint64_t canonical_page(const LayerEntry& layer, const BlockPair& pair) {
  return layer.host_base + pair.row * layer.host_row_stride + pair.page * layer.host_page_stride;
}

// Writers take turns by canonical page id, the same number on every rank.
VKVMAP_HD bool is_elected(uint64_t page_id, uint32_t num_writers, uint32_t writer_index) {
  return page_id % num_writers == writer_index;
}

VKVMAP_HD BlockPair make_pair(uint64_t block, uint64_t page_id, uint32_t pages_per_row) {
  const uint64_t row = page_id / pages_per_row;
  return {block, static_cast<uint32_t>(row), static_cast<uint32_t>(page_id - row * pages_per_row)};
}

}  // namespace vkvmap
