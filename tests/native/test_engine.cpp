// Jobs: whatever overlaps, the bytes are those of the transfers carried out one after the other in the
// order of their submission.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "engine.h"
#include "host_copy.h"
#include "host_mover.h"
#include "world.h"

using namespace vkvmap;
using namespace vkvmap::test;

namespace {

int rounds(int usual) {
#if defined(__SANITIZE_THREAD__)
  usual = (usual + 2) / 3;  // twenty times slower there, and one round has hundreds of jobs
#endif
  const char* factor = std::getenv("VKVMAP_ROUNDS");
  return factor ? usual * std::atoi(factor) : usual;
}

// One transfer as data, for the engine and for the oracle alike.
struct Order {
  Direction direction = Direction::Store;
  bool expedited = false;
  LayerRange layers;
  struct List {
    uint32_t group;
    std::vector<int64_t> blocks, pages;
  };
  std::vector<List> lists;
};

Order random_order(Random& random, const World& world, uint64_t most = 6) {
  Order order;
  order.direction = pick(random, 0, 1) ? Direction::Load : Direction::Store;
  order.expedited = order.direction == Direction::Load && pick(random, 0, 3) == 0;
  if (pick(random, 0, 3) == 0) {
    order.layers.first = static_cast<uint32_t>(pick(random, 0, world.layers.size()));
    order.layers.end =
        order.layers.first + static_cast<uint32_t>(pick(random, 0, world.layers.size()));
  }
  for (uint32_t g = 0; g < world.num_groups; ++g) {
    if (pick(random, 0, 4) == 0) continue;
    const LayerClass& c = world.classes[g];
    const uint64_t pages = c.num_rows * c.pages_per_row;
    const uint64_t count = pick(random, 0, std::min({most, c.num_blocks, pages}));
    order.lists.push_back(
        {g, distinct(random, c.num_blocks, count), distinct(random, pages, count)});
    Order::List& list = order.lists.back();
    const size_t both = std::min(list.blocks.size(), list.pages.size());
    list.blocks.resize(both);
    list.pages.resize(both);
  }
  return order;
}

SubmitRequest request_of(const Order& order, const std::shared_ptr<const Plan>& plan) {
  SubmitRequest request;
  request.plan = plan;
  request.direction = order.direction;
  request.expedited = order.expedited;
  request.layers = order.layers;
  for (const Order::List& list : order.lists) {
    request.groups.push_back(
        {list.group, list.blocks.data(), list.pages.data(), list.blocks.size()});
  }
  return request;
}

// Pages moved.
uint64_t oracle(const World& world, const Order& order) {
  uint64_t moved = 0;
  for (const Order::List& list : order.lists) {
    for (uint32_t k = 0; k < world.classes.size(); ++k) {
      const LayerClass& c = world.classes[k];
      if (c.group != list.group) continue;
      for (size_t i = 0; i < list.blocks.size(); ++i) {
        const auto page = static_cast<uint64_t>(list.pages[i]);
        if (order.direction == Direction::Store && page % c.num_writers != c.writer_index) continue;
        for (uint32_t l = c.first_layer; l < c.first_layer + c.num_layers; ++l) {
          if (world.layers[l].layer_id < order.layers.first ||
              world.layers[l].layer_id >= order.layers.end) {
            continue;
          }
          oracle_page(world, k, l, static_cast<uint64_t>(list.blocks[i]), page, order.direction);
          ++moved;
        }
      }
    }
  }
  return moved;
}

// What the oracle makes of the world; the world itself is put back.
struct Bytes {
  std::vector<uint8_t> cache, region;
  bool operator==(const Bytes& other) const {
    return cache == other.cache && region == other.region;
  }
};
Bytes bytes_of(const World& world) { return {world.cache, world.region}; }
void put_back(World& world, const Bytes& bytes) {
  std::copy(bytes.cache.begin(), bytes.cache.end(), world.cache.begin());
  std::copy(bytes.region.begin(), bytes.region.end(), world.region.begin());
}

void transfers_move_what_the_oracle_moves() {
  Random random(21);
  const std::shared_ptr<Engine> engine = Engine::create(2);
  const std::vector<std::string> sets = instruction_sets();
  for (int round = 0; round < rounds(1500); ++round) {
    set_instruction_set(sets[static_cast<size_t>(round) % sets.size()]);
    set_host_streaming_bytes(round % 2 ? 0 : 1 << 20);
    World world = random_world(random);
    world.scramble(random);
    const Bytes before = bytes_of(world);
    const Order order = random_order(random, world);
    const uint64_t pages = oracle(world, order);
    const Bytes expected = bytes_of(world);
    put_back(world, before);
    const JobPtr job = engine->submit(request_of(order, world.plan()));
    CHECK(job->wait(-1));
    CHECK(job->result().error.empty());
    CHECK(job->result().pages == pages);
    CHECK(bytes_of(world) == expected);
  }
  set_instruction_set(sets.front());
}

void bad_input_is_refused_and_nothing_moves() {
  Random random(22);
  World world = random_world(random, 1, 3);
  world.scramble(random);
  const std::shared_ptr<Plan> plan = world.plan();
  const std::shared_ptr<Engine> engine = Engine::create(1);
  const auto blocks = static_cast<int64_t>(world.classes[0].num_blocks);
  const auto pages =
      static_cast<int64_t>(world.classes[0].num_rows * world.classes[0].pages_per_row);
  const Bytes before = bytes_of(world);
  struct Case {
    Direction direction;
    std::vector<int64_t> blocks, pages;
    const char* words;
  };
  const std::vector<Case> cases = {
      {Direction::Store, {0, blocks}, {0, 1}, "index 1: block"},
      {Direction::Store, {0, -1}, {0, 1}, "block -1 is not in [0,"},
      {Direction::Load, {0, 1}, {pages, 0}, "index 0: page"},
      {Direction::Load, {0, 1}, {0, INT64_MIN}, "is not in [0,"},
      {Direction::Store, {0, 1, 2}, {1, 0, 1}, "index 2: page 1 is a destination twice"},
      {Direction::Load, {3, 0, 3}, {0, 1, 1}, "index 2: block 3 is a destination twice"},
  };
  for (const Case& bad : cases) {
    SubmitRequest request;
    request.plan = plan;
    request.direction = bad.direction;
    request.groups = {{0, bad.blocks.data(), bad.pages.data(), bad.blocks.size()}};
    CHECK_REFUSED(engine->submit(request), bad.words);
    CHECK_REFUSED(engine->submit(request), "model.layers.0");
  }
  const int64_t zero = 0;
  SubmitRequest request;
  request.plan = plan;
  request.groups = {{5, &zero, &zero, 1}};
  CHECK_REFUSED(engine->submit(request), "group 5 does not exist");
  request.groups = {{0, &zero, &zero, 1}, {0, &zero, &zero, 1}};
  CHECK_REFUSED(engine->submit(request), "listed twice");
  request.groups = {{0, &zero, &zero, 1}};
  request.expedited = true;
  CHECK_REFUSED(engine->submit(request), "cannot be expedited");
  CHECK(engine->in_flight() == 0);
  CHECK(bytes_of(world) == before);
  // Sources may repeat, and what was refused before is no duplicate now.
  const std::vector<int64_t> twice = {1, 1};
  const std::vector<int64_t> apart = {0, 1};
  request = SubmitRequest{};
  request.plan = plan;
  request.groups = {{0, twice.data(), apart.data(), 2}};
  CHECK(engine->submit(request)->wait(-1));
}

// Random jobs, stalls and cancellations on a few pages: the hard case for ordering.
void overlapping_jobs_end_as_if_one_after_the_other(int num_jobs, size_t threads, bool two_plans) {
  Random random(23 + threads);
  for (int round = 0; round < rounds(12); ++round) {
    World world = random_world(random, 3, 3);
    world.scramble(random);
    // Another plan over the same memory whose blocks are twice as far apart: ids mean other bytes.
    World other = world;
    other.cache.clear();
    other.region.clear();
    for (LayerClass& c : other.classes) c.num_blocks = (c.num_blocks + 1) / 2;
    for (LayerEntry& e : other.layers) e.local_stride *= 2;
    const std::shared_ptr<Plan> plan = world.plan();
    const std::vector<uint8_t> descriptor = other.bytes();
    const auto other_plan =
        std::make_shared<Plan>(descriptor.data(), descriptor.size(), world.local_ranges(),
                               world.host_ranges(), world.names);
    const std::shared_ptr<Engine> engine = Engine::create(threads);
    const Bytes before = bytes_of(world);
    struct Sent {
      Order order;
      bool other;
      JobPtr job;
    };
    std::vector<Sent> sent;
    std::array<std::vector<uint64_t>, kNumLanes> reported;
    for (int i = 0; i < num_jobs; ++i) {
      const bool use_other = two_plans && pick(random, 0, 2) == 0;
      Order order = random_order(random, use_other ? other : world);
      JobPtr job = engine->submit(request_of(order, use_other ? other_plan : plan));
      sent.push_back({std::move(order), use_other, std::move(job)});
      const uint64_t dice = pick(random, 0, 30);
      if (dice == 0) engine->stall(static_cast<uint32_t>(pick(random, 1, 7)));
      if (dice == 1) engine->resume();
      if (dice == 2) sent[pick(random, 0, sent.size() - 1)].job->cancel();
      if (dice == 3) {
        for (size_t lane = 0; lane < kNumLanes; ++lane) {
          for (const JobPtr& done : engine->finished(static_cast<Lane>(lane))) {
            CHECK(done->done());
            reported[lane].push_back(done->id());
          }
        }
      }
    }
    engine->resume();
    for (const Sent& one : sent) CHECK(one.job->wait(60));
    const Bytes moved = bytes_of(world);
    put_back(world, before);
    for (const Sent& one : sent) {
      if (one.job->result().cancelled) {
        CHECK(one.job->result().pages == 0);
        continue;
      }
      CHECK(oracle(one.other ? other : world, one.order) == one.job->result().pages);
    }
    CHECK(moved == bytes_of(world));
    size_t total = 0;
    for (size_t lane = 0; lane < kNumLanes; ++lane) {
      for (const JobPtr& done : engine->finished(static_cast<Lane>(lane))) {
        reported[lane].push_back(done->id());
      }
      CHECK(std::is_sorted(reported[lane].begin(), reported[lane].end()));
      total += reported[lane].size();
    }
    CHECK(total == sent.size());
    CHECK(engine->in_flight() == 0);
  }
}

void one_thread_orders_overlapping_jobs() {
  overlapping_jobs_end_as_if_one_after_the_other(300, 1, false);
}
void many_threads_order_overlapping_jobs() {
  overlapping_jobs_end_as_if_one_after_the_other(300, 4, false);
}
void plans_that_overlap_order_their_jobs() {
  overlapping_jobs_end_as_if_one_after_the_other(300, 3, true);
}

struct Simple {
  explicit Simple(uint64_t seed) {
    Random random(seed);
    world = random_world(random, 1, 2, false);
    world.classes[0].num_writers = 1;
    world.classes[0].writer_index = 0;
    world.scramble(random);
    plan = world.plan();
  }
  SubmitRequest request(Direction direction, int64_t block, int64_t page) {
    ids.push_back({block, page});
    SubmitRequest made;
    made.plan = plan;
    made.direction = direction;
    made.groups = {{0, &ids.back()[0], &ids.back()[1], 1}};
    return made;
  }
  World world;
  std::shared_ptr<Plan> plan;
  std::deque<std::array<int64_t, 2>> ids;
};

void independent_lanes_overtake_and_dependent_ones_wait() {
  Simple simple(31);
  const auto engine = Engine::create(2);
  engine->stall(1u << static_cast<uint32_t>(Lane::Store));
  const JobPtr store = engine->submit(simple.request(Direction::Store, 0, 0));
  const JobPtr free_load = engine->submit(simple.request(Direction::Load, 1, 1));
  const JobPtr bound_by_page = engine->submit(simple.request(Direction::Load, 2, 0));
  const JobPtr bound_by_block = engine->submit(simple.request(Direction::Load, 0, 1));
  CHECK(free_load->wait(30));
  CHECK(!bound_by_page->wait(0.05) && !bound_by_block->wait(0) && !store->done());
  CHECK(engine->finished(Lane::Store).empty());
  CHECK(engine->finished(Lane::Load).size() == 1);
  engine->resume();
  CHECK(store->wait(30) && bound_by_page->wait(30) && bound_by_block->wait(30));
  CHECK(engine->finished(Lane::Load).size() == 2);
}

void a_write_waits_for_more_readers_than_a_cell_remembers() {
  Simple simple(32);
  const auto engine = Engine::create(4);
  engine->stall(7);
  std::vector<JobPtr> readers;
  for (int i = 0; i < 300; ++i) {
    SubmitRequest request = simple.request(Direction::Load, i % 3, 0);
    request.expedited = i % 2;
    readers.push_back(engine->submit(request));
  }
  const JobPtr writer = engine->submit(simple.request(Direction::Store, 3, 0));
  engine->resume();
  CHECK(writer->wait(30));
  for (const JobPtr& reader : readers) CHECK(reader->done());
}

void a_reader_that_a_cell_forgot_is_waited_for_all_the_same() {
  Simple simple(41);
  const auto engine = Engine::create(2);
  engine->stall(1u << static_cast<uint32_t>(Lane::Expedited));
  SubmitRequest request = simple.request(Direction::Load, 0, 0);
  request.expedited = true;
  const JobPtr forgotten = engine->submit(request);
  std::vector<JobPtr> others;
  for (int i = 0; i < 300; ++i) {
    others.push_back(engine->submit(simple.request(Direction::Load, 1 + i % 2, 0)));
  }
  const JobPtr writer = engine->submit(simple.request(Direction::Store, 3, 0));
  CHECK(others[40]->wait(30));
  CHECK(!writer->wait(0.2) && !forgotten->done());
  engine->resume();
  CHECK(writer->wait(30) && forgotten->done());
}

void a_cancelled_job_lets_nobody_overtake() {
  Simple simple(33);
  const auto engine = Engine::create(2);
  engine->stall(1u << static_cast<uint32_t>(Lane::Store));
  const JobPtr first = engine->submit(simple.request(Direction::Store, 0, 0));
  const JobPtr second = engine->submit(simple.request(Direction::Store, 1, 0));
  const JobPtr load = engine->submit(simple.request(Direction::Load, 2, 0));
  CHECK(second->cancel() && !second->cancel());
  CHECK(!load->wait(0.05) && !second->done());
  engine->resume();
  CHECK(load->wait(30) && first->done() && second->done());
  CHECK(second->result().cancelled && !second->result().error.empty());
  CHECK(!first->cancel());
}

void a_failed_page_is_named_and_the_others_arrive() {
  Simple simple(34);
  const auto engine = Engine::create(2);
  const World& world = simple.world;
  engine->inject_fault(Direction::Store, 0, 1, "the page is made of cheese");
  const std::vector<int64_t> blocks = {0, 1, 2};
  const std::vector<int64_t> pages = {0, 1, 2 % static_cast<int64_t>(world.classes[0].num_rows *
                                                                   world.classes[0].pages_per_row)};
  SubmitRequest request;
  request.plan = simple.plan;
  const size_t count = pages[2] == 2 ? 3 : 2;
  request.groups = {{0, blocks.data(), pages.data(), count}};
  const JobPtr job = engine->submit(request);
  CHECK(job->wait(30));
  const JobResult& result = job->result();
  CHECK(result.failed_pages == 1 && result.failures.size() == 1);
  CHECK(result.failures[0].block == 1 && result.failures[0].page == 1);
  CHECK(result.pages == count * world.classes[0].num_layers - 1);
  CHECK(result.error.find("model.layers.0, block 1, canonical page 1: the page is made of cheese") !=
        std::string::npos);
  engine->clear_faults();
  const JobPtr again = engine->submit(request);
  CHECK(again->wait(30) && again->result().error.empty());
  const auto counters = engine->counters();
  const Counters& counted = counters.at({"store", "host"});
  CHECK(counted.finished == 2 && counted.failed == 1 && counted.failed_pages == 1);
}

void progress_words_are_set_when_their_layer_is_in_place() {
  Random random(35);
  for (int round = 0; round < rounds(100); ++round) {
    World world = random_world(random, 3, 2, false);
    world.scramble(random);
    const std::shared_ptr<Plan> plan = world.plan();
    const auto engine = Engine::create(2);
    Order order = random_order(random, world);
    order.direction = Direction::Load;
    order.layers = {};
    std::vector<uint32_t> words(world.layers.size(), 0);
    SubmitRequest request = request_of(order, plan);
    request.progress = {words.data(), words.size(), 7};
    const JobPtr job = engine->submit(request);
    CHECK(job->wait(30));
    for (uint32_t& word : words) CHECK(__atomic_load_n(&word, __ATOMIC_ACQUIRE) == 7);
    request.progress.count = words.size() - 1;
    CHECK_REFUSED(engine->submit(request), "progress has");
  }
}

void shutdown_drains_or_cancels_and_never_hangs() {
  for (bool drain : {true, false}) {
    for (bool stalled : {true, false}) {
      Simple simple(36);
      const auto engine = Engine::create(2);
      if (stalled) engine->stall(7);
      std::vector<JobPtr> jobs;
      for (int i = 0; i < 200; ++i) {
        jobs.push_back(engine->submit(
            simple.request(i % 2 ? Direction::Load : Direction::Store, i % 4, i % 2)));
      }
      CHECK(engine->shutdown(drain, 60));
      for (const JobPtr& job : jobs) {
        CHECK(job->done());
        CHECK(!drain || job->result().error.empty());
        CHECK(!(stalled && !drain) || job->result().cancelled);
      }
      CHECK(engine->shutdown(drain, 0));
      bool refused = false;
      try {
        engine->submit(simple.request(Direction::Store, 0, 0));
      } catch (const std::runtime_error&) {
        refused = true;
      }
      CHECK(refused);
    }
  }
}

void an_engine_that_goes_away_ends_its_jobs() {
  Simple simple(37);
  std::vector<JobPtr> jobs;
  {
    const auto engine = Engine::create(2);
    for (int i = 0; i < 100; ++i) {
      jobs.push_back(engine->submit(simple.request(Direction::Store, i % 4, i % 2)));
    }
  }
  for (const JobPtr& job : jobs) CHECK(job->done());
}

void what_a_job_keeps_is_let_go_by_a_caller() {
  Simple simple(38);
  const auto engine = Engine::create(2);
  std::atomic<bool> dropped{false};
  const std::thread::id here = std::this_thread::get_id();
  SubmitRequest request = simple.request(Direction::Store, 0, 0);
  request.keep = std::shared_ptr<void>(&dropped, [&](void*) {
    CHECK(std::this_thread::get_id() == here);
    dropped = true;
  });
  engine->stall(7);
  const JobPtr job = engine->submit(request);
  request.keep.reset();
  CHECK(!dropped);
  engine->resume();
  CHECK(job->wait(30));
  engine->finished(Lane::Store);
  CHECK(dropped);
}

void several_threads_may_submit_and_wait() {
  Simple simple(39);
  const auto engine = Engine::create(2);
  std::vector<std::thread> callers;
  std::mutex ids;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int i = 0; i < rounds(200); ++i) {
        SubmitRequest request;
        {
          std::lock_guard<std::mutex> lock(ids);
          request = simple.request(t % 2 ? Direction::Load : Direction::Store, t, i % 2);
        }
        const JobPtr job = engine->submit(request);
        if (i % 7 == 0) job->cancel();
        CHECK(job->wait(60));
        engine->finished(job->lane());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(engine->in_flight() == 0);
}

[[maybe_unused]] void a_forked_child_gets_a_clear_error_and_may_start_anew() {
  Simple simple(40);
  const auto engine = Engine::create(2);
  JobPtr job = engine->submit(simple.request(Direction::Store, 0, 0));
  CHECK(job->wait(30));
  engine->stall(7);
  job = engine->submit(simple.request(Direction::Store, 1, 1));
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    int refused = 0;
    try {
      engine->submit(simple.request(Direction::Store, 0, 0));
    } catch (const std::runtime_error&) {
      ++refused;
    }
    try {
      job->wait(-1);
    } catch (const std::runtime_error&) {
      ++refused;
    }
    const auto fresh = Engine::create(1);
    const JobPtr mine = fresh->submit(simple.request(Direction::Load, 2, 1));
    const bool fine = refused == 2 && mine->wait(30);
    fresh->shutdown(true, 30);
    _exit(fine ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  engine->resume();
  CHECK(job->wait(30));
}

}  // namespace

int main() {
  RUN(transfers_move_what_the_oracle_moves);
  RUN(bad_input_is_refused_and_nothing_moves);
  RUN(one_thread_orders_overlapping_jobs);
  RUN(many_threads_order_overlapping_jobs);
  RUN(plans_that_overlap_order_their_jobs);
  RUN(independent_lanes_overtake_and_dependent_ones_wait);
  RUN(a_write_waits_for_more_readers_than_a_cell_remembers);
  RUN(a_reader_that_a_cell_forgot_is_waited_for_all_the_same);
  RUN(a_cancelled_job_lets_nobody_overtake);
  RUN(a_failed_page_is_named_and_the_others_arrive);
  RUN(progress_words_are_set_when_their_layer_is_in_place);
  RUN(shutdown_drains_or_cancels_and_never_hangs);
  RUN(an_engine_that_goes_away_ends_its_jobs);
  RUN(what_a_job_keeps_is_let_go_by_a_caller);
  RUN(several_threads_may_submit_and_wait);
#if !defined(__SANITIZE_THREAD__)  // starting threads in a forked child is beyond that sanitizer
  RUN(a_forked_child_gets_a_clear_error_and_may_start_anew);
#endif
  return 0;
}
