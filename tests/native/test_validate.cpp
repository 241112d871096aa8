// Hostile descriptors are refused, or harmless: whatever passes validation is carried out here on real
// memory, with an address sanitizer around it.
#include "check.h"
#include "engine.h"
#include "world.h"

using namespace vkvmap;
using namespace vkvmap::test;

namespace {

World small_world() {
  Random random(11);
  return random_world(random, 1, 2, false);
}

std::shared_ptr<Plan> plan_of(const World& world, const std::vector<uint8_t>& bytes) {
  return std::make_shared<Plan>(bytes.data(), bytes.size(), world.local_ranges(),
                                world.host_ranges(), world.names);
}

template <typename Change>
void refuses(const char* words, Change change) {
  World world = small_world();
  change(world);
  CHECK_REFUSED(world.plan(), words);
}

void sound_descriptors_pass() {
  Random random(12);
  for (int round = 0; round < 500; ++round) CHECK(random_world(random).plan());
}

void each_rule_is_enforced_by_name() {
  refuses("bytes is", [](World& w) { w.tiles[0].bytes += 1; });
  refuses("fragment_bytes is 0", [](World& w) { w.tiles[0].fragment_bytes = 0; });
  refuses("count[0] is 0", [](World& w) { w.tiles[0].count[0] = 0; });
  refuses("count[1]", [](World& w) { w.tiles[0].count[1] = 5000; });
  refuses("width_log2 is 5", [](World& w) { w.tiles[0].width_log2 = 5; });
  refuses("reserved0", [](World& w) { w.tiles[0].reserved0 = 1; });
  refuses("reserved1", [](World& w) { w.tiles[0].reserved1 = 1; });
  refuses("units_div", [](World& w) { w.tiles[0].units_div ^= 1; });
  refuses("count_div", [](World& w) { w.tiles[0].count_div ^= 1; });
  refuses("reserved is", [](World& w) { w.layers[0].reserved = 7; });
  refuses("layer_id", [](World& w) { w.layers[0].layer_id = 1000; });
  refuses("group is", [](World& w) { w.classes[0].group = 3; });
  refuses("num_writers is 0", [](World& w) { w.classes[0].num_writers = 0; });
  refuses("writer_index", [](World& w) { w.classes[0].writer_index = w.classes[0].num_writers; });
  refuses("pages_per_row is 0", [](World& w) { w.classes[0].pages_per_row = 0; });
  refuses("num_blocks is 0", [](World& w) { w.classes[0].num_blocks = 0; });
  refuses("declared cache tensor", [](World& w) { w.classes[0].num_blocks += 1000; });
  refuses("declared region section", [](World& w) { w.classes[0].num_rows += 1000; });
  refuses("declared cache tensor", [](World& w) { w.layers[0].local_base -= 4096; });
  refuses("declared region section", [](World& w) { w.layers[0].host_base += 1 << 20; });
  refuses("declared cache tensor", [](World& w) { w.layers[0].local_stride = uint64_t{1} << 63; });
  refuses("local offsets wrap", [](World& w) { w.tiles[0].local_offset = UINT64_MAX - 15; });
  refuses("one place", [](World& w) { w.layers[0].local_stride = 0; });
  refuses("store_page_bytes", [](World& w) { w.classes[0].store_page_bytes += 1; });
  refuses("load_page_bytes", [](World& w) { w.classes[0].load_page_fragments += 1; });
  refuses("first_layer", [](World& w) { w.classes[0].first_layer = 1; });
  refuses("num_layers", [](World& w) { w.classes[0].num_layers += 1; });
  refuses("its tiles are", [](World& w) { w.classes[0].load_num_tiles = UINT32_MAX; });
  refuses("groups", [](World& w) { w.num_groups = 1u << 31; });
}

void a_page_byte_that_is_written_twice_is_refused() {
  World world = small_world();
  world.tiles = {make_tile(16, 4, 1, 0, 16, 0, 0, 16, 0, 0), make_tile(16, 1, 1, 64, 0, 0, 48, 0, 0, 0)};
  LayerClass& c = world.classes[0];
  c.store_first_tile = c.load_first_tile = 0;
  c.store_num_tiles = c.load_num_tiles = 2;
  c.store_page_bytes = c.load_page_bytes = 80;
  c.store_page_fragments = c.load_page_fragments = 5;
  c.num_blocks = c.num_rows = c.pages_per_row = 1;
  world.cache.assign(4096, 0);
  world.region.assign(4096, 0);
  for (LayerEntry& e : world.layers) {
    e.local_base = reinterpret_cast<uint64_t>(world.cache.data());
    e.host_base = reinterpret_cast<uint64_t>(world.region.data());
  }
  CHECK_REFUSED(world.plan(), "byte 48 of the canonical page is written twice");
}

void every_truncation_is_refused() {
  const World world = small_world();
  const std::vector<uint8_t> whole = world.bytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    CHECK_REFUSED(plan_of(world, std::vector<uint8_t>(whole.begin(), whole.begin() + size)),
                  "descriptor");
  }
  std::vector<uint8_t> longer = whole;
  longer.push_back(0);
  CHECK_REFUSED(plan_of(world, longer), "descriptor of");
}

void ranges_that_touch_are_not_one_range() {
  World world = small_world();
  const std::vector<uint8_t> bytes = world.bytes();
  const uint64_t address = reinterpret_cast<uint64_t>(world.cache.data());
  const uint64_t half = world.cache.size() / 2;
  auto with = [&](std::vector<Range> local) {
    return std::make_shared<Plan>(bytes.data(), bytes.size(), std::move(local),
                                  world.host_ranges(), world.names);
  };
  CHECK_REFUSED(with({{address, half}, {address + half, world.cache.size() - half}}),
                "declared cache tensor");
  CHECK(with({{address, half + 1}, {address + half, world.cache.size() - half}}));
  CHECK_REFUSED(with({{UINT64_MAX - 8, 100}}), "64-bit address space");
  CHECK_REFUSED(with({}), "declared cache tensor");
}

// Changes some bytes of a sound descriptor; what is still accepted must stay inside its memory.
void mutated_descriptors_are_refused_or_harmless() {
  Random random(13);
  const std::shared_ptr<Engine> engine = Engine::create(1);
  const int rounds = std::getenv("VKVMAP_FUZZ_ROUNDS") ? std::atoi(std::getenv("VKVMAP_FUZZ_ROUNDS"))
                                                       : 20000;
  int accepted = 0;
  for (int round = 0; round < rounds; ++round) {
    World world = random_world(random, 2, 2);
    std::vector<uint8_t> bytes = world.bytes();
    const uint64_t changes = pick(random, 1, 3);
    for (uint64_t i = 0; i < changes; ++i) {
      const size_t at = pick(random, 0, bytes.size() / 4 - 1) * 4;
      switch (pick(random, 0, 4)) {
        case 0: bytes[at + pick(random, 0, 3)] ^= static_cast<uint8_t>(1u << pick(random, 0, 7)); break;
        case 1: std::memset(&bytes[at], static_cast<int>(pick(random, 0, 1)) * 0xFF, 4); break;
        case 2: bytes[at] = static_cast<uint8_t>(bytes[at] + 16); break;
        case 3: std::memcpy(&bytes[at], &bytes[pick(random, 0, bytes.size() / 4 - 1) * 4], 4); break;
        default: bytes[at] = static_cast<uint8_t>(random()); break;
      }
    }
    std::shared_ptr<Plan> plan;
    try {
      plan = plan_of(world, bytes);
    } catch (const std::invalid_argument&) {
      continue;
    }
    ++accepted;
    for (Direction direction : {Direction::Store, Direction::Load}) {
      SubmitRequest request;
      request.plan = plan;
      request.direction = direction;
      std::vector<std::vector<int64_t>> ids;
      ids.reserve(2 * plan->groups().size());
      for (uint32_t g = 0; g < plan->groups().size(); ++g) {
        const GroupInfo& info = plan->groups()[g];
        if (info.classes.empty()) continue;
        // The outermost ids: where a bound that is off by one would show.
        const auto last_block = static_cast<int64_t>(info.num_blocks - 1);
        const auto last_page = static_cast<int64_t>(info.num_pages - 1);
        ids.push_back(last_block ? std::vector<int64_t>{0, last_block} : std::vector<int64_t>{0});
        ids.push_back(last_page ? std::vector<int64_t>{0, last_page} : std::vector<int64_t>{0});
        const size_t count = std::min(ids[ids.size() - 2].size(), ids.back().size());
        request.groups.push_back({g, ids[ids.size() - 2].data() + ids[ids.size() - 2].size() - count,
                                  ids.back().data() + ids.back().size() - count, count});
      }
      const JobPtr job = engine->submit(request);
      CHECK(job->wait(-1));
      CHECK(job->result().error.empty());
    }
  }
  std::printf("  %d of %d accepted\n", accepted, rounds);
}

}  // namespace

int main() {
  RUN(sound_descriptors_pass);
  RUN(each_rule_is_enforced_by_name);
  RUN(a_page_byte_that_is_written_twice_is_refused);
  RUN(every_truncation_is_refused);
  RUN(ranges_that_touch_are_not_one_range);
  RUN(mutated_descriptors_are_refused_or_harmless);
  return 0;
}
