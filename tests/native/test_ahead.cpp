// What the copies ask for in advance is what they read that much later, whatever the shape of rows.
#include <algorithm>
#include <vector>

#include "check.h"
#include "host_copy.h"
#include "world.h"

namespace vkvmap {
namespace {

constexpr size_t kLine = 64;
std::vector<uintptr_t> asked;
uint64_t kept = 0;  // how many of them by way of the outer caches
inline void prefetch_line(uintptr_t address) { asked.push_back(address); }
inline void prefetch_to_keep(uintptr_t address) {
  asked.push_back(address);
  ++kept;
}

// The kernels themselves, with prefetches that are written down.
#define VKVMAP_ISA written_down
#define VKVMAP_TARGET
#define VKVMAP_LEVEL 0
#include "host_copy_kernels.inc"

}  // namespace
}  // namespace vkvmap

using namespace vkvmap;
using namespace vkvmap::test;

// Every fragment's address in the order in which the box that begins at `base` is read.
static void append_fragments(uintptr_t base, const BoxShape& shape, std::vector<uintptr_t>& all) {
  for (uint64_t j = 0; j < shape.count[1]; ++j) {
    for (uint64_t i = 0; i < shape.count[0]; ++i) {
      all.push_back(base + i * shape.src_stride[0] + j * shape.src_stride[1]);
    }
  }
}

static void lines_are_asked_for_a_fixed_number_of_fragments_early() {
  Random random(5);
  std::vector<uint8_t> src(1 << 20);
  std::vector<uint8_t> dst(1 << 20);
  for (uint64_t bytes : {64, 92, 128, 192, 200, 256, 512, 656, 1024}) {
    for (int round = 0; round < 300; ++round) {
      BoxShape shape{};
      shape.fragment_bytes = bytes;
      shape.count[0] = pick(random, 1, 12);
      shape.count[1] = pick(random, 1, 8);
      const uint64_t fragments = shape.count[0] * shape.count[1];
      // As far ahead as the next box reaches.
      shape.ahead = bytes * pick(random, 1, fragments) + pick(random, 0, bytes - 1);
      const uint64_t lead = shape.ahead / bytes;
      const bool apart = pick(random, 0, 1) != 0;  // the inner step is the long one, as of K and V
      shape.src_stride[0] = bytes * (apart ? shape.count[1] : 1) + 64 * pick(random, 0, 1);
      shape.src_stride[1] = bytes * (apart ? 1 : shape.count[0] + 1);
      shape.dst_stride[0] = bytes;
      shape.dst_stride[1] = bytes * shape.count[0];
      const uint8_t* from[kStrands];
      uint8_t* to[kStrands];
      uintptr_t next[kStrands];
      for (int p = 0; p < kStrands; ++p) {
        from[p] = src.data() + 100000 * p;
        to[p] = dst.data() + 200000 * p;
        next[p] = (pick(random, 0, 1) ? uintptr_t{0} - 1000000 : uintptr_t{1} << 40) + 4096u * p;
      }
      const BoxCopies copy = written_down::choose(shape, 1, false);
      for (int pages : {1, kStrands}) {
        asked.clear();
        kept = 0;
        (pages == 1 ? copy.one : copy.strands)(to, from, shape, next);
        CHECK(asked.size() % (fragments * static_cast<uint64_t>(pages)) == 0);
        const uint64_t lines = asked.size() / fragments / static_cast<uint64_t>(pages);
        CHECK(lines >= (bytes + kLine - 1) / kLine);
        CHECK(kept == (bytes == 256 && shape.src_stride[0] == 256 ? asked.size() : 0));
        for (int p = 0; p < pages; ++p) {
          std::vector<uintptr_t> read;
          append_fragments(reinterpret_cast<uintptr_t>(from[p]), shape, read);
          append_fragments(next[p], shape, read);
          for (uint64_t n = 0; n < fragments; ++n) {
            const uint64_t at = (n * static_cast<uint64_t>(pages) + static_cast<uint64_t>(p)) * lines;
            for (uint64_t line = 0; line < lines; ++line) {
              const uint64_t within = std::min(line * kLine, bytes - 1);
              CHECK(asked[at + line] == read[n + lead] + within);
            }
          }
        }
      }
    }
  }
}

// One line of each memory page after one that is written to, for fragments of one or two lines.
static void the_next_memory_page_is_asked_for_where_short_fragments_are_streamed_apart() {
  constexpr uint64_t kPage = 4096, kCount = 64;
  std::vector<uint8_t> src(kCount * 1024);
  std::vector<uint8_t> room(kPage + kCount * 2 * kPage);
  uint8_t* const start = room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & (kPage - 1));
  for (uint64_t bytes : {64, 128, 192, 256, 512, 1024}) {
    for (uint64_t stride : {bytes, 2 * bytes, uint64_t{2048}, kPage, 2 * kPage}) {
      for (uint64_t at : {uint64_t{0}, uint64_t{192}, stride - bytes}) {
        if (at + bytes > stride) continue;
        for (bool stream : {false, true}) {
          BoxShape shape{};
          shape.fragment_bytes = bytes;
          shape.count[0] = kCount;
          shape.count[1] = 1;
          shape.ahead = bytes;
          shape.src_stride[0] = bytes;
          shape.dst_stride[0] = stride;
          uint8_t* to = start + at;
          const uint8_t* from = src.data();
          uintptr_t next = uintptr_t{1} << 40;
          asked.clear();
          written_down::choose(shape, at, stream).one(&to, &from, shape, &next);
          std::vector<uint64_t> found;  // memory pages of `room`
          for (uintptr_t line : asked) {
            const uintptr_t offset = line - reinterpret_cast<uintptr_t>(start);
            if (offset < kCount * 2 * kPage) found.push_back(offset / kPage);
          }
          std::vector<uint64_t> expected;
          if (stream && bytes <= 128 && stride > bytes && stride <= kPage) {
            for (uint64_t page = 0; page < kCount * stride / kPage; ++page) expected.push_back(page + 1);
          }
          CHECK(found == expected);
        }
      }
    }
  }
}

int main() {
  RUN(the_next_memory_page_is_asked_for_where_short_fragments_are_streamed_apart);
  RUN(lines_are_asked_for_a_fixed_number_of_fragments_early);
  return 0;
}
