// Joined tiles and specialised copies move the same bytes as the tiles say, and no others.
#include <map>

#include "check.h"
#include "host_copy.h"
#include "host_program.h"
#include "world.h"

using namespace vkvmap;
using namespace vkvmap::test;

static std::map<uint64_t, uint64_t> bytes_of(const std::vector<CopyBox>& boxes) {
  std::map<uint64_t, uint64_t> bytes;
  for (const CopyBox& box : boxes) {
    for (uint64_t j = 0; j < box.count[1]; ++j) {
      for (uint64_t i = 0; i < box.count[0]; ++i) {
        for (uint64_t b = 0; b < box.fragment_bytes; ++b) {
          const uint64_t host =
              box.host_offset + i * box.host_stride[0] + j * box.host_stride[1] + b;
          CHECK(bytes.emplace(host, box.local_offset + i * box.local_stride[0] +
                                        j * box.local_stride[1] + b).second);
        }
      }
    }
  }
  return bytes;
}

static std::vector<CopyBox> unjoined(const std::vector<Tile>& tiles) {
  std::vector<CopyBox> boxes;
  for (const Tile& tile : tiles) {
    boxes.push_back({tile.local_offset, tile.host_offset, tile.fragment_bytes,
                     {tile.count[0], tile.count[1]},
                     {tile.local_stride[0], tile.local_stride[1]},
                     {tile.host_stride[0], tile.host_stride[1]}});
  }
  return boxes;
}

static void joining_tiles_keeps_every_byte_in_place() {
  Random random(2);
  for (int round = 0; round < 3000; ++round) {
    const Table table = random_table(random, static_cast<uint16_t>(pick(random, 0, 4)), 5);
    const std::vector<CopyBox> joined =
        join_tiles(table.tiles.data(), static_cast<uint32_t>(table.tiles.size()));
    CHECK(joined.size() <= table.tiles.size());
    CHECK(bytes_of(joined) == bytes_of(unjoined(table.tiles)));
  }
}

static void a_page_of_many_tiles_is_one_walk() {
  // 16 tokens of 256 bytes, K and V, one head of eight: two 4 KiB tiles, one strided box.
  std::vector<Tile> strided;
  for (uint64_t half = 0; half < 2; ++half) {
    strided.push_back(make_tile(256, 16, 1, half * 4096, 256, 0, half * 32768, 2048, 0, 4));
  }
  std::vector<CopyBox> boxes = join_tiles(strided.data(), 2);
  CHECK(boxes.size() == 1 && boxes[0].fragment_bytes == 256 && boxes[0].count[0] == 32);
  // A page that is contiguous on both sides is one fragment, however many tiles it was cut into.
  std::vector<Tile> whole;
  for (uint64_t t = 0; t < 100; ++t) {
    whole.push_back(make_tile(4096, 1, 1, t * 4096, 0, 0, t * 4096, 0, 0, 4));
  }
  boxes = join_tiles(whole.data(), 100);
  CHECK(boxes.size() == 1 && boxes[0].fragment_bytes == 409600 && boxes[0].count[0] == 1);
}

static void copies_write_their_fragments_and_nothing_else() {
  Random random(3);
  std::vector<uint8_t> src(1 << 17);
  for (uint8_t& byte : src) byte = static_cast<uint8_t>(random());
  std::vector<uint64_t> lengths;
  for (uint64_t bytes = 1; bytes <= 200; ++bytes) lengths.push_back(bytes);
  for (uint64_t bytes : {255, 256, 257, 384, 511, 512, 576, 656, 1024, 4096, 5000}) {
    lengths.push_back(bytes);
  }
  for (const std::string& set : instruction_sets()) {
    set_instruction_set(set);
    for (bool stream : {false, true}) {
      for (uint64_t bytes : lengths) {
        for (int round = 0; round < 4; ++round) {
          BoxShape shape{};
          shape.fragment_bytes = bytes;
          shape.count[0] = pick(random, 1, bytes > 1000 ? 3 : 12);
          shape.count[1] = pick(random, 1, 3);
          const uint64_t align = round < 2 ? 64 : 1;
          auto up = [&](uint64_t n) { return (n + align - 1) / align * align; };
          shape.dst_stride[0] = up(bytes) + align * pick(random, 0, 2);
          shape.dst_stride[1] = shape.count[0] * shape.dst_stride[0] + align * pick(random, 0, 2);
          shape.src_stride[0] = round % 2 ? bytes : bytes + pick(random, 0, 100);
          shape.src_stride[1] = shape.count[0] * shape.src_stride[0];
          shape.ahead = pick(random, 0, 1) ? 1024 : 2048;
          const uint64_t dst_at = align * pick(random, 0, 3);
          const uint64_t src_at = pick(random, 0, 64);
          const uint64_t extent = dst_at + shape.count[1] * shape.dst_stride[1] + 128;
          std::vector<uint8_t> room(extent + 64, 0xA5);
          uint8_t* dst = room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63);
          std::vector<uint8_t> expected(dst, dst + extent);
          for (uint64_t j = 0; j < shape.count[1]; ++j) {
            for (uint64_t i = 0; i < shape.count[0]; ++i) {
              for (uint64_t b = 0; b < bytes; ++b) {
                expected[dst_at + i * shape.dst_stride[0] + j * shape.dst_stride[1] + b] =
                    src[src_at + i * shape.src_stride[0] + j * shape.src_stride[1] + b];
              }
            }
          }
          const BoxCopies copy =
              choose_box_copy(shape, reinterpret_cast<uintptr_t>(dst) | dst_at, stream);
          uint8_t* to = dst + dst_at;
          const uint8_t* from = src.data() + src_at;
          const uintptr_t next = reinterpret_cast<uintptr_t>(src.data());
          copy.one(&to, &from, shape, &next);
          finish_streaming();
          CHECK(std::equal(expected.begin(), expected.end(), dst));

          // The same box of several pages at once.
          std::vector<uint8_t> rooms(kStrands * extent + 64, 0xA5);
          uint8_t* first = rooms.data() + (-reinterpret_cast<uintptr_t>(rooms.data()) & 63);
          const uint64_t apart = extent / 64 * 64;
          uint8_t* tos[kStrands];
          const uint8_t* froms[kStrands];
          uintptr_t nexts[kStrands];
          std::vector<uint8_t> several(kStrands * apart, 0xA5);
          for (int p = 0; p < kStrands; ++p) {
            tos[p] = first + static_cast<uint64_t>(p) * apart + dst_at;
            froms[p] = src.data() + src_at + p;
            nexts[p] = next;
            for (uint64_t j = 0; j < shape.count[1]; ++j) {
              for (uint64_t i = 0; i < shape.count[0]; ++i) {
                std::copy_n(froms[p] + i * shape.src_stride[0] + j * shape.src_stride[1], bytes,
                            several.begin() + static_cast<int64_t>(
                                static_cast<uint64_t>(p) * apart + dst_at +
                                i * shape.dst_stride[0] + j * shape.dst_stride[1]));
              }
            }
          }
          copy.strands(tos, froms, shape, nexts);
          finish_streaming();
          CHECK(std::equal(several.begin(), several.end(), first));
        }
      }
    }
  }
  set_instruction_set(instruction_sets().front());
}

// Tiles in any order join into boxes whose strides step backwards.
static void boxes_may_step_backwards() {
  std::vector<uint8_t> src(1 << 14);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<uint8_t>(i * 7);
  for (const std::string& set : instruction_sets()) {
    set_instruction_set(set);
    for (uint64_t bytes : {16, 48, 64, 92, 256, 300, 1024, 2048}) {
      for (bool stream : {false, true}) {
        BoxShape shape{};
        shape.fragment_bytes = bytes;
        shape.count[0] = 3;
        shape.count[1] = 1;
        shape.ahead = 1024;
        shape.dst_stride[0] = -bytes;  // 2^64 - bytes
        shape.src_stride[0] = bytes;
        std::vector<uint8_t> room(3 * bytes + 64, 0);
        uint8_t* first = room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63);
        uint8_t* to = first + 2 * bytes;
        const uint8_t* from = src.data();
        const uintptr_t next = 0;
        choose_box_copy(shape, reinterpret_cast<uintptr_t>(to), stream).one(&to, &from, shape, &next);
        finish_streaming();
        for (uint64_t i = 0; i < 3; ++i) {
          CHECK(std::equal(from + i * bytes, from + (i + 1) * bytes, first + (2 - i) * bytes));
        }
        uint8_t* tos[kStrands] = {to, to, to, to};
        const uint8_t* froms[kStrands] = {from + 1, from + 2, from + 3, from};
        const uintptr_t nexts[kStrands] = {0, 1, 2, 3};
        choose_box_copy(shape, reinterpret_cast<uintptr_t>(to), stream)
            .strands(tos, froms, shape, nexts);
        finish_streaming();
        for (uint64_t i = 0; i < 3; ++i) {
          CHECK(std::equal(from + i * bytes, from + (i + 1) * bytes, first + (2 - i) * bytes));
        }
      }
    }
  }
  set_instruction_set(instruction_sets().front());
}

int main() {
  RUN(joining_tiles_keeps_every_byte_in_place);
  RUN(a_page_of_many_tiles_is_one_walk);
  RUN(copies_write_their_fragments_and_nothing_else);
  RUN(boxes_may_step_backwards);
  return 0;
}
