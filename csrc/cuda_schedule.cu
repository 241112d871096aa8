#include "cuda_schedule.h"

#include <algorithm>

namespace vkvmap::cuda {

namespace {

// A rectangle of a list's (layer, pair) grid.
struct Rectangle {
  uint64_t layer, layers, pair, pairs;
};

// Units [u, u + n) of a grid with `width` pairs per layer, as at most three rectangles.
std::vector<Rectangle> rectangles_of(uint64_t u, uint64_t n, uint64_t width) {
  std::vector<Rectangle> rectangles;
  while (n > 0) {
    const uint64_t layer = u / width, pair = u % width;
    Rectangle r;
    if (pair == 0 && n >= width)
      r = {layer, n / width, 0, width};
    else
      r = {layer, 1, pair, std::min(n, width - pair)};
    rectangles.push_back(r);
    u += r.layers * r.pairs;
    n -= r.layers * r.pairs;
  }
  return rectangles;
}

}  // namespace

std::vector<Launch> cut_into_launches(const Transfer& transfer, uint64_t first, uint64_t last,
                                      const LaunchLimits& limits) {
  std::vector<Launch> launches;
  Launch current;
  const auto flush = [&] {
    if (current.num_items > 0) launches.push_back(std::move(current));
    current = Launch();
  };
  for (uint32_t list = 0; list < transfer.lists.size(); ++list) {
    const WorkList& work = transfer.lists[list];
    const LayerClass& layer_class = transfer.plan->classes()[work.class_index];
    const uint64_t page_bytes = transfer.plan->page_bytes(layer_class, transfer.direction);
    const uint64_t num_tiles = transfer.plan->num_tiles(layer_class, transfer.direction);
    const uint64_t width = work.num_pairs;
    const uint64_t end = work.first_unit + work.num_layers * width;
    if (num_tiles == 0 || width == 0) continue;
    uint64_t u = std::max(first, work.first_unit);
    const uint64_t stop = std::min(last, end);
    while (u < stop) {
      const uint64_t at = u - work.first_unit;
      uint64_t n = stop - u;
      if (width > limits.pairs) n = std::min({n, width - at % width, limits.pairs});
      const uint64_t room = limits.bytes > current.bytes ? limits.bytes - current.bytes : 0;
      const uint64_t pages = page_bytes == 0 ? n : room / page_bytes;
      n = std::min({n, std::max<uint64_t>(pages, current.num_items == 0),
                    std::max<uint64_t>(1, (kMaxLaunchItems - current.num_items) / num_tiles)});
      const std::vector<Rectangle> rectangles = rectangles_of(at, n, width);
      uint64_t low = width, high = 0;
      for (const Rectangle& r : rectangles) {
        low = std::min(low, r.pair);
        high = std::max(high, r.pair + r.pairs);
      }
      // Lists of one transfer often share their pairs (one list per layer, say): send them once.
      const auto holds = [&](const Launch::Span& s) {
        return transfer.lists[s.list].pairs == work.pairs && s.first <= low &&
               high <= s.first + s.count;
      };
      const auto shared = std::find_if(current.spans.begin(), current.spans.end(), holds);
      const bool is_new = shared == current.spans.end();
      const bool fits = n > 0 && current.segments.size() + rectangles.size() <= kMaxSegments &&
                        (!is_new || current.num_pairs + (high - low) <= limits.pairs) &&
                        current.num_items + n * num_tiles <= kMaxLaunchItems;
      if (!fits && current.num_items > 0) {
        flush();
        continue;
      }
      const size_t span = static_cast<size_t>(shared - current.spans.begin());
      if (is_new) {
        current.spans.push_back({list, low, high - low});
        current.num_pairs += high - low;
      }
      const uint64_t span_first = current.spans[span].first;
      for (const Rectangle& r : rectangles) {
        Segment s;
        s.num_items = static_cast<uint32_t>(r.layers * r.pairs * num_tiles);
        s.first_layer = work.first_layer + static_cast<uint32_t>(r.layer);
        s.num_pairs = static_cast<uint32_t>(r.pairs);
        s.first_pair = static_cast<uint32_t>(r.pair - span_first);
        s.num_tiles = static_cast<uint32_t>(num_tiles);
        s.first_tile = transfer.plan->first_tile(layer_class, transfer.direction);
        current.segments.push_back(s);
        current.segment_span.push_back(static_cast<uint32_t>(span));
      }
      current.num_items += n * num_tiles;
      current.bytes += n * page_bytes;
      u += n;
    }
  }
  flush();
  return launches;
}

void place_segments(const Launch& launch, const std::vector<uint64_t>& span_starts,
                    LaunchHead& head) {
  head.num_segments = static_cast<uint32_t>(launch.segments.size());
  for (size_t i = 0; i < launch.segments.size(); ++i) {
    head.segments[i] = launch.segments[i];
    head.segments[i].first_pair += static_cast<uint32_t>(span_starts[launch.segment_span[i]]);
  }
}

uint32_t share_items(uint64_t items, uint32_t ctas, uint32_t threads, LaunchHead& head) {
  const uint32_t warps_per_cta = threads / kWarpLanes;
  const uint64_t wanted = (items + warps_per_cta - 1) / warps_per_cta;
  const uint32_t grid = static_cast<uint32_t>(std::min<uint64_t>(ctas, wanted));
  const uint64_t warps = uint64_t{grid} * warps_per_cta;
  head.items_per_warp = static_cast<uint32_t>(items / warps);
  head.extra_items = static_cast<uint32_t>(items % warps);
  return grid;
}

}  // namespace vkvmap::cuda
