// The kernel that moves tiles between paged cache and canonical pages.
//
// One launch moves every (layer, pair, tile) of up to kMaxSegments dense grids. A warp owns a
// contiguous range of that work, fixed by arithmetic alone: no atomics, no division once its first
// item is found, nothing in local memory.
//
// What forces its shape (sm_80 to sm_120, seen with the disassembler of CUDA 13.0; look again with
// every new compiler):
//  * one round trip to host memory takes 1.2-2.4 us, so 66-132 KB must be in flight on a Gen5 x16
//    link. A warp moves a tile of 4 KiB with U = 8 loads of 16 bytes per lane before its first store;
//    64 warps (8 CTAs x 256 threads) then have 256 KiB in flight;
//  * ptxas moves a store up between loads when it may, which halves the loads in flight without any
//    other sign. The data loads are volatile, and the cursor moves on between the loads and the
//    stores. That also hides the latency of the next item's metadata behind this item's data;
//  * block pairs may lie in host memory, one link round trip away: they are read one pair ahead;
//  * lanes take consecutive units, and units ascend with host addresses in both directions, because
//    host memory is read and written in lines and device memory is forgiving.
#pragma once

#include "cuda_launch.h"
#include "ptx.cuh"
#include "tile.h"
#include "validate.h"

namespace vkvmap {

constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kMaxThreads = 512;   // per CTA: leaves 128 registers per thread
constexpr uint32_t kMaxSegments = 32;   // per launch
constexpr uint64_t kNoBlock = ~uint64_t{0};  // a pair in a buffer that moves nothing

// A dense (layer, pair, tile) grid within a launch, the tile running fastest.
struct Segment {
  uint32_t num_items;  // num_layers * num_pairs * num_tiles
  uint32_t first_layer;
  uint32_t num_pairs;
  uint32_t first_pair;
  uint32_t num_tiles;
  uint32_t first_tile;
};
static_assert(sizeof(Segment) == 24);

struct LaunchHead {
  const LayerEntry* layers;  // as the device sees them: host addresses replaced by device aliases
  const Tile* tiles;
  const BlockPair* pairs;  // unused where the pairs travel as parameters
  uint32_t num_segments;
  uint32_t items_per_warp;  // every warp takes this many items, the first extra_items one more
  uint32_t extra_items;
  uint32_t reserved[3];
  Segment segments[kMaxSegments];
};
static_assert(sizeof(LaunchHead) % 16 == 0);

// sm_70 and later take 32,764 bytes of parameters since CUDA 12.1.
constexpr uint32_t kParameterPairs = (32764 - sizeof(LaunchHead)) / sizeof(BlockPair);

struct alignas(16) BufferArgs {
  LaunchHead head;
  VKVMAP_D ptx::Words pair(uint32_t index) const { return ptx::load_constant(head.pairs + index); }
  static constexpr bool kMaySkip = true;
};

struct alignas(16) ParameterArgs {
  LaunchHead head;
  ptx::Words pairs[kParameterPairs];
  VKVMAP_D ptx::Words pair(uint32_t index) const { return pairs[index]; }
  static constexpr bool kMaySkip = false;
};
static_assert(sizeof(ParameterArgs) <= 32764);

namespace kernel {

VKVMAP_D uint64_t join(uint32_t low, uint32_t high) { return low | uint64_t{high} << 32; }

constexpr uint32_t kTileWords = sizeof(Tile) / sizeof(ptx::Words);
static_assert(kTileWords * sizeof(ptx::Words) == sizeof(Tile) && kTileWords <= kWarpLanes);

// The tile a warp works on and the one after it. In registers each would cost every lane twenty.
union alignas(16) TileSlots {
  ptx::Words words[2][kTileWords];
  Tile tiles[2];
};

// Where a warp stands in its range, and what it needs to move the item there.
template <class Args>
class Cursor {
 public:
  VKVMAP_D Cursor(const Args& args, TileSlots& slots, uint32_t lane, uint32_t item)
      : args_(args), slots_(slots), lane_(lane) {
    while (item >= args.head.segments[segment_].num_items)
      item -= args.head.segments[segment_++].num_items;
    const Segment& s = args.head.segments[segment_];
    const uint32_t row = item / s.num_tiles;
    tile_ = item - row * s.num_tiles;
    layer_ = row / s.num_pairs;
    pair_ = row - layer_ * s.num_pairs;
    ahead_ = args.pair(s.first_pair + pair_);
    enter_pair();
    enter_tile();
  }

  VKVMAP_D const Tile& tile() const { return slots_.tiles[slot_]; }
  VKVMAP_D uint64_t local_page() const { return local_page_; }
  VKVMAP_D uint64_t host_page() const { return host_page_; }
  // Of this item: 0 where its pair says to move nothing.
  VKVMAP_D uint32_t bytes() const {
    return !Args::kMaySkip || moves_ ? slots_.tiles[slot_].bytes : 0;
  }

  // To the next item, which must exist.
  VKVMAP_D void advance() {
    const Segment& s = args_.head.segments[segment_];
    if (++tile_ == s.num_tiles) {
      tile_ = 0;
      if (++pair_ == s.num_pairs) {
        pair_ = 0;
        if (++layer_ * s.num_pairs * s.num_tiles == s.num_items) {
          layer_ = 0;
          ++segment_;
          ahead_ = args_.pair(args_.head.segments[segment_].first_pair);
        }
      }
      enter_pair();
    }
    enter_tile();
  }

 private:
  VKVMAP_D void enter_pair() {
    const Segment& s = args_.head.segments[segment_];
    const ptx::Words pair = ahead_;
    const uint32_t next = pair_ + 1 == s.num_pairs ? 0 : pair_ + 1;
    ahead_ = args_.pair(s.first_pair + next);
    const ptx::Words* entry =
        reinterpret_cast<const ptx::Words*>(args_.head.layers + s.first_layer + layer_);
    const ptx::Words a = ptx::load_constant(entry);
    const ptx::Words b = ptx::load_constant(entry + 1);
    const ptx::Words c = ptx::load_constant(entry + 2);
    const uint64_t block = join(pair.x, pair.y);
    local_page_ = join(a.x, a.y) + block * join(a.z, a.w);
    host_page_ = join(b.x, b.y) + pair.z * join(b.z, b.w) + pair.w * join(c.x, c.y);
    moves_ = block != kNoBlock;
  }

  // The first lanes fetch one piece each; the slot left behind may still be read until the warp
  // has met here.
  VKVMAP_D void enter_tile() {
    const Tile* tile = args_.head.tiles + args_.head.segments[segment_].first_tile + tile_;
    slot_ ^= 1;
    if (lane_ < kTileWords)
      slots_.words[slot_][lane_] =
          ptx::load_constant(reinterpret_cast<const ptx::Words*>(tile) + lane_);
    __syncwarp();
  }

  const Args& args_;
  TileSlots& slots_;
  const uint32_t lane_;
  ptx::Words ahead_;  // the pair after this one, already on its way
  uint64_t local_page_, host_page_;
  uint32_t segment_ = 0, layer_, pair_, tile_, slot_ = 1;
  bool moves_;
};

// What one lane has in flight: kUnroll units, a warp's width apart.
template <class Unit, Direction direction, uint32_t kUnroll, ptx::Hint hint>
struct Batch {
  Unit data[kUnroll];
  uint64_t target[kUnroll];

  template <class Args>
  VKVMAP_D void load(const Cursor<Args>& cursor, uint32_t first, uint32_t units) {
    const Tile tile = cursor.tile();
    VKVMAP_UNROLL
    for (uint32_t k = 0; k < kUnroll; ++k) {
      const uint32_t unit = first + k * kWarpLanes;
      const UnitOffset o = unit_offset(tile, unit);  // within kFastDivMax, whether active or not
      const uint64_t local = cursor.local_page() + o.local;
      const uint64_t host = cursor.host_page() + o.host;
      ptx::load<hint>(unit < units, direction == Direction::Store ? local : host, data[k]);
      target[k] = direction == Direction::Store ? host : local;
    }
  }

  VKVMAP_D void store(uint32_t first, uint32_t units) const {
    VKVMAP_UNROLL
    for (uint32_t k = 0; k < kUnroll; ++k)
      ptx::store<hint>(first + k * kWarpLanes < units, target[k], data[k]);
  }
};

// The units [first, end) of an item that has `units`, a warp's worth of batches at a time.
template <class Unit, Direction direction, uint32_t kUnroll, ptx::Hint hint, class Args>
VKVMAP_D void move_units(const Cursor<Args>& cursor, uint32_t first, uint32_t end, uint32_t units) {
  for (; first < end; first += kWarpLanes * kUnroll) {
    Batch<Unit, direction, kUnroll, hint> batch;
    batch.load(cursor, first, units);
    batch.store(first, units);
  }
}

template <Direction direction, uint32_t kUnroll, ptx::Hint hint, class Args>
VKVMAP_D void move(const Args& args) {
  constexpr uint32_t kLastBatch = kTileBytes / 16 - kWarpLanes * kUnroll;  // of a full tile
  __shared__ TileSlots slots[kMaxThreads / kWarpLanes];
  const uint32_t lane = threadIdx.x & (kWarpLanes - 1);
  const uint32_t warp = blockIdx.x * (blockDim.x / kWarpLanes) + threadIdx.x / kWarpLanes;
  const uint32_t extra = args.head.extra_items;
  uint32_t left = args.head.items_per_warp + (warp < extra ? 1 : 0);
  if (left == 0) return;
  Cursor<Args> cursor(args, slots[threadIdx.x / kWarpLanes], lane,
                      warp * args.head.items_per_warp + (warp < extra ? warp : extra));
  for (;; --left) {
    const uint32_t width_log2 = cursor.tile().width_log2;
    const uint32_t units = cursor.bytes() >> width_log2;
    if (width_log2 == 4) {
      if constexpr (kLastBatch > 0)
        move_units<ptx::Words, direction, kUnroll, hint>(cursor, lane, kLastBatch, units);
      Batch<ptx::Words, direction, kUnroll, hint> batch;
      batch.load(cursor, kLastBatch + lane, units);
      if (left > 1) cursor.advance();
      batch.store(kLastBatch + lane, units);
    } else {
      switch (width_log2) {
        case 3: move_units<uint64_t, direction, kUnroll, hint>(cursor, lane, units, units); break;
        case 2: move_units<uint32_t, direction, kUnroll, hint>(cursor, lane, units, units); break;
        case 1: move_units<uint16_t, direction, kUnroll, hint>(cursor, lane, units, units); break;
        default: move_units<uint8_t, direction, kUnroll, hint>(cursor, lane, units, units); break;
      }
      if (left > 1) cursor.advance();
    }
    if (left == 1) return;
  }
}

}  // namespace kernel
}  // namespace vkvmap
