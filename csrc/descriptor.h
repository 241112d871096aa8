// The packed descriptor: the one definition of its format.
//
// A descriptor is a contiguous little-endian byte array
//
//     DescriptorHeader | LayerClass[num_classes] | LayerEntry[num_layers] | Tile[num_tiles]
//
// packed once per plan by vkvmap/plan.py (which learns sizes and field offsets from this module,
// never from a copy), validated once by validate.cpp, then read as it is by the host mover and by
// the CUDA kernel. It says where bytes lie; it knows nothing of heads, tokens or ranks.
//
// What must stay true:
//  * a layer's cache page of block b starts at local_base + b * local_stride;
//    its canonical page p of row r starts at host_base + r * host_row_stride + p * host_page_stride;
//  * all layers of a class share both tile tables, the writer election and the group (whose block
//    lists they consume), so that one (class, pair list) is a dense (layer, pair, tile) grid;
//  * a tile is a box of equal fragments: fragment f = (j, i) with i < count[0], j < count[1] lies at
//    offset + i * stride[0] + j * stride[1] on either side; it moves at most kTileBytes bytes, and
//    every address it touches is a multiple of its vector width;
//  * host strides ascend with (i, j), so consecutive units are consecutive host bytes wherever the
//    geometry allows it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vkvmap {

constexpr uint32_t kDescriptorMagic = 0x4d564b56;  // "VKVM"
constexpr uint32_t kDescriptorVersion = 1;
constexpr uint32_t kTileBytes = 4096;      // most bytes one tile moves
constexpr uint32_t kHostLineBytes = 128;   // tiles are cut on these lines where geometry allows
constexpr uint32_t kMaxVectorBytes = 16;

struct DescriptorHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t num_classes;
  uint32_t num_layers;
  uint32_t num_tiles;
  uint32_t num_groups;
  uint64_t total_bytes;  // of the whole descriptor, for truncation checks
};
static_assert(sizeof(DescriptorHeader) == 32);

// Layers that move alike: same tile tables, same group, same turn among the writers.
struct LayerClass {
  uint32_t first_layer;   // index into LayerEntry[]
  uint32_t num_layers;
  uint32_t group;         // which block list of a transfer they consume
  uint32_t num_writers;   // page b is stored iff b % num_writers == writer_index
  uint32_t writer_index;
  uint32_t pages_per_row;    // canonical pages of one chunk (row); page id = row * pages_per_row + page
  uint32_t store_first_tile;
  uint32_t store_num_tiles;  // 0: this rank never stores these layers
  uint32_t load_first_tile;
  uint32_t load_num_tiles;
  uint64_t store_page_bytes;  // bytes one page moves, for accounting and for cutting work
  uint64_t load_page_bytes;
  uint64_t store_page_fragments;
  uint64_t load_page_fragments;
  uint64_t num_blocks;  // block ids are [0, num_blocks)
  uint64_t num_rows;    // row ids are [0, num_rows)
};
static_assert(sizeof(LayerClass) == 88);

struct LayerEntry {
  uint64_t local_base;        // address of block 0's page
  uint64_t local_stride;      // bytes from one block's page to the next
  uint64_t host_base;         // address of this layer in row 0, page 0
  uint64_t host_row_stride;   // bytes from one row to the next
  uint64_t host_page_stride;  // bytes from one canonical page to the next within a row
  uint32_t layer_id;          // position in the model's layer table: subsets, progress, errors
  uint32_t reserved;          // zero
};
static_assert(sizeof(LayerEntry) == 48);

struct Tile {
  uint64_t local_offset;    // from the start of the cache page, bytes
  uint64_t host_offset;     // from the start of the canonical page, bytes
  uint64_t local_stride[2];
  uint64_t host_stride[2];
  uint32_t fragment_bytes;  // contiguous on both sides
  uint32_t bytes;           // fragment_bytes * count[0] * count[1], at most kTileBytes
  uint16_t count[2];
  uint16_t width_log2;      // vector width 1 << width_log2, 1..16 bytes
  uint16_t reserved0;       // zero
  uint32_t units_div;       // fastdiv multiplier of fragment_bytes >> width_log2
  uint32_t count_div;       // fastdiv multiplier of count[0]
  uint64_t reserved1;       // zero
};
static_assert(sizeof(Tile) == 80);

// One block of a transfer, already elected and split: 16 bytes for all layers of a class.
struct BlockPair {
  uint64_t block;
  uint32_t row;
  uint32_t page;  // within the row
};
static_assert(sizeof(BlockPair) == 16);

}  // namespace vkvmap
