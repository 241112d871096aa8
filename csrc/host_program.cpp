#include "host_program.h"

#include <map>
#include <utility>

namespace vkvmap {
namespace {

// The simplest form of a box: unused axes are 1 and last, axes that continue each other are one,
// fragments that touch are one.
CopyBox simplified(CopyBox box) {
  if (box.count[0] == 1) {
    std::swap(box.count[0], box.count[1]);
    std::swap(box.local_stride[0], box.local_stride[1]);
    std::swap(box.host_stride[0], box.host_stride[1]);
  }
  if (box.count[1] > 1 && box.local_stride[1] == box.count[0] * box.local_stride[0] &&
      box.host_stride[1] == box.count[0] * box.host_stride[0]) {
    box.count[0] *= box.count[1];
    box.count[1] = 1;
  }
  if (box.count[0] > 1 && box.local_stride[0] == box.fragment_bytes &&
      box.host_stride[0] == box.fragment_bytes) {
    box.fragment_bytes *= box.count[0];
    box.count[0] = box.count[1];
    box.local_stride[0] = box.local_stride[1];
    box.host_stride[0] = box.host_stride[1];
    box.count[1] = 1;
  }
  return box;
}

// Appends `next` to `box` if it goes on where the box ends.
bool extend(CopyBox& box, const CopyBox& next) {
  // Unsigned distances: a step backwards is a huge number that matches only a stride of the same.
  const uint64_t local = next.local_offset - box.local_offset;
  const uint64_t host = next.host_offset - box.host_offset;
  if (box.count[0] == 1 && next.count[0] == 1 && box.count[1] == 1 && next.count[1] == 1 &&
      local == box.fragment_bytes && host == box.fragment_bytes) {
    box.fragment_bytes += next.fragment_bytes;
    return true;
  }
  if (box.fragment_bytes != next.fragment_bytes) return false;
  auto same_stride = [](const CopyBox& a, const CopyBox& b, int axis) {
    return a.local_stride[axis] == b.local_stride[axis] && a.host_stride[axis] == b.host_stride[axis];
  };
  if (box.count[1] == 1 && next.count[1] == 1) {
    const CopyBox& strided = box.count[0] > 1 ? box : next;
    if (strided.count[0] > 1 &&
        (box.count[0] == 1 || next.count[0] == 1 || same_stride(box, next, 0)) &&
        local == box.count[0] * strided.local_stride[0] &&
        host == box.count[0] * strided.host_stride[0]) {
      box.local_stride[0] = strided.local_stride[0];
      box.host_stride[0] = strided.host_stride[0];
      box.count[0] += next.count[0];
      return true;
    }
    if (box.count[0] == 1 && next.count[0] == 1) {
      box.count[0] = 2;
      box.local_stride[0] = local;
      box.host_stride[0] = host;
      return true;
    }
    if (box.count[0] == next.count[0] && same_stride(box, next, 0)) {
      box.count[1] = 2;
      box.local_stride[1] = local;
      box.host_stride[1] = host;
      return true;
    }
    return false;
  }
  if (box.count[0] != next.count[0] || !same_stride(box, next, 0)) return false;
  if (next.count[1] > 1 && !same_stride(box, next, 1)) return false;
  if (box.count[1] == 1) {
    if (local != next.local_stride[1] || host != next.host_stride[1]) return false;
    box.local_stride[1] = local;
    box.host_stride[1] = host;
    box.count[1] = 1 + next.count[1];
    return true;
  }
  if (local != box.count[1] * box.local_stride[1] || host != box.count[1] * box.host_stride[1]) {
    return false;
  }
  box.count[1] += next.count[1];
  return true;
}

}  // namespace

std::vector<CopyBox> join_tiles(const Tile* tiles, uint32_t num_tiles) {
  std::vector<CopyBox> boxes;
  boxes.reserve(num_tiles);
  for (uint32_t t = 0; t < num_tiles; ++t) {
    const Tile& tile = tiles[t];
    boxes.push_back(simplified({tile.local_offset,
                                tile.host_offset,
                                tile.fragment_bytes,
                                {tile.count[0], tile.count[1]},
                                {tile.local_stride[0], tile.local_stride[1]},
                                {tile.host_stride[0], tile.host_stride[1]}}));
  }
  // Each pass may make boxes alike that were not before (fragments grow into rows, rows into boxes);
  // four suffice for everything a page is made of, and fewer boxes are only ever a gain in speed.
  for (int pass = 0; pass < 4 && boxes.size() > 1; ++pass) {
    size_t last = 0;
    for (size_t b = 1; b < boxes.size(); ++b) {
      if (!extend(boxes[last], boxes[b])) boxes[++last] = boxes[b];
    }
    if (last + 1 == boxes.size()) break;
    boxes.resize(last + 1);
    for (CopyBox& box : boxes) box = simplified(box);
  }
  boxes.shrink_to_fit();
  return boxes;
}

HostProgram::HostProgram(const Plan& plan) : tables_(1) {
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> joined;
  for (uint32_t k = 0; k < plan.header().num_classes; ++k) {
    const LayerClass& c = plan.classes()[k];
    for (Direction direction : {Direction::Store, Direction::Load}) {
      const uint32_t first = plan.first_tile(c, direction);
      const uint32_t count = plan.num_tiles(c, direction);
      if (count == 0) {
        index_.push_back(0);
        continue;
      }
      auto [found, fresh] = joined.emplace(std::make_pair(first, count),
                                           static_cast<uint32_t>(tables_.size()));
      if (fresh) tables_.push_back(join_tiles(plan.tiles() + first, count));
      index_.push_back(found->second);
    }
  }
}

}  // namespace vkvmap
