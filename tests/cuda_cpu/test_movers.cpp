// The GPU movers on the CPU stand-in: bytes, order, failures, registration, graphs.
// Usage: test_movers <scenario> <first seed> <seeds>. Exits 0, or says what is wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "engine.h"
#include "test_plan.h"

namespace test {
namespace {

void move_all(Mover& mover, const Transfer& t, MoveReport& report, Random& r) {
  // As the engine may: in one go or in parts.
  const uint64_t cut = r.below(3) == 0 ? r.below(t.num_units + 1) : t.num_units;
  if (cut > 0) mover.move(t, 0, cut, report);
  if (cut < t.num_units) mover.move(t, cut, t.num_units, report);
}

void expect_success(const Transfer& t, const MoveReport& report) {
  CHECK(report.failures.empty(), "%s", report.failures[0].why.c_str());
  CHECK(report.pages == t.num_units, "%lu of %lu pages", report.pages, t.num_units);
  CHECK(report.bytes == t.bytes, "%lu of %lu bytes", report.bytes, t.bytes);
}

// ---- every byte, for random plans, both directions, both movers

void moves(uint64_t seed) {
  Random r(seed);
  cuda_cpu::order = static_cast<unsigned>(seed % 3);
  cuda_cpu::set_batched_copies(seed % 2);
  World w = random_world(r);
  // In one piece or in many; the copy engine also takes pageable memory.
  auto pinned = r.below(4) ? pin(w, r.below(2) ? kMaxPieceBytes : w.row_stride) : nullptr;
  for (Mover* mover : {static_cast<Mover*>(&kernel_mover()), static_cast<Mover*>(&copy_engine_mover())}) {
    if (!pinned && mover == &kernel_mover()) continue;
    for (const Direction d : {Direction::Store, Direction::Load}) {
      kernel_mover().set_tuning(d, random_tuning(r));
      w.fill(r);
      Expected expected(w);
      Transfer t = w.transfer(d, w.random_pairs(r, r.from(1, 6)), w.plan->mover_state(*mover),
                              r.below(2));
      w.oracle(d, t.pairs[0], 0, w.num_layers(), expected.cache, expected.region);
      t.ticket = mover->admit(t, 0);
      MoveReport report;
      move_all(*mover, t, report, r);
      expect_success(t, report);
      expected.check(w, mover->name());
    }
  }
}

// ---- offsets beyond 32 bits on either side (strides of gigabytes, pages far apart)

void wide(uint64_t seed) {
  Random r(seed);
  constexpr uint64_t kRow = 2097152, kRows = 1000001;
  constexpr uint64_t kBlock = 1039680 * 4, kBlocks = 65537;
  HostMemory host(kRow * kRows + 4096);
  HostMemory local(kBlock * kBlocks + 4096);
  cuda_cpu::adopt_device_memory(local.data, local.bytes, 0);
  Registration pinned({{reinterpret_cast<uint64_t>(host.data), host.bytes, 0}});
  CHECK(pinned.pinned(), "%s", pinned.why_not().c_str());

  Box b = {528, 5, 2, 64, 128, {528, 1 << 20}, {1056, 1 << 20}};
  const std::vector<Tile> tiles = cut({b}, 16);
  struct {
    DescriptorHeader h;
    LayerClass c;
    LayerEntry e;
    Tile t[8];
  } d = {};
  CHECK(tiles.size() <= 8, "%zu tiles", tiles.size());
  d.c.num_layers = d.c.num_writers = d.c.pages_per_row = 1;
  d.c.store_num_tiles = d.c.load_num_tiles = static_cast<uint32_t>(tiles.size());
  d.c.store_page_bytes = d.c.load_page_bytes = 5280;
  d.c.store_page_fragments = d.c.load_page_fragments = 10;
  d.c.num_blocks = kBlocks;
  d.c.num_rows = kRows;
  d.e = {reinterpret_cast<uint64_t>(local.data), kBlock, reinterpret_cast<uint64_t>(host.data),
         kRow, kRow, 0, 0};
  std::copy(tiles.begin(), tiles.end(), d.t);
  const size_t size = sizeof(DescriptorHeader) + sizeof(LayerClass) + sizeof(LayerEntry) +
                      tiles.size() * sizeof(Tile);
  d.h = {kDescriptorMagic, kDescriptorVersion, 1, 1, static_cast<uint32_t>(tiles.size()), 1, size};
  auto plan = std::make_shared<Plan>(
      &d, size, std::vector<Range>{{d.e.local_base, local.bytes}},
      std::vector<Range>{{d.e.host_base, host.bytes}}, std::vector<std::string>{"layer.0"});
  const std::vector<BlockPair> pairs = {
      {65535, 1000000, 0}, {65536, 999999, 0}, {0, 0, 0}, {2066, 2048, 0}, {32768, 1024, 0}};
  for (Mover* mover : {static_cast<Mover*>(&kernel_mover()), static_cast<Mover*>(&copy_engine_mover())}) {
    for (const Direction direction : {Direction::Store, Direction::Load}) {
      std::vector<uint8_t> want;
      for (const BlockPair& p : pairs)
        each_byte({b}, [&](uint64_t in_local, uint64_t in_host) {
          want.push_back(static_cast<uint8_t>(r.engine()));
          uint8_t& from = direction == Direction::Store ? local.data[p.block * kBlock + in_local]
                                                        : host.data[p.row * kRow + in_host];
          uint8_t& to = direction == Direction::Store ? host.data[p.row * kRow + in_host]
                                                      : local.data[p.block * kBlock + in_local];
          from = want.back();
          to = static_cast<uint8_t>(~want.back());
        });
      Transfer t;
      t.plan = plan;
      t.direction = direction;
      t.pairs = {pairs};
      t.lists = {{0, 0, 1, pairs.size(), t.pairs[0].data(), 0}};
      t.num_units = pairs.size();
      t.bytes = 5280 * pairs.size();
      t.state = plan->mover_state(*mover);
      MoveReport report;
      mover->move(t, 0, t.num_units, report);
      expect_success(t, report);
      size_t at = 0;
      for (const BlockPair& p : pairs)
        each_byte({b}, [&](uint64_t in_local, uint64_t in_host) {
          const uint8_t got = direction == Direction::Store ? host.data[p.row * kRow + in_host]
                                                            : local.data[p.block * kBlock + in_local];
          CHECK(got == want[at], "block %lu, row %u, byte %lu", p.block, p.row, in_local);
          ++at;
        });
    }
  }
  cuda_cpu::disown_device_memory(local.data);
}

// ---- order. With `broken` the wait is left out: some seed must then go wrong.

bool same(const Expected& e, const World& w) {
  return std::equal(e.cache.begin(), e.cache.end(), w.cache->data) &&
         std::equal(e.region.begin(), e.region.end(), w.region->data);
}

void store_waits_for_pending_writes(uint64_t seed, bool broken, bool& went_wrong) {
  Random r(seed);
  cuda_cpu::seed(seed);
  World w = random_world(r);
  auto pinned = pin(w);
  for (Mover* mover : {static_cast<Mover*>(&kernel_mover()), static_cast<Mover*>(&copy_engine_mover())}) {
    const auto state = w.plan->mover_state(*mover);
    w.fill(r);
    Expected expected(w);
    std::fill(expected.cache.begin(), expected.cache.end(), 0x5C);
    Transfer t = w.transfer(Direction::Store, w.random_pairs(r, 4), state);
    w.oracle(Direction::Store, t.pairs[0], 0, w.num_layers(), expected.cache, expected.region);
    cudaStream_t compute = nullptr;
    if (seed % 2) cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking);
    cudaMemsetAsync(w.cache->data, 0x5C, w.cache->bytes, compute);
    if (!broken) t.ticket = mover->admit(t, reinterpret_cast<uintptr_t>(compute));
    MoveReport report;
    mover->move(t, 0, t.num_units, report);
    cudaDeviceSynchronize();
    went_wrong |= !same(expected, w);
    if (!broken) expected.check(w, "store");
    if (compute) cudaStreamDestroy(compute);
  }
}

// A load must come after a zeroing of its destination that is already queued, and the next reader of
// the cache after the load.
void load_waits_for_pending_zeroing(uint64_t seed, bool broken, bool& went_wrong) {
  Random r(seed);
  cuda_cpu::seed(seed);
  World w = random_world(r);
  auto pinned = pin(w);
  for (Mover* mover : {static_cast<Mover*>(&kernel_mover()), static_cast<Mover*>(&copy_engine_mover())}) {
    const auto state = w.plan->mover_state(*mover);
    w.fill(r);
    Expected expected(w);
    std::fill(expected.cache.begin(), expected.cache.end(), 0);
    Transfer t = w.transfer(Direction::Load, w.random_pairs(r, 4), state);
    w.oracle(Direction::Load, t.pairs[0], 0, w.num_layers(), expected.cache, expected.region);
    cudaStream_t compute;
    cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking);
    cudaMemsetAsync(w.cache->data, 0, w.cache->bytes, compute);
    if (!broken) t.ticket = mover->admit(t, reinterpret_cast<uintptr_t>(compute));
    MoveReport report;
    mover->move(t, 0, t.num_units, report);
    cudaDeviceSynchronize();
    went_wrong |= !same(expected, w);
    if (!broken) expected.check(w, "load");
    cudaStreamDestroy(compute);
  }
}

// Store, evict, load into other blocks, one after the other: what the engine does for jobs that meet.
void load_after_store_returns_its_bytes(uint64_t seed) {
  Random r(seed);
  cuda_cpu::seed(seed);
  World w = random_world(r);
  auto pinned = pin(w);
  const auto state = w.plan->mover_state(kernel_mover());
  w.fill(r);
  Expected expected(w);
  const std::vector<BlockPair> out = w.random_pairs(r, 3);
  std::vector<BlockPair> back = out;
  for (size_t i = 0; i < back.size(); ++i) back[i].block = out[(i + 1) % out.size()].block;
  Transfer store = w.transfer(Direction::Store, out, state);
  Transfer load = w.transfer(Direction::Load, back, state);
  w.oracle(Direction::Store, out, 0, w.num_layers(), expected.cache, expected.region);
  w.oracle(Direction::Load, back, 0, w.num_layers(), expected.cache, expected.region);
  store.ticket = kernel_mover().admit(store, 0);
  MoveReport report;
  kernel_mover().move(store, 0, store.num_units, report);
  load.ticket = kernel_mover().admit(load, 0);
  kernel_mover().move(load, 0, load.num_units, report);
  CHECK(report.failures.empty(), "%s", report.failures[0].why.c_str());
  expected.check(w, "store then load");
}

// Long pair lists travel through the ring. Many transfers back to back on one stream behind other
// work, more than there are slots, each with ids of its own, whose arrays are gone at once.
void ids_of_a_pending_transfer_are_kept(uint64_t seed) {
  Random r(seed);
  cuda_cpu::seed(seed);
  ClassShape c;
  c.boxes = {{32, 1, 1, 0, 0, {0, 0}, {0, 0}}};
  c.alignment = 16;
  c.local_extent = c.host_extent = c.local_stride = c.page_stride = 32;
  c.num_layers = 1;
  const uint64_t n = 2500;  // more than fit into parameters
  World w(r, {c}, 3 * n, 1, 3 * n);
  auto pinned = pin(w);
  const auto state = w.plan->mover_state(kernel_mover());
  KernelTuning tuning;
  tuning.threads = 32;
  tuning.ctas = 2;
  kernel_mover().set_tuning(Direction::Store, tuning);
  w.fill(r);
  Expected expected(w);
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaMemsetAsync(w.cache->data, 0x11, 1, stream);  // the delay: work that nobody has waited for
  expected.cache[0] = 0x11;
  for (int round = 0; round < 11; ++round) {
    std::vector<BlockPair> pairs = w.random_pairs(r, round % 3 ? n : 40);
    w.oracle(Direction::Store, pairs, 0, 1, expected.cache, expected.region);
    Transfer t = w.transfer(Direction::Store, pairs, state);
    kernel_mover().enqueue(t, reinterpret_cast<uintptr_t>(stream));
    std::fill(t.pairs[0].begin(), t.pairs[0].end(), BlockPair{0, 0, 0});
  }
  CHECK(!cuda_cpu::idle(), "nothing was pending: the test shows nothing");
  cudaStreamSynchronize(stream);
  expected.check(w, "ring");
  cudaStreamDestroy(stream);
}

// Through the engine: jobs of both movers, all lanes at once, that meet in pages and blocks. What the
// caller's stream has pending comes first, and the outcome is that of the order of submission.
void engine(uint64_t seed) {
  Random r(seed);
  cuda_cpu::seed(seed);
  std::vector<ClassShape> shapes = {random_class(r)};
  World w(r, std::move(shapes), 8, 2, 4);
  auto pinned = pin(w);
  w.fill(r);
  Expected expected(w);
  const auto engine = Engine::create(2);
  std::vector<uint32_t> progress(w.num_layers());
  std::vector<JobPtr> jobs;
  cudaStream_t compute;
  cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking);
  cudaMemsetAsync(w.cache->data, 0x3D, w.cache->bytes, compute);
  std::fill(expected.cache.begin(), expected.cache.end(), 0x3D);
  for (int i = 0; i < 12; ++i) {
    const std::vector<BlockPair> pairs = w.random_pairs(r, 3);
    std::vector<int64_t> blocks, pages;
    for (const BlockPair& p : pairs) {
      blocks.push_back(static_cast<int64_t>(p.block));
      pages.push_back(p.row * w.pages_per_row + p.page);
    }
    SubmitRequest request;
    request.plan = w.plan;
    request.direction = i % 2 ? Direction::Load : Direction::Store;
    request.groups = {{0, blocks.data(), pages.data(), blocks.size()}};
    request.expedited = i % 2 && r.below(2);
    if (i == 11) request.progress = {progress.data(), progress.size(), 7};
    request.mover = r.below(2) ? static_cast<Mover*>(&kernel_mover()) : &copy_engine_mover();
    request.stream = reinterpret_cast<uintptr_t>(compute);
    jobs.push_back(engine->submit(request));
    w.oracle(request.direction, pairs, 0, w.num_layers(), expected.cache, expected.region);
  }
  for (const JobPtr& job : jobs) {
    CHECK(job->wait(60), "a job hangs");
    CHECK(job->result().error.empty(), "%s", job->result().error.c_str());
  }
  expected.check(w, "engine");
  for (const uint32_t word : progress) CHECK(word == 7, "progress says %u", word);
  CHECK(engine->shutdown(true, 60), "the engine hangs");
  cudaStreamDestroy(compute);
}

// ---- failures: each runtime call in turn

void failures(uint64_t seed) {
  Random r(seed);
  cuda_cpu::seed(seed);
  cuda_cpu::set_batched_copies(seed % 2);
  World w = random_world(r);
  std::set<std::string> seen;
  static const char* const kCalls[] = {
      "cudaGetDevice", "cudaHostRegister", "cudaHostGetDevicePointer", "cudaPointerGetAttributes",
      "cudaMalloc", "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cuMemcpyBatchAsync",
      "cudaStreamSynchronize", "cudaStreamIsCapturing", "cudaEventCreateWithFlags",
      "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize", "cudaStreamWaitEvent",
      "cudaLaunchKernel", "cudaThreadExchangeStreamCaptureMode"};
  for (Mover* mover : {static_cast<Mover*>(&kernel_mover()), static_cast<Mover*>(&copy_engine_mover())}) {
    KernelTuning tuning;
    tuning.threads = 32;
    tuning.slice_bytes = 20000;
    for (const Direction d : {Direction::Store, Direction::Load}) {
      kernel_mover().set_tuning(d, tuning);
      // Pinning, upload, admission, move: true if every byte is in place, else `why`.
      const auto attempt = [&](std::string& why) {
        w.pack();  // a plan that no mover has seen
        const std::vector<BlockPair> pairs = w.random_pairs(r, 3);
        Expected expected(w);
        w.oracle(d, pairs, 0, w.num_layers(), expected.cache, expected.region);
        Registration pinned({{reinterpret_cast<uint64_t>(w.region->data), w.region->bytes, 4096}});
        if (!pinned.pinned()) {
          why = pinned.why_not();
          if (mover == &kernel_mover()) return false;
        }
        try {
          Transfer t = w.transfer(d, pairs, w.plan->mover_state(*mover));
          t.ticket = mover->admit(t, 0);
          MoveReport report;
          mover->move(t, 0, t.num_units, report);
          CHECK(cuda_cpu::idle(), "move() returns while work is queued: %s",
                report.failures.empty() ? "it succeeded" : report.failures[0].why.c_str());
          if (!report.failures.empty()) {
            CHECK(report.failures.size() == t.num_units && report.pages == 0,
                  "%zu failures of %lu pages", report.failures.size(), t.num_units);
            why = report.failures[0].why;
            return false;
          }
          expect_success(t, report);
          expected.check(w, mover->name());
          return true;
        } catch (const std::exception& e) {
          why = e.what();
          return false;
        }
      };
      std::string why;
      CHECK(attempt(why), "without a fault: %s", why.c_str());  // lanes and ring exist from here on
      w.plan.reset();
      const cuda_cpu::Live before = cuda_cpu::live();
      for (const char* call : kCalls) {
        for (int n = 1; n < 200; ++n) {
          cuda_cpu::fail_call(call, n);
          why.clear();
          const bool fine = attempt(why);
          const bool reached = cuda_cpu::num_calls(call) >= n;
          cuda_cpu::fail_call(nullptr, 0);
          w.plan.reset();
          CHECK(cudaGetLastError() == cudaSuccess, "%s %d leaves the last error set", call, n);
          cudaDeviceSynchronize();
          CHECK(cuda_cpu::idle(), "%s %d leaves work behind", call, n);
          const cuda_cpu::Live after = cuda_cpu::live();
          CHECK(std::memcmp(&before, &after, sizeof before) == 0,
                "%s %d leaks: device %zu>%zu host %zu>%zu registered %zu>%zu events %zu>%zu", call,
                n, before.device_allocations, after.device_allocations, before.host_allocations,
                after.host_allocations, before.registrations, after.registrations, before.events,
                after.events);
          if (!reached) break;
          seen.insert(call);
          CHECK(fine || !why.empty(), "%s %d: a failure without a reason", call, n);
          if (!fine && std::string(call) != "cudaHostGetDevicePointer" &&
              std::string(call) != "cudaHostRegister")
            CHECK(why.find(call) != std::string::npos || std::string(call) == "cudaGetDevice",
                  "%s %d: the reason does not name it: %s", call, n, why.c_str());
        }
        CHECK(attempt(why), "after failures of %s: %s", call, why.c_str());
        w.plan.reset();
      }
    }
  }
  for (const char* call : {"cudaMalloc", "cudaEventRecord", "cudaLaunchKernel", "cudaStreamWaitEvent"})
    CHECK(seen.count(call), "%s was never made to fail", call);
}

// ---- registration

void registration(uint64_t seed) {
  Random r(seed);
  // Rows are not cut, and pieces meet on whole OS pages.
  const auto big = cut_into_pieces({1 << 20, uint64_t{786432} * 700000, 786432}, uint64_t{1} << 38);
  CHECK(big.size() == 3, "%zu pieces", big.size());
  CHECK(big[0].bytes == 274877644800, "%lu bytes", big[0].bytes);
  for (int i = 0; i < 200; ++i) {
    const PinRange range = {4096 * r.from(1, 1000), r.from(1, 50000000), r.from(1, 300000)};
    const uint64_t limit = r.from(1, 10000000);
    uint64_t at = range.address;
    for (const PinnedPiece& p : cut_into_pieces(range, limit)) {
      CHECK(p.address == at, "a gap");
      CHECK((p.address - range.address) % range.row_stride == 0, "a row is cut");
      CHECK(p.address % 4096 == 0, "two pieces meet inside an OS page");
      at += p.bytes;
    }
    CHECK(at == range.address + range.bytes, "not all of it");
  }

  // All or nothing, whichever piece fails; the last-error slot stays clean.
  HostMemory memory(10 * 65536);
  const std::vector<PinRange> ranges = {{reinterpret_cast<uint64_t>(memory.data), memory.bytes, 65536}};
  for (int n = 1; n <= 10; ++n) {
    cuda_cpu::fail_call("cudaHostRegister", n);
    Registration failed(ranges, 65536);
    CHECK(!failed.pinned() && failed.pieces().empty(), "piece %d failed, but it is pinned", n);
    CHECK(failed.why_not().find("cudaHostRegister") != std::string::npos, "%s", failed.why_not().c_str());
    CHECK(cuda_cpu::live().registrations == 0, "piece %d leaves registrations", n);
    CHECK(cudaGetLastError() == cudaSuccess, "piece %d leaves the last error set", n);
  }
  cuda_cpu::fail_call(nullptr, 0);
  {
    Registration good(ranges, 65536);
    CHECK(good.pinned() && good.pieces().size() == 10 && cuda_cpu::live().registrations == 10, "%s",
          good.why_not().c_str());
    Registration again(ranges, 65536);
    CHECK(!again.pinned() && cuda_cpu::live().registrations == 10, "registered twice");
    good.release();
    good.release();
    CHECK(cuda_cpu::live().registrations == 0, "not released");
  }

  {  // What a forked child has are copies; the registrations are its parent's.
    auto ours = std::make_unique<Registration>(ranges, 65536);
    const pid_t child = fork();
    if (child == 0) {
      cuda_cpu::reset_calls();
      ours.reset();
      _exit(cuda_cpu::num_calls("cudaHostUnregister") == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "a child unregisters: %d", status);
    CHECK(cuda_cpu::live().registrations == 10, "and takes them from its parent");
  }

  // Device aliases elsewhere than the addresses: fine in one piece, refused across pieces.
  cuda_cpu::use_aliases(true);
  for (const bool in_one : {true, false}) {
    World w = random_world(r);
    auto pinned = pin(w, in_one ? kMaxPieceBytes : w.row_stride);
    CHECK(pinned->pinned(), "%s", pinned->why_not().c_str());
    w.fill(r);
    std::string why;
    try {
      const auto state = w.plan->mover_state(kernel_mover());
      Expected expected(w);
      Transfer t = w.transfer(Direction::Store, w.random_pairs(r, 4), state);
      w.oracle(Direction::Store, t.pairs[0], 0, w.num_layers(), expected.cache, expected.region);
      MoveReport report;
      kernel_mover().move(t, 0, t.num_units, report);
      expect_success(t, report);
      expected.check(w, "aliased");
    } catch (const std::invalid_argument& e) {
      why = e.what();
    }
    CHECK(why.empty() == in_one, "pieces: %zu, reason: %s", pinned->pieces().size(), why.c_str());
    if (!in_one)
      CHECK(why.find("layer.") == 0 && why.find("another distance") != std::string::npos, "%s",
            why.c_str());
    w.plan.reset();
  }
  cuda_cpu::use_aliases(false);

  // Pageable memory: the kernel says no and why; the copy engine moves it.
  World w = random_world(r);
  std::string why;
  try {
    w.plan->mover_state(kernel_mover());
  } catch (const std::invalid_argument& e) {
    why = e.what();
  }
  CHECK(why.find("not registered") != std::string::npos, "%s", why.c_str());
  CHECK(cudaGetLastError() == cudaSuccess, "the refusal leaves the last error set");
}

// ---- graphs, the legacy default stream, several devices

void graphs(uint64_t seed) {
  Random r(seed);
  cuda_cpu::seed(seed);
  World w = random_world(r);
  auto pinned = pin(w);
  const auto state = w.plan->mover_state(kernel_mover());
  w.fill(r);
  for (const Direction d : {Direction::Store, Direction::Load}) {
    std::vector<BlockPair> pairs = w.random_pairs(r, 5);
    const Transfer shape = w.transfer(d, pairs, state);
    CapturedTransfer captured(shape, random_tuning(r));
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    const uintptr_t handle = reinterpret_cast<uintptr_t>(stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    captured.launch(handle);
    int refusals = 0;
    const auto refused = [&](auto call) {
      try {
        call();
      } catch (const std::invalid_argument& e) {
        refusals += std::string(e.what()).find("captured") != std::string::npos;
      }
    };
    refused([&] { kernel_mover().enqueue(shape, handle); });
    refused([&] { copy_engine_mover().enqueue(shape, handle); });
    refused([&] { kernel_mover().admit(shape, handle); });
    CHECK(refusals == 3, "%d refusals", refusals);
    // Another thread prepares a plan meanwhile, which allocates; the capture goes on.
    std::thread([&] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);  // for what the test itself allocates
      World other = random_world(r);
      auto other_pinned = pin(other);
      cudaThreadExchangeStreamCaptureMode(&mode);
      other.plan->mover_state(kernel_mover());
      other.plan.reset();
      cudaThreadExchangeStreamCaptureMode(&mode);
    }).join();
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture was spoiled");
    cudaGraphInstantiate(&executable, graph, 0);
    for (int replay = 0; replay < 3; ++replay) {
      Expected expected(w);
      w.oracle(d, pairs, 0, w.num_layers(), expected.cache, expected.region);
      cudaGraphLaunch(executable, stream);
      cudaStreamSynchronize(stream);
      expected.check(w, "replay");
      pairs = w.random_pairs(r, r.below(6));  // other ids, and fewer of them
      for (size_t list = 0; list < shape.lists.size(); ++list)
        captured.set_pairs(list, pairs.data(), std::min<uint64_t>(pairs.size(), shape.lists[list].num_pairs));
      pairs.resize(std::min<size_t>(pairs.size(), shape.lists[0].num_pairs));
      w.fill(r);
    }
    bool threw = false;
    try {
      std::vector<BlockPair> many(shape.lists[0].num_pairs + 1);
      captured.set_pairs(0, many.data(), many.size());
    } catch (const std::invalid_argument&) {
      threw = true;
    }
    CHECK(threw, "more pairs than it was captured for");
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
  // On the legacy default stream: batched copies are not for it, single ones are.
  Expected expected(w);
  const Transfer t = w.transfer(Direction::Store, w.random_pairs(r, 3),
                                w.plan->mover_state(copy_engine_mover()));
  w.oracle(Direction::Store, t.pairs[0], 0, w.num_layers(), expected.cache, expected.region);
  copy_engine_mover().enqueue(t, 0);
  cudaDeviceSynchronize();
  expected.check(w, "legacy default stream");
}

void devices(uint64_t seed) {
  Random r(seed);
  cuda_cpu::set_devices(2);
  for (const int device : {1, 0}) {
    cudaSetDevice(device);
    World w = random_world(r);
    cudaSetDevice(0);
    auto pinned = pin(w);
    for (Mover* mover : {static_cast<Mover*>(&kernel_mover()), static_cast<Mover*>(&copy_engine_mover())}) {
      w.fill(r);
      Expected expected(w);
      Transfer t = w.transfer(Direction::Load, w.random_pairs(r, 4), w.plan->mover_state(*mover));
      w.oracle(Direction::Load, t.pairs[0], 0, w.num_layers(), expected.cache, expected.region);
      MoveReport report;
      t.ticket = mover->admit(t, 0);
      mover->move(t, 0, t.num_units, report);
      expect_success(t, report);
      expected.check(w, "device");
      int current = -1;
      cudaGetDevice(&current);
      CHECK(current == 0, "the caller's device is now %d", current);
    }
  }
}

}  // namespace
}  // namespace test

int main(int argc, char** argv) {
  using namespace test;
  if (argc != 4) return std::fprintf(stderr, "usage: %s scenario first count\n", argv[0]), 2;
  const std::string scenario = argv[1];
  const uint64_t first = std::strtoull(argv[2], nullptr, 10), count = std::strtoull(argv[3], nullptr, 10);
  bool ignored = false, store_seen = false, load_seen = false;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    if (scenario == "moves") moves(seed);
    else if (scenario == "wide") wide(seed);
    else if (scenario == "order") {
      store_waits_for_pending_writes(seed, false, ignored);
      load_waits_for_pending_zeroing(seed, false, ignored);
      load_after_store_returns_its_bytes(seed);
    } else if (scenario == "order-without-waits") {
      store_waits_for_pending_writes(seed, true, store_seen);
      load_waits_for_pending_zeroing(seed, true, load_seen);
    } else if (scenario == "ring") ids_of_a_pending_transfer_are_kept(seed);
    else if (scenario == "engine") engine(seed);
    else if (scenario == "failures") failures(seed);
    else if (scenario == "registration") registration(seed);
    else if (scenario == "graphs") graphs(seed);
    else if (scenario == "devices") devices(seed);
    else return std::fprintf(stderr, "no scenario %s\n", scenario.c_str()), 2;
  }
  if (scenario == "order-without-waits") {
    CHECK(store_seen, "a store without its wait was right for every seed");
    CHECK(load_seen, "a load without its wait was right for every seed");
  }
  return 0;
}
