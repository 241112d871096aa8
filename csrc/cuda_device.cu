#include "cuda_device.h"

#include <map>

namespace vkvmap::cuda {

PairRing::PairRing() : states_(kNumSlots) {}

PairRing::~PairRing() {
  for (State& s : states_)
    if (s.pending) succeeded(cudaEventSynchronize(s.event->get()));
  if (host_) succeeded(cudaFreeHost(host_));
}

void PairRing::allocate() {
  void* host = nullptr;
  void* device = nullptr;
  check(cudaHostAlloc(&host, kNumSlots * kSlotPairs * sizeof(BlockPair),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  const cudaError_t error = cudaHostGetDevicePointer(&device, host, 0);
  if (error != cudaSuccess) {
    succeeded(cudaFreeHost(host));
    check(error, "cudaHostGetDevicePointer");
  }
  host_ = static_cast<BlockPair*>(host);
  device_ = static_cast<BlockPair*>(device);
}

PairRing::Slot PairRing::acquire() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!host_) allocate();
  for (;;) {
    size_t oldest = kNumSlots;
    for (size_t i = 0; i < kNumSlots; ++i) {
      State& s = states_[i];
      if (s.leased) continue;
      if (!s.event) s.event = std::make_unique<Event>();
      if (s.pending && s.event->done()) s.pending = false;
      if (!s.pending) {
        s.leased = true;
        return Slot(*this, i);
      }
      if (oldest == kNumSlots || s.turn < states_[oldest].turn) oldest = i;
    }
    if (oldest == kNumSlots) {
      returned_.wait(lock);  // other threads are about to launch with every one of them
    } else {
      State& s = states_[oldest];
      s.leased = true;
      lock.unlock();
      try {
        s.event->wait();
      } catch (...) {
        lock.lock();
        s.leased = false;
        returned_.notify_one();
        throw;
      }
      lock.lock();
      s.pending = false;
      return Slot(*this, oldest);
    }
  }
}

PairRing::Slot::~Slot() {
  if (!ring_) return;
  {
    std::lock_guard<std::mutex> lock(ring_->mutex_);
    ring_->states_[index_].leased = false;
  }
  ring_->returned_.notify_one();
}

BlockPair* PairRing::Slot::host() const { return ring_->host_ + index_ * kSlotPairs; }
const BlockPair* PairRing::Slot::device() const { return ring_->device_ + index_ * kSlotPairs; }

void PairRing::Slot::launched(cudaStream_t stream) {
  State& s = ring_->states_[index_];
  const cudaError_t error = cudaEventRecord(s.event->get(), stream);
  if (error != cudaSuccess) {
    // Without an event nothing says when the slot is free: wait here, then report.
    succeeded(cudaStreamSynchronize(stream));
    check(error, "cudaEventRecord");
  }
  std::lock_guard<std::mutex> lock(ring_->mutex_);
  s.pending = true;
  s.turn = ++ring_->turns_;
}

Device::Device(int ordinal) : ordinal(ordinal) {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  // Transfers give way to computation at block granularity; the expedited lane gives way to nothing.
  const int priorities[] = {least, least, greatest, greatest};
  for (unsigned lane = 0; lane < 4; ++lane) {
    const cudaError_t error =
        cudaStreamCreateWithPriority(&streams_[lane], cudaStreamNonBlocking, priorities[lane]);
    if (error != cudaSuccess) {
      while (lane-- > 0) succeeded(cudaStreamDestroy(streams_[lane]));
      check(error, "cudaStreamCreateWithPriority");
    }
  }
}

Device::~Device() {
  for (cudaStream_t stream : streams_) succeeded(cudaStreamDestroy(stream));
}

Device& Device::get(int ordinal) {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, Device*>;
  std::lock_guard<std::mutex> lock(mutex);
  Device*& device = devices[ordinal];
  if (!device) {
    DeviceGuard guard(ordinal);
    CaptureModeGuard relaxed;
    device = new Device(ordinal);
  }
  return *device;
}

}  // namespace vkvmap::cuda
