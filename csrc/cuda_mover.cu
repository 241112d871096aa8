#include "cuda_mover.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "cuda_device.h"
#include "cuda_kernels.h"
#include "cuda_plan.h"
#include "cuda_schedule.h"
#include "cuda_transfer.h"
#include "home.h"

namespace vkvmap {

namespace {

using cuda::check;
using cuda::DevicePlan;

std::mutex tuning_mutex;
KernelTuning tunings[2];

kernel::Variant variant_of(const KernelTuning& tuning) {
  return {tuning.unroll, tuning.stream_hints ? ptx::Hint::stream : ptx::Hint::plain};
}

void require_launchable(const KernelTuning& t) {
  if (t.ctas < 1 || t.ctas > 65535)
    throw std::invalid_argument("ctas is " + std::to_string(t.ctas) + "; it must be 1..65535");
  if (t.threads < 32 || t.threads > kMaxThreads || t.threads % 32 != 0)
    throw std::invalid_argument("threads is " + std::to_string(t.threads) +
                                "; it must be a multiple of 32 from 32 to " +
                                std::to_string(kMaxThreads));
  if (!kernel::is_compiled(variant_of(t)))
    throw std::invalid_argument("unroll " + std::to_string(t.unroll) + " with " +
                                (t.stream_hints ? "stream" : "plain") +
                                " hints is not compiled; there are 8 with either and 4 with stream");
}

LaunchHead head_of(const DevicePlan& plan) {
  LaunchHead head = {};
  head.layers = plan.layers();
  head.tiles = plan.tiles();
  return head;
}

void copy_pairs(const Transfer& transfer, const cuda::Launch& launch, void* to,
                std::vector<uint64_t>& starts) {
  uint64_t at = 0;
  for (const cuda::Launch::Span& span : launch.spans) {
    starts.push_back(at);
    std::memcpy(static_cast<BlockPair*>(to) + at, transfer.lists[span.list].pairs + span.first,
                span.count * sizeof(BlockPair));
    at += span.count;
  }
}

void launch_one(const Transfer& transfer, const DevicePlan& plan, const cuda::Launch& launch,
                const KernelTuning& tuning, cudaStream_t stream) {
  std::vector<uint64_t> starts;
  if (launch.num_pairs <= kParameterPairs) {
    // 32 KB: too much to clear for every launch, and the unused tail is never read.
    static thread_local ParameterArgs args;
    args.head = head_of(plan);
    copy_pairs(transfer, launch, args.pairs, starts);
    cuda::place_segments(launch, starts, args.head);
    const uint32_t grid =
        cuda::share_items(launch.num_items, tuning.ctas, tuning.threads, args.head);
    check(kernel::launch(transfer.direction, variant_of(tuning), args, grid, tuning.threads,
                         stream),
          "cudaLaunchKernel");
    return;
  }
  cuda::PairRing::Slot slot = cuda::Device::get(plan.device).ring().acquire();
  BufferArgs args;
  args.head = head_of(plan);
  args.head.pairs = slot.device();
  copy_pairs(transfer, launch, slot.host(), starts);
  cuda::place_segments(launch, starts, args.head);
  const uint32_t grid = cuda::share_items(launch.num_items, tuning.ctas, tuning.threads, args.head);
  check(kernel::launch(transfer.direction, variant_of(tuning), args, grid, tuning.threads, stream),
        "cudaLaunchKernel");
  slot.launched(stream);
}

void launch_all(const Transfer& transfer, uint64_t first, uint64_t last, cudaStream_t stream) {
  const auto& plan = *static_cast<const DevicePlan*>(transfer.state.get());
  const KernelTuning tuning = kernel_mover().tuning(transfer.direction);
  const cuda::LaunchLimits limits = {tuning.slice_bytes == 0 ? ~uint64_t{0} : tuning.slice_bytes,
                                     cuda::kSlotPairs};
  for (const cuda::Launch& launch : cuda::cut_into_launches(transfer, first, last, limits))
    launch_one(transfer, plan, launch, tuning, stream);
}

}  // namespace

KernelMover& kernel_mover() {
  static auto& mover = *new KernelMover;
  return mover;
}

void register_cuda_movers(std::vector<Mover*>& movers) {
  movers.push_back(&kernel_mover());
  movers.push_back(&copy_engine_mover());
}

std::shared_ptr<void> KernelMover::prepare(const Plan& plan) {
  auto device_plan = std::make_shared<DevicePlan>(plan);
  cuda::DeviceGuard guard(device_plan->device);
  cuda::CaptureModeGuard relaxed;
  check(kernel::load_all(), "cudaFuncGetAttributes");
  return device_plan;
}

std::shared_ptr<void> KernelMover::admit(const Transfer& transfer, uintptr_t stream) {
  return cuda::record_caller(static_cast<const DevicePlan*>(transfer.state.get())->device, stream);
}

void KernelMover::move(const Transfer& transfer, uint64_t first, uint64_t last,
                       MoveReport& report) {
  const int device = static_cast<const DevicePlan*>(transfer.state.get())->device;
  cuda::run_on_lane(transfer, first, last, device, report,
                    [&](cudaStream_t stream) { launch_all(transfer, first, last, stream); });
}

KernelTuning KernelMover::tuning(Direction direction) const {
  std::lock_guard<std::mutex> lock(tuning_mutex);
  return tunings[static_cast<unsigned>(direction)];
}

void KernelMover::set_tuning(Direction direction, const KernelTuning& tuning) {
  require_launchable(tuning);
  std::lock_guard<std::mutex> lock(tuning_mutex);
  tunings[static_cast<unsigned>(direction)] = tuning;
}

void KernelMover::enqueue(const Transfer& transfer, uintptr_t stream) {
  const int device = static_cast<const DevicePlan*>(transfer.state.get())->device;
  cuda::run_on_caller(device, stream, [&](cudaStream_t s) {
    launch_all(transfer, 0, transfer.num_units, s);
  });
}

// ------------------------------------------------------------------------------- captured transfers

struct CapturedTransfer::State {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<void> device_plan;
  int device = 0;
  Direction direction = Direction::Store;
  KernelTuning tuning;
  BlockPair* host = nullptr;
  std::vector<uint64_t> list_start;  // of each list in the buffer, and the end
  std::vector<BufferArgs> launches;
  std::vector<uint32_t> grids;

  const Home home;

  ~State() {
    if (!host || !home.is_here()) return;
    try {
      cuda::DeviceGuard guard(device);
      cuda::CaptureModeGuard relaxed;
      cuda::succeeded(cudaFreeHost(host));
    } catch (const cuda::CudaError&) {
      // The device is gone; so is the process, nearly.
    }
  }
};

CapturedTransfer::CapturedTransfer(const Transfer& shape, KernelTuning tuning)
    : state_(std::make_unique<State>()) {
  require_launchable(tuning);
  State& s = *state_;
  const auto& plan = *static_cast<const DevicePlan*>(shape.state.get());
  s.plan = shape.plan;
  s.device_plan = shape.state;
  s.device = plan.device;
  s.direction = shape.direction;
  s.tuning = tuning;
  cuda::DeviceGuard guard(s.device);
  cuda::CaptureModeGuard relaxed;
  s.list_start.push_back(0);
  for (const WorkList& list : shape.lists) s.list_start.push_back(s.list_start.back() + list.num_pairs);
  const uint64_t total = std::max<uint64_t>(1, s.list_start.back());
  if (total >= uint64_t{1} << 32)
    throw std::invalid_argument("a captured transfer holds fewer than 2^32 block pairs");
  void* host = nullptr;
  void* alias = nullptr;
  check(cudaHostAlloc(&host, total * sizeof(BlockPair),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  s.host = static_cast<BlockPair*>(host);
  check(cudaHostGetDevicePointer(&alias, host, 0), "cudaHostGetDevicePointer");
  for (size_t list = 0; list < shape.lists.size(); ++list)
    set_pairs(list, shape.lists[list].pairs, shape.lists[list].num_pairs);

  const cuda::LaunchLimits limits = {tuning.slice_bytes == 0 ? ~uint64_t{0} : tuning.slice_bytes,
                                     ~uint64_t{0} >> 1};
  for (const cuda::Launch& launch : cuda::cut_into_launches(shape, 0, shape.num_units, limits)) {
    BufferArgs args;
    args.head = head_of(plan);
    args.head.pairs = static_cast<const BlockPair*>(alias);
    std::vector<uint64_t> starts;
    for (const cuda::Launch::Span& span : launch.spans)
      starts.push_back(s.list_start[span.list] + span.first);
    cuda::place_segments(launch, starts, args.head);
    s.grids.push_back(
        cuda::share_items(launch.num_items, tuning.ctas, tuning.threads, args.head));
    s.launches.push_back(args);
  }
}

CapturedTransfer::~CapturedTransfer() = default;

void CapturedTransfer::set_pairs(size_t list, const BlockPair* pairs, uint64_t count) {
  State& s = *state_;
  if (list + 1 >= s.list_start.size())
    throw std::invalid_argument("the captured transfer has " +
                                std::to_string(s.list_start.size() - 1) + " lists, not a list " +
                                std::to_string(list));
  const uint64_t capacity = s.list_start[list + 1] - s.list_start[list];
  if (count > capacity)
    throw std::invalid_argument("list " + std::to_string(list) + " was captured for " +
                                std::to_string(capacity) + " pairs and cannot take " +
                                std::to_string(count) + "; capture it with more");
  BlockPair* to = s.host + s.list_start[list];
  if (count > 0) std::memcpy(to, pairs, count * sizeof(BlockPair));
  for (uint64_t i = count; i < capacity; ++i) to[i] = {kNoBlock, 0, 0};
}

void CapturedTransfer::launch(uintptr_t stream) const {
  const State& s = *state_;
  cuda::DeviceGuard guard(s.device);
  for (size_t i = 0; i < s.launches.size(); ++i)
    check(kernel::launch(s.direction, variant_of(s.tuning), s.launches[i], s.grids[i],
                         s.tuning.threads, cuda::stream_of(stream)),
          "cudaLaunchKernel");
}

size_t CapturedTransfer::num_launches() const { return state_->launches.size(); }

// -------------------------------------------------------------------------------------- what is here

int exchange_capture_mode(int mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  check(cudaThreadExchangeStreamCaptureMode(&exchanged), "cudaThreadExchangeStreamCaptureMode");
  return static_cast<int>(exchanged);
}

CudaStatus cuda_status() {
  CudaStatus status;
  cuda::succeeded(cudaRuntimeGetVersion(&status.runtime_version));
  cuda::succeeded(cudaDriverGetVersion(&status.driver_version));
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    status.error = cuda::describe("cudaGetDeviceCount", error);
    return status;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties = {};
    const cudaError_t failed = cudaGetDeviceProperties(&properties, i);
    if (failed != cudaSuccess) {
      (void)cudaGetLastError();
      status.error = cuda::describe("cudaGetDeviceProperties", failed);
      status.devices.clear();
      return status;
    }
    char bus[32] = "";
    cuda::succeeded(cudaDeviceGetPCIBusId(bus, sizeof bus, i));
    status.devices.push_back({i, properties.name, properties.major, properties.minor,
                              properties.multiProcessorCount, properties.asyncEngineCount,
                              properties.totalGlobalMem, bus});
  }
  if (count == 0) status.error = "the CUDA driver reports no device";
  return status;
}

}  // namespace vkvmap
