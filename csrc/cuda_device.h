// What one GPU keeps for all plans: a stream per lane and one for what is set up, and a ring of mapped
// pinned slots through which long pair lists reach the kernel.
//
// What must stay true: a slot is not written again before the launch that reads it has finished (its
// event says so); lanes never share a stream, so a load never queues behind a store, and whoever
// submits queues behind neither; streams are
// non-blocking, so the legacy default stream neither waits for them nor holds them up. A device's
// state lives as long as the process: the driver may be gone before static destructors run.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_api.h"
#include "descriptor.h"
#include "validate.h"

namespace vkvmap::cuda {

constexpr size_t kSlotPairs = 16384;  // 256 KiB per slot
constexpr size_t kNumSlots = 8;

class PairRing {
 public:
  PairRing();  // on the current device; memory is taken with the first slot
  ~PairRing();
  PairRing(const PairRing&) = delete;
  PairRing& operator=(const PairRing&) = delete;

  // A slot for one launch: fill `host`, hand `device` to the kernel, then call launched(). A slot
  // that is dropped without that was never read and is free at once.
  class Slot {
   public:
    Slot(PairRing& ring, size_t index) : ring_(&ring), index_(index) {}
    Slot(Slot&& other) noexcept : ring_(other.ring_), index_(other.index_) { other.ring_ = nullptr; }
    Slot& operator=(Slot&&) = delete;
    ~Slot();

    BlockPair* host() const;
    const BlockPair* device() const;
    void launched(cudaStream_t stream);  // the reader is the last work on `stream`

   private:
    PairRing* ring_;
    size_t index_;
  };

  Slot acquire();  // waits for the slot that was launched longest ago if none is free

 private:
  friend class Slot;
  struct State {
    std::unique_ptr<Event> event;  // of the launch that reads it
    bool leased = false;
    bool pending = false;
    uint64_t turn = 0;  // when it was launched
  };
  void allocate();

  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<State> states_;
  BlockPair* host_ = nullptr;
  BlockPair* device_ = nullptr;
  uint64_t turns_ = 0;
};

enum class Lane : unsigned { store = 0, load = 1, expedited = 2, setup = 3 };

class Device {
 public:
  // Made on first use. Throws CudaError if the device cannot be used.
  static Device& get(int ordinal);

  const int ordinal;
  PairRing& ring() { return ring_; }
  cudaStream_t stream(Lane lane) const { return streams_[static_cast<unsigned>(lane)]; }

 private:
  explicit Device(int ordinal);
  ~Device();

  PairRing ring_;
  cudaStream_t streams_[4] = {};
};

}  // namespace vkvmap::cuda
