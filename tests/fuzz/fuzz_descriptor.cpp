// Hostile descriptors: whatever the bytes are, a plan is refused, or it is safe to carry out.
//
// An input is 16 bytes of choices, then a descriptor whose base addresses count from the start of
// two arenas that lie between unmapped pages. What Plan accepts is carried out by the host mover;
// beside the guard pages and the sanitizers, three things are checked that share no code with it:
// every address of every tile lies in its arena, no other byte changes, and where no byte is written
// twice, every byte is the right one.
//
// Two drivers: libFuzzer (clang, -DVKVMAP_LIBFUZZER), or the loop below, which needs nothing but a
// compiler. Both mutate bytes and mostly repair what a checksum would hide behind (counts, totals,
// multipliers), so that the rules behind the first ones are reached too.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../native/world.h"
#include "host_copy.h"
#include "host_mover.h"
#include "mover.h"

namespace {

using namespace vkvmap;

constexpr size_t kArena = 1 << 16;
constexpr size_t kChoices = 16;
constexpr size_t kMostInput = 1 << 14;
constexpr uint64_t kMostMoved = 1 << 20;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz_descriptor: %s\n", what);
  std::abort();
}

// kArena bytes with an unmapped page on either side.
uint8_t* guarded() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* all = mmap(nullptr, kArena + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) fail("no memory for an arena");
  auto* start = static_cast<uint8_t*>(all) + page;
  if (mprotect(start, kArena, PROT_READ | PROT_WRITE) != 0) fail("mprotect");
  std::mt19937_64 random(1);
  for (size_t i = 0; i < kArena; ++i) start[i] = static_cast<uint8_t>(random());
  return start;
}

struct Arenas {
  uint8_t* cache = guarded();
  uint8_t* region = guarded();
};

Arenas& arenas() {
  static Arenas all;
  return all;
}

struct Counts {
  uint64_t inputs = 0, accepted = 0, moved = 0, compared = 0;
} counts;

// Where the descriptor's parts would be, if its header is believed and they fit.
struct Parts {
  DescriptorHeader* header = nullptr;
  LayerClass* classes = nullptr;
  LayerEntry* layers = nullptr;
  Tile* tiles = nullptr;
};

Parts parts_of(uint8_t* data, size_t size) {
  Parts parts;
  if (size < sizeof(DescriptorHeader)) return parts;
  auto* header = reinterpret_cast<DescriptorHeader*>(data);
  const uint64_t classes = uint64_t{header->num_classes} * sizeof(LayerClass);
  const uint64_t layers = uint64_t{header->num_layers} * sizeof(LayerEntry);
  const uint64_t tiles = uint64_t{header->num_tiles} * sizeof(Tile);
  if (classes > size || layers > size || tiles > size) return parts;
  if (sizeof(*header) + classes + layers + tiles > size) return parts;
  parts.header = header;
  parts.classes = reinterpret_cast<LayerClass*>(data + sizeof(*header));
  parts.layers = reinterpret_cast<LayerEntry*>(data + sizeof(*header) + classes);
  parts.tiles = reinterpret_cast<Tile*>(data + sizeof(*header) + classes + layers);
  return parts;
}

// Adds the arenas' addresses (+1) or takes them away (-1), modulo 2^64.
void relocate(uint8_t* data, size_t size, int sign) {
  const Parts parts = parts_of(data, size);
  if (!parts.header) return;
  for (uint32_t l = 0; l < parts.header->num_layers; ++l) {
    const auto local = reinterpret_cast<uint64_t>(arenas().cache);
    const auto host = reinterpret_cast<uint64_t>(arenas().region);
    parts.layers[l].local_base += sign > 0 ? local : -local;
    parts.layers[l].host_base += sign > 0 ? host : -host;
  }
}

struct Carried {
  uint64_t source, destination;  // offsets in the arenas
};

// Every byte that the lists move, one by one, straight from the format's definition.
std::vector<Carried> bytes_of(const Transfer& transfer) {
  const Plan& plan = *transfer.plan;
  const bool store = transfer.direction == Direction::Store;
  const auto cache = reinterpret_cast<uint64_t>(arenas().cache);
  const auto region = reinterpret_cast<uint64_t>(arenas().region);
  std::vector<Carried> all;
  for (const WorkList& list : transfer.lists) {
    const LayerClass& c = plan.classes()[list.class_index];
    const uint32_t first = plan.first_tile(c, transfer.direction);
    const uint32_t count = plan.num_tiles(c, transfer.direction);
    for (uint32_t l = list.first_layer; l < list.first_layer + list.num_layers; ++l) {
      const LayerEntry& e = plan.layers()[l];
      for (uint64_t p = 0; p < list.num_pairs; ++p) {
        const BlockPair& pair = list.pairs[p];
        const uint64_t local = e.local_base + pair.block * e.local_stride - cache;
        const uint64_t host =
            e.host_base + pair.row * e.host_row_stride + pair.page * e.host_page_stride - region;
        for (uint32_t t = first; t < first + count; ++t) {
          const Tile& tile = plan.tiles()[t];
          for (uint64_t j = 0; j < tile.count[1]; ++j) {
            for (uint64_t i = 0; i < tile.count[0]; ++i) {
              for (uint64_t b = 0; b < tile.fragment_bytes; ++b) {
                const uint64_t x = local + tile.local_offset + i * tile.local_stride[0] +
                                   j * tile.local_stride[1] + b;
                const uint64_t y = host + tile.host_offset + i * tile.host_stride[0] +
                                   j * tile.host_stride[1] + b;
                if (x >= kArena || y >= kArena) fail("an accepted tile leaves its arena");
                all.push_back(store ? Carried{x, y} : Carried{y, x});
              }
            }
          }
        }
      }
    }
  }
  return all;
}

void carry_out(const std::shared_ptr<Plan>& plan, const uint8_t* choices) {
  Transfer transfer;
  transfer.plan = plan;
  transfer.direction = choices[0] & 1 ? Direction::Load : Direction::Store;
  const bool store = transfer.direction == Direction::Store;
  transfer.pairs.resize(plan->groups().size());
  uint64_t work = 0;
  for (size_t g = 0; g < plan->groups().size(); ++g) {
    const GroupInfo& group = plan->groups()[g];
    if (group.classes.empty()) continue;
    const uint64_t most = std::min<uint64_t>(7, std::min(group.num_blocks, group.num_pages));
    for (uint64_t p = 0; p < most; ++p) {
      // From both ends: the first and the last block and page are where mistakes show.
      const uint64_t block = p & 1 ? group.num_blocks - 1 - p / 2 : p / 2;
      uint64_t page = (choices[1] ^ p) & 1 ? group.num_pages - 1 - p / 2 : p / 2;
      if (store == false && choices[2] & 1) page = 0;  // two blocks may be loaded from one page
      transfer.pairs[g].push_back({block, static_cast<uint32_t>(page / group.pages_per_row),
                                   static_cast<uint32_t>(page % group.pages_per_row)});
    }
    for (uint32_t k : group.classes) {
      const LayerClass& c = plan->classes()[k];
      WorkList list{};
      list.class_index = k;
      list.first_layer = c.first_layer;
      list.num_layers = c.num_layers;
      list.num_pairs = transfer.pairs[g].size();
      list.pairs = transfer.pairs[g].data();
      list.first_unit = transfer.num_units;
      if (list.num_pairs == 0 || plan->num_tiles(c, transfer.direction) == 0) continue;
      transfer.num_units += list.num_layers * list.num_pairs;
      work += plan->page_bytes(c, transfer.direction) * list.num_layers * list.num_pairs;
      transfer.lists.push_back(list);
    }
  }
  if (work > kMostMoved) return;
  const std::vector<Carried> carried = bytes_of(transfer);
  uint8_t* to = store ? arenas().region : arenas().cache;
  const uint8_t* from = store ? arenas().cache : arenas().region;
  std::vector<uint8_t> expected(to, to + kArena);
  std::vector<uint8_t> times(kArena, 0);
  bool once = true;
  for (const Carried& byte : carried) {
    expected[byte.destination] = from[byte.source];
    once = once && times[byte.destination] == 0;
    times[byte.destination] = 1;
  }
  Mover& mover = *host_mover();
  transfer.state = plan->mover_state(mover);
  const std::vector<std::string> sets = instruction_sets();
  set_instruction_set(sets[choices[3] % sets.size()]);
  set_host_streaming_bytes(choices[4] & 1 ? 0 : uint64_t{1} << 40);
  MoveReport report;
  const uint64_t middle = transfer.num_units ? choices[5] % (transfer.num_units + 1) : 0;
  mover.move(transfer, 0, middle, report);
  mover.move(transfer, middle, transfer.num_units, report);
  if (!report.failures.empty()) fail("a page of an accepted plan could not be moved");
  if (report.bytes != work) fail("not as many bytes were moved as were asked for");
  ++counts.moved;
  counts.compared += once;
  for (size_t i = 0; i < kArena; ++i) {
    if ((once || !times[i]) && to[i] != expected[i]) fail("a byte has another value than it should");
  }
}

void one_input(const uint8_t* data, size_t size) {
  ++counts.inputs;
  if (size < kChoices || size > kMostInput) return;
  // 8-byte aligned like the packer's array, and of exactly this size for the address sanitizer.
  std::vector<uint64_t> words((size - kChoices + 7) / 8);
  auto* descriptor = reinterpret_cast<uint8_t*>(words.data());
  if (size > kChoices) std::memcpy(descriptor, data + kChoices, size - kChoices);
  relocate(descriptor, size - kChoices, 1);
  std::shared_ptr<Plan> plan;
  try {
    plan = std::make_shared<Plan>(
        descriptor, size - kChoices,
        std::vector<Range>{{reinterpret_cast<uint64_t>(arenas().cache), kArena}},
        std::vector<Range>{{reinterpret_cast<uint64_t>(arenas().region), kArena}},
        std::vector<std::string>{});
  } catch (const std::invalid_argument& refusal) {
    if (std::strlen(refusal.what()) < 20) fail("a refusal that says nothing");
    return;
  }
  ++counts.accepted;
  carry_out(plan, data);
}

// ---- mutation ----------------------------------------------------------------------------------

using Random = std::mt19937_64;

uint64_t interesting(Random& random) {
  static constexpr uint64_t kValues[] = {0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 127, 128, 4095, 4096,
                                         4097, 65535, 65536, 0x7fffffff, 0x80000000, 0xffffffff,
                                         0x100000000, uint64_t{1} << 40, uint64_t{1} << 63,
                                         ~uint64_t{0}};
  const uint64_t value = kValues[random() % (sizeof(kValues) / sizeof(kValues[0]))];
  return random() % 4 == 0 ? uint64_t{0} - value : value;
}

void change_number(uint8_t* at, size_t width, Random& random) {
  uint64_t value = 0;
  std::memcpy(&value, at, width);
  switch (random() % 5) {
    case 0: value = interesting(random); break;
    case 1: value += random() % 33 - 16; break;
    case 2: value ^= uint64_t{1} << random() % (8 * width); break;
    case 3: value *= 2; break;
    default: value /= 2; break;
  }
  std::memcpy(at, &value, width);
}

// Makes totals, sums and multipliers true again, as a careful attacker would.
void repair(uint8_t* data, size_t size) {
  if (size < sizeof(DescriptorHeader)) return;
  auto* header = reinterpret_cast<DescriptorHeader*>(data);
  header->magic = kDescriptorMagic;
  header->version = kDescriptorVersion;
  header->total_bytes = size;
  const Parts parts = parts_of(data, size);
  if (!parts.header) return;
  for (uint32_t t = 0; t < header->num_tiles; ++t) {
    Tile& tile = parts.tiles[t];
    tile.bytes = tile.fragment_bytes * tile.count[0] * tile.count[1];
    tile.reserved0 = 0;
    tile.reserved1 = 0;
    const uint32_t units = tile.width_log2 < 32 ? tile.fragment_bytes >> tile.width_log2 : 0;
    if (units) tile.units_div = fastdiv_multiplier(units);
    if (tile.count[0]) tile.count_div = fastdiv_multiplier(tile.count[0]);
  }
  for (uint32_t k = 0; k < header->num_classes; ++k) {
    LayerClass& c = parts.classes[k];
    auto sums = [&](uint32_t first, uint32_t count, uint64_t& bytes, uint64_t& fragments) {
      bytes = fragments = 0;
      for (uint64_t t = first; t < uint64_t{first} + count && t < header->num_tiles; ++t) {
        bytes += parts.tiles[t].bytes;
        fragments += uint32_t{parts.tiles[t].count[0]} * parts.tiles[t].count[1];
      }
    };
    sums(c.store_first_tile, c.store_num_tiles, c.store_page_bytes, c.store_page_fragments);
    sums(c.load_first_tile, c.load_num_tiles, c.load_page_bytes, c.load_page_fragments);
  }
}

void mutate(std::vector<uint8_t>& input, Random& random) {
  for (uint64_t i = 0; i <= random() % 4; ++i) {
    if (input.size() < kChoices + 8) input.resize(kChoices + sizeof(DescriptorHeader));
    uint8_t* body = input.data() + kChoices;
    const size_t size = input.size() - kChoices;
    const Parts parts = parts_of(body, size);
    switch (random() % 8) {
      case 0:
        input[random() % input.size()] = static_cast<uint8_t>(random());
        break;
      case 1:
        input.resize(kChoices + random() % (size + 1));
        break;
      case 2:
        if (size >= 16) std::memcpy(body + random() % (size - 8), body + random() % (size - 8), 8);
        break;
      case 3:  // one more tile, counted
        if (parts.header && parts.header->num_tiles && input.size() + sizeof(Tile) < kMostInput) {
          const Tile tile = parts.tiles[random() % parts.header->num_tiles];
          ++parts.header->num_tiles;
          const auto* raw = reinterpret_cast<const uint8_t*>(&tile);
          input.insert(input.end(), raw, raw + sizeof(tile));
        }
        break;
      default: {
        static constexpr size_t kWidths[] = {2, 4, 8};
        const size_t width = kWidths[random() % 3];
        if (size >= width) change_number(body + random() % (size / width) * width, width, random);
      }
    }
    if (random() % 4) input[random() % kChoices] = static_cast<uint8_t>(random());
  }
  if (random() % 8) repair(input.data() + kChoices, input.size() - kChoices);
}

// A valid input: a random world whose memory fits the arenas.
std::vector<uint8_t> valid(Random& random) {
  for (;;) {
    std::mt19937_64 source(random());
    vkvmap::test::World world = vkvmap::test::random_world(source);
    if (world.cache.size() > kArena || world.region.size() > kArena) continue;
    for (LayerEntry& entry : world.layers) {
      entry.local_base -= reinterpret_cast<uint64_t>(world.cache.data());
      entry.host_base -= reinterpret_cast<uint64_t>(world.region.data());
    }
    const std::vector<uint8_t> bytes = world.bytes();
    if (bytes.size() + kChoices > kMostInput / 4) continue;
    std::vector<uint8_t> input(kChoices);
    for (uint8_t& choice : input) choice = static_cast<uint8_t>(random());
    input.insert(input.end(), bytes.begin(), bytes.end());
    return input;
  }
}

}  // namespace

#ifdef VKVMAP_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  one_input(data, size);
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  Random random(seed);
  if (random() % 3 == 0) {
    size = LLVMFuzzerMutate(data, size, max_size);
    if (size > kChoices && random() % 2) repair(data + kChoices, size - kChoices);
    return size;
  }
  std::vector<uint8_t> input(data, data + size);
  mutate(input, random);
  input.resize(std::min(input.size(), max_size));
  if (!input.empty()) std::memcpy(data, input.data(), input.size());
  return input.size();
}

#else

namespace {

std::vector<uint8_t> current;

void save_current(int) {  // async-signal-safe: what was being tried when it died
  const int file = creat("descriptor.crash", 0600);
  if (file >= 0 && write(file, current.data(), current.size()) < 0) _exit(3);
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

std::vector<uint8_t> read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

// fuzz_descriptor SECONDS SEED CORPUS_DIR | fuzz_descriptor --make COUNT SEED DIR
int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--make") {
    Random random(std::stoull(argv[3]));
    for (int i = 0; i < std::stoi(argv[2]); ++i) {
      const std::vector<uint8_t> input = valid(random);
      std::ofstream(std::string(argv[4]) + "/valid-" + std::to_string(i), std::ios::binary)
          .write(reinterpret_cast<const char*>(input.data()),
                 static_cast<std::streamsize>(input.size()));
    }
    return 0;
  }
  if (argc != 4) {
    std::fprintf(stderr, "usage: fuzz_descriptor SECONDS SEED CORPUS_DIR\n");
    return 2;
  }
  for (int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGALRM}) std::signal(signal, save_current);
  std::vector<std::vector<uint8_t>> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(argv[3])) {
    corpus.push_back(read_file(entry.path()));
  }
  std::sort(corpus.begin(), corpus.end());
  if (corpus.empty()) fail("the corpus is empty");
  for (const auto& input : corpus) one_input(input.data(), input.size());
  if (counts.accepted == 0) fail("no input of the corpus is accepted: the corpus is stale");
  Random random(std::stoull(argv[2]));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::stoi(argv[1]));
  while (std::chrono::steady_clock::now() < end) {
    current = random() % 8 ? corpus[random() % corpus.size()] : valid(random);
    mutate(current, random);
    alarm(10);  // nothing may hang
    const uint64_t accepted = counts.accepted;
    one_input(current.data(), current.size());
    alarm(0);
    // Accepted mutants are rare and good starting points.
    if (counts.accepted > accepted && corpus.size() < 4096) corpus.push_back(current);
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("%llu inputs, %llu accepted, %llu carried out, %llu compared byte for byte, %ld MiB\n",
              static_cast<unsigned long long>(counts.inputs),
              static_cast<unsigned long long>(counts.accepted),
              static_cast<unsigned long long>(counts.moved),
              static_cast<unsigned long long>(counts.compared), usage.ru_maxrss / 1024);
  return 0;
}

#endif
