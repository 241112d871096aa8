// What the host mover runs instead of tiles: tiles joined back into as few boxes as possible.
//
// Tiles of at most 4 KiB suit warps; a processor that prefetches wants long regular walks. Tiles that
// continue each other on both sides become one box, fragments that touch become one fragment, in
// time linear in the tiles and never more boxes than tiles. The bytes and their places are the same.
#pragma once

#include <cstdint>
#include <vector>

#include "descriptor.h"
#include "validate.h"

namespace vkvmap {

struct CopyBox {
  uint64_t local_offset;
  uint64_t host_offset;
  uint64_t fragment_bytes;
  uint64_t count[2];  // inner, outer
  uint64_t local_stride[2];
  uint64_t host_stride[2];
};

std::vector<CopyBox> join_tiles(const Tile* tiles, uint32_t num_tiles);

// The boxes of every class in both directions; tile tables that classes share are joined once.
class HostProgram {
 public:
  explicit HostProgram(const Plan& plan);
  const std::vector<CopyBox>& boxes(uint32_t class_index, Direction direction) const {
    return tables_[index_[2 * class_index + static_cast<uint32_t>(direction)]];
  }

 private:
  std::vector<std::vector<CopyBox>> tables_;
  std::vector<uint32_t> index_;
};

}  // namespace vkvmap
