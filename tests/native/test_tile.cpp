// The index arithmetic that kernel and host share, against nested loops and plain division.
#include <map>

#include "check.h"
#include "tile.h"
#include "world.h"

using namespace vkvmap;
using namespace vkvmap::test;

static void fastdiv_is_division_over_its_whole_domain() {
  for (uint32_t divisor = 1; divisor <= kFastDivMax; ++divisor) {
    const uint32_t multiplier = fastdiv_multiplier(divisor);
    for (uint32_t n = 0; n <= kFastDivMax; ++n) CHECK(fastdiv(n, multiplier) == n / divisor);
  }
}

static void units_of_a_tile_are_its_bytes_each_once() {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const Table table = random_table(random, static_cast<uint16_t>(pick(random, 0, 4)), 3);
    for (const Tile& tile : table.tiles) {
      std::map<uint64_t, uint64_t> expected;  // host byte -> local byte
      for (uint64_t j = 0; j < tile.count[1]; ++j) {
        for (uint64_t i = 0; i < tile.count[0]; ++i) {
          for (uint64_t b = 0; b < tile.fragment_bytes; ++b) {
            expected[tile.host_offset + i * tile.host_stride[0] + j * tile.host_stride[1] + b] =
                tile.local_offset + i * tile.local_stride[0] + j * tile.local_stride[1] + b;
          }
        }
      }
      std::map<uint64_t, uint64_t> seen;
      const uint64_t width = uint64_t{1} << tile.width_log2;
      for (uint32_t unit = 0; unit < tile_units(tile); ++unit) {
        const UnitOffset at = unit_offset(tile, unit);
        CHECK(at.local % width == 0 && at.host % width == 0);
        for (uint64_t b = 0; b < width; ++b) CHECK(seen.emplace(at.host + b, at.local + b).second);
      }
      CHECK(seen == expected);
    }
  }
}

static void a_page_id_splits_into_row_and_page_without_overflow() {
  for (uint32_t pages_per_row : {1u, 3u, 7u, 4096u}) {
    for (uint64_t id : {uint64_t{0}, uint64_t{65535}, uint64_t{65536}, (uint64_t{1} << 32) - 1}) {
      const BlockPair pair = make_pair((uint64_t{1} << 31) + 5, id, pages_per_row);
      CHECK(pair.row == id / pages_per_row && pair.page == id % pages_per_row);
      CHECK(pair.block == (uint64_t{1} << 31) + 5);
    }
  }
  LayerEntry layer{};
  layer.local_stride = 1039680;
  layer.host_row_stride = 2097152;
  CHECK(cache_page(layer, {2066, 0, 0}) == 2147978880ull);           // beyond 2^31
  CHECK(canonical_page(layer, {0, 1000000, 0}) == 2097152000000ull);  // beyond 2^40
}

int main() {
  RUN(fastdiv_is_division_over_its_whole_domain);
  RUN(units_of_a_tile_are_its_bytes_each_once);
  RUN(a_page_id_splits_into_row_and_page_without_overflow);
  return 0;
}
