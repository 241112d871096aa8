// Random plans with an oracle that knows nothing of tiles.
//
// A layer's page is described as boxes of equal fragments. The packer below cuts the boxes into tiles;
// the oracle walks the boxes byte by byte. Memory around the pages is poisoned and compared as well.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda_cpu.h"
#include "cuda_mover.h"
#include "fastdiv.h"
#include "pinning.h"
#include "tile.h"

namespace test {

using namespace vkvmap;

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

struct Random {
  explicit Random(uint64_t seed) : engine(seed) {}
  uint64_t below(uint64_t n) { return engine() % n; }
  uint64_t from(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return *(list.begin() + below(list.size()));
  }
  std::mt19937_64 engine;
};

struct Box {
  uint64_t bytes, n0, n1;
  uint64_t local, host, local_stride[2], host_stride[2];
};

template <class Byte>
void each_byte(const std::vector<Box>& boxes, Byte byte) {
  for (const Box& b : boxes)
    for (uint64_t j = 0; j < b.n1; ++j)
      for (uint64_t i = 0; i < b.n0; ++i)
        for (uint64_t k = 0; k < b.bytes; ++k)
          byte(b.local + i * b.local_stride[0] + j * b.local_stride[1] + k,
               b.host + i * b.host_stride[0] + j * b.host_stride[1] + k);
}

inline uint16_t width_log2(std::initializer_list<uint64_t> values) {
  uint64_t all = 16;
  for (const uint64_t v : values) all |= v;
  return static_cast<uint16_t>(__builtin_ctzll(all));
}

inline Tile make_tile(uint64_t local, uint64_t host, uint64_t bytes, uint64_t n0, uint64_t n1,
                      const Box& b, uint64_t alignment) {
  Tile t = {};
  t.local_offset = local;
  t.host_offset = host;
  t.fragment_bytes = static_cast<uint32_t>(bytes);
  t.count[0] = static_cast<uint16_t>(n0);
  t.count[1] = static_cast<uint16_t>(n1);
  t.bytes = static_cast<uint32_t>(bytes * n0 * n1);
  for (int d = 0; d < 2; ++d) {
    t.local_stride[d] = (d == 0 ? n0 : n1) > 1 ? b.local_stride[d] : 0;
    t.host_stride[d] = (d == 0 ? n0 : n1) > 1 ? b.host_stride[d] : 0;
  }
  t.width_log2 = width_log2({local, host, bytes, t.local_stride[0], t.local_stride[1],
                             t.host_stride[0], t.host_stride[1], alignment});
  t.units_div = fastdiv_multiplier(t.fragment_bytes >> t.width_log2);
  t.count_div = fastdiv_multiplier(t.count[0]);
  return t;
}

// Tiles of at most kTileBytes. `alignment` is what bases and page strides are multiples of.
inline std::vector<Tile> cut(const std::vector<Box>& boxes, uint64_t alignment) {
  std::vector<Tile> tiles;
  for (const Box& b : boxes) {
    if (b.bytes > kTileBytes) {
      for (uint64_t j = 0; j < b.n1; ++j)
        for (uint64_t i = 0; i < b.n0; ++i)
          for (uint64_t at = 0; at < b.bytes; at += kTileBytes)
            tiles.push_back(make_tile(b.local + i * b.local_stride[0] + j * b.local_stride[1] + at,
                                      b.host + i * b.host_stride[0] + j * b.host_stride[1] + at,
                                      std::min<uint64_t>(kTileBytes, b.bytes - at), 1, 1, b,
                                      alignment));
      continue;
    }
    const uint64_t fit = kTileBytes / b.bytes;
    const uint64_t per = b.n0 <= fit ? b.n0 : fit, rows = b.n0 <= fit ? std::max<uint64_t>(1, fit / b.n0) : 1;
    for (uint64_t j = 0; j < b.n1; j += rows)
      for (uint64_t i = 0; i < b.n0; i += per)
        tiles.push_back(make_tile(b.local + i * b.local_stride[0] + j * b.local_stride[1],
                                  b.host + i * b.host_stride[0] + j * b.host_stride[1], b.bytes,
                                  std::min(per, b.n0 - i), std::min(rows, b.n1 - j), b, alignment));
  }
  return tiles;
}

struct ClassShape {
  std::vector<Box> boxes;
  uint64_t alignment;     // of bases and strides
  uint64_t local_extent, host_extent;
  uint64_t local_stride;  // from block to block
  uint64_t page_stride;   // from canonical page to page
  uint32_t num_layers;
};

// A box of fragments in [outer][inner] order on the host and in either order in the cache.
inline ClassShape random_class(Random& r) {
  ClassShape c;
  c.alignment = r.one_of<uint64_t>({16, 16, 16, 8, 4, 2, 1});
  c.num_layers = static_cast<uint32_t>(r.from(1, 4));
  const uint64_t a = c.alignment;
  uint64_t local = a * r.below(3), host = a * r.below(3);
  const uint64_t num_boxes = r.from(1, 3);
  for (uint64_t n = 0; n < num_boxes; ++n) {
    Box b;
    b.bytes = r.one_of<uint64_t>({a, 3 * a, 7 * a, 16 * a, 41 * a, 128, 256, 528, 656, 4096, 4112, 9000});
    b.bytes = std::max<uint64_t>(a, b.bytes / a * a);
    b.n0 = b.bytes > 1024 ? r.from(1, 3) : r.from(1, 40);
    b.n1 = b.bytes > 1024 ? r.from(1, 3) : r.from(1, 9);
    b.host_stride[0] = b.bytes + a * r.one_of<uint64_t>({0, 0, 1, 8});
    b.host_stride[1] = b.n0 * b.host_stride[0] + a * r.one_of<uint64_t>({0, 1, 5});
    const uint64_t gap = b.bytes + a * r.one_of<uint64_t>({0, 0, 3});
    if (r.below(2)) {
      b.local_stride[0] = gap;
      b.local_stride[1] = b.n0 * gap;
    } else {
      b.local_stride[1] = gap;
      b.local_stride[0] = b.n1 * gap;
    }
    b.local = local;
    b.host = host;
    local += b.n0 * b.n1 * gap + a * r.below(3);
    host += b.n1 * b.host_stride[1] + a * r.below(3);
    c.boxes.push_back(b);
  }
  c.local_extent = local;
  c.host_extent = host;
  c.local_stride = local + a * r.one_of<uint64_t>({0, 0, 4, 16});
  c.page_stride = host + a * r.one_of<uint64_t>({0, 0, 2});
  return c;
}

// Memory whose pages can be mapped twice, for device aliases.
struct HostMemory {
  explicit HostMemory(size_t n) : bytes((n + 4095) / 4096 * 4096) {
    data = static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    CHECK(data != MAP_FAILED, "mmap of %zu bytes", bytes);
  }
  ~HostMemory() { munmap(data, bytes); }
  HostMemory(const HostMemory&) = delete;
  size_t bytes;
  uint8_t* data;
};

struct DeviceMemory {
  explicit DeviceMemory(size_t n) : bytes(n) {
    CHECK(cudaMalloc(reinterpret_cast<void**>(&data), n) == cudaSuccess, "cudaMalloc");
  }
  ~DeviceMemory() { cudaFree(data); }
  DeviceMemory(const DeviceMemory&) = delete;
  size_t bytes;
  uint8_t* data = nullptr;
};

constexpr uint64_t kPad = 4096;

// Caches, a region, a plan over both, and what either side should look like.
struct World {
  std::vector<ClassShape> shapes;
  uint64_t num_blocks, num_rows;
  uint32_t pages_per_row;
  uint64_t row_stride = 0;
  std::unique_ptr<DeviceMemory> cache;
  std::unique_ptr<HostMemory> region;
  std::vector<uint64_t> local_base, host_base;  // per layer, addresses
  std::shared_ptr<const Plan> plan;

  World(Random& r, std::vector<ClassShape> s, uint64_t blocks, uint64_t rows, uint32_t pages)
      : shapes(std::move(s)), num_blocks(blocks), num_rows(rows), pages_per_row(pages) {
    uint64_t cache_bytes = kPad, row = 0;
    std::vector<uint64_t> local_at, host_at;
    for (const ClassShape& c : shapes)
      for (uint32_t l = 0; l < c.num_layers; ++l) {
        const uint64_t skew = c.alignment * r.below(4);
        local_at.push_back((cache_bytes + 511) / 512 * 512 + skew);
        cache_bytes = local_at.back() + num_blocks * c.local_stride + kPad;
        host_at.push_back((row + c.alignment - 1) / c.alignment * c.alignment);
        row = host_at.back() + pages_per_row * c.page_stride;
      }
    row_stride = (row + 4095) / 4096 * 4096;
    cache = std::make_unique<DeviceMemory>(cache_bytes);
    region = std::make_unique<HostMemory>(num_rows * row_stride + 2 * kPad);
    for (const uint64_t at : local_at)
      local_base.push_back(reinterpret_cast<uint64_t>(cache->data) + at);
    for (const uint64_t at : host_at)
      host_base.push_back(reinterpret_cast<uint64_t>(region->data) + kPad + at);
    pack();
  }

  void pack() {
    DescriptorHeader h = {};
    h.magic = kDescriptorMagic;
    h.version = kDescriptorVersion;
    h.num_groups = 1;
    std::vector<LayerClass> classes;
    std::vector<LayerEntry> layers;
    std::vector<Tile> tiles;
    for (const ClassShape& shape : shapes) {
      LayerClass c = {};
      c.first_layer = static_cast<uint32_t>(layers.size());
      c.num_layers = shape.num_layers;
      c.num_writers = 1;
      c.pages_per_row = pages_per_row;
      const std::vector<Tile> own = cut(shape.boxes, shape.alignment);
      c.store_first_tile = c.load_first_tile = static_cast<uint32_t>(tiles.size());
      c.store_num_tiles = c.load_num_tiles = static_cast<uint32_t>(own.size());
      for (const Tile& t : own) {
        c.store_page_bytes += t.bytes;
        c.store_page_fragments += t.count[0] * t.count[1];
      }
      c.load_page_bytes = c.store_page_bytes;
      c.load_page_fragments = c.store_page_fragments;
      c.num_blocks = num_blocks;
      c.num_rows = num_rows;
      tiles.insert(tiles.end(), own.begin(), own.end());
      for (uint32_t l = 0; l < shape.num_layers; ++l) {
        const size_t id = layers.size();
        layers.push_back({local_base[id], shape.local_stride, host_base[id], row_stride,
                          shape.page_stride, static_cast<uint32_t>(id), 0});
      }
      classes.push_back(c);
    }
    h.num_classes = static_cast<uint32_t>(classes.size());
    h.num_layers = static_cast<uint32_t>(layers.size());
    h.num_tiles = static_cast<uint32_t>(tiles.size());
    h.total_bytes = sizeof h + classes.size() * sizeof(LayerClass) +
                    layers.size() * sizeof(LayerEntry) + tiles.size() * sizeof(Tile);
    std::vector<uint64_t> words((h.total_bytes + 7) / 8);
    uint8_t* at = reinterpret_cast<uint8_t*>(words.data());
    const auto put = [&](const void* data, size_t n) {
      std::memcpy(at, data, n);
      at += n;
    };
    put(&h, sizeof h);
    put(classes.data(), classes.size() * sizeof(LayerClass));
    put(layers.data(), layers.size() * sizeof(LayerEntry));
    put(tiles.data(), tiles.size() * sizeof(Tile));
    std::vector<std::string> names;
    for (size_t i = 0; i < layers.size(); ++i) names.push_back("layer." + std::to_string(i));
    plan = std::make_shared<Plan>(
        words.data(), h.total_bytes,
        std::vector<Range>{{reinterpret_cast<uint64_t>(cache->data), cache->bytes}},
        std::vector<Range>{{reinterpret_cast<uint64_t>(region->data), region->bytes}}, names);
  }

  void fill(Random& r) {
    for (size_t i = 0; i < cache->bytes; ++i) cache->data[i] = static_cast<uint8_t>(r.engine());
    for (size_t i = 0; i < region->bytes; ++i) region->data[i] = static_cast<uint8_t>(r.engine());
  }

  // Moves what the transfer should move within the two copies, one byte at a time.
  void oracle(Direction d, const std::vector<BlockPair>& pairs, uint32_t first_layer,
              uint32_t num_layers, std::vector<uint8_t>& cache_copy,
              std::vector<uint8_t>& region_copy) const {
    uint32_t layer = 0;
    for (const ClassShape& shape : shapes)
      for (uint32_t l = 0; l < shape.num_layers; ++l, ++layer) {
        if (layer < first_layer || layer >= first_layer + num_layers) continue;
        for (const BlockPair& p : pairs) {
          if (p.block == ~uint64_t{0}) continue;
          const uint64_t local = local_base[layer] - reinterpret_cast<uint64_t>(cache->data) +
                                 p.block * shape.local_stride;
          const uint64_t host = host_base[layer] - reinterpret_cast<uint64_t>(region->data) +
                                p.row * row_stride + p.page * shape.page_stride;
          each_byte(shape.boxes, [&](uint64_t in_local, uint64_t in_host) {
            if (d == Direction::Store)
              region_copy[host + in_host] = cache_copy[local + in_local];
            else
              cache_copy[local + in_local] = region_copy[host + in_host];
          });
        }
      }
  }

  // Distinct blocks and distinct pages.
  std::vector<BlockPair> random_pairs(Random& r, uint64_t n) const {
    std::vector<uint64_t> blocks(num_blocks), pages(num_rows * pages_per_row);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), r.engine);
    std::shuffle(pages.begin(), pages.end(), r.engine);
    std::vector<BlockPair> pairs;
    for (uint64_t i = 0; i < std::min<uint64_t>({n, blocks.size(), pages.size()}); ++i)
      pairs.push_back(make_pair(blocks[i], pages[i], pages_per_row));
    return pairs;
  }

  // All layers of all classes, one list per class; or one per layer, as when progress is wanted.
  Transfer transfer(Direction d, std::vector<BlockPair> pairs, std::shared_ptr<void> state,
                    bool by_layer = false) const {
    Transfer t;
    t.plan = plan;
    t.direction = d;
    t.pairs.push_back(std::move(pairs));
    t.state = std::move(state);
    uint32_t layer = 0;
    for (uint32_t c = 0; c < shapes.size(); ++c) {
      const uint32_t step = by_layer ? 1 : shapes[c].num_layers;
      for (uint32_t l = 0; l < shapes[c].num_layers; l += step, layer += step) {
        WorkList list = {c, layer, step, t.pairs[0].size(), t.pairs[0].data(), t.num_units};
        t.num_units += list.num_layers * list.num_pairs;
        const LayerClass& k = plan->classes()[c];
        t.bytes += list.num_layers * list.num_pairs * plan->page_bytes(k, d);
        t.lists.push_back(list);
      }
    }
    return t;
  }

  uint32_t num_layers() const {
    uint32_t n = 0;
    for (const ClassShape& c : shapes) n += c.num_layers;
    return n;
  }
};

// Both sides as they should be, to compare with.
struct Expected {
  std::vector<uint8_t> cache, region;
  explicit Expected(const World& w)
      : cache(w.cache->data, w.cache->data + w.cache->bytes),
        region(w.region->data, w.region->data + w.region->bytes) {}
  void check(const World& w, const char* what) const {
    for (size_t i = 0; i < cache.size(); ++i)
      CHECK(cache[i] == w.cache->data[i], "%s: cache byte %zu is %d, not %d", what, i,
            w.cache->data[i], cache[i]);
    for (size_t i = 0; i < region.size(); ++i)
      CHECK(region[i] == w.region->data[i], "%s: region byte %zu is %d, not %d", what, i,
            w.region->data[i], region[i]);
  }
};

inline std::unique_ptr<Registration> pin(const World& w, uint64_t max_bytes = kMaxPieceBytes) {
  return std::make_unique<Registration>(
      std::vector<PinRange>{{reinterpret_cast<uint64_t>(w.region->data), w.region->bytes, 4096}},
      max_bytes);
}

inline World random_world(Random& r) {
  std::vector<ClassShape> shapes;
  const uint64_t n = r.from(1, 3);
  for (uint64_t i = 0; i < n; ++i) shapes.push_back(random_class(r));
  return World(r, std::move(shapes), r.from(1, 6), r.from(1, 3),
               static_cast<uint32_t>(r.from(1, 3)));
}

inline KernelTuning random_tuning(Random& r) {
  KernelTuning t;
  t.ctas = static_cast<uint32_t>(r.from(1, 9));
  t.threads = static_cast<uint32_t>(r.one_of({32, 64, 256}));
  t.unroll = static_cast<uint32_t>(r.one_of({8, 8, 4}));
  t.stream_hints = t.unroll == 4 || r.below(2);
  t.slice_bytes = r.one_of<uint64_t>({0, 1, 10000, 1 << 20, 64 << 20});
  return t;
}

}  // namespace test
