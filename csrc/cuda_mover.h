// The movers of a GPU, as the engine and the bindings see them. No CUDA types here.
//
// The kernel mover reaches any fragment size at one launch per slice, on page-locked host memory. The
// copy-engine mover takes no multiprocessor and any host memory, and pays per contiguous run.
// What must stay true: both live as long as the process; the calling thread's device is put back; a
// failure is reported, and nothing that was enqueued is still running when it is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mover.h"

namespace vkvmap {

// How the kernel is launched, per direction. Defaults leave most of the chip to whatever computes.
struct KernelTuning {
  uint32_t ctas = 8;
  uint32_t threads = 256;         // per CTA, a multiple of 32 up to 512
  uint32_t unroll = 8;            // 16-byte loads in flight per lane: 8, or 4 with stream hints
  bool stream_hints = true;
  uint64_t slice_bytes = uint64_t{64} << 20;  // per launch; 0: everything in one
};

class KernelMover : public Mover {
 public:
  const char* name() const noexcept override { return "kernel"; }
  bool waits() const noexcept override { return true; }
  std::shared_ptr<void> prepare(const Plan& plan) override;
  std::shared_ptr<void> admit(const Transfer& transfer, uintptr_t stream) override;
  void move(const Transfer& transfer, uint64_t first, uint64_t last, MoveReport& report) override;

  KernelTuning tuning(Direction direction) const;
  // Throws std::invalid_argument for what is not compiled or cannot be launched.
  void set_tuning(Direction direction, const KernelTuning& tuning);

  // Puts the whole transfer on the caller's stream and returns; stream order is all the ordering
  // there is. transfer.state must come from prepare(). Throws on failure, and for a stream that is
  // being captured.
  void enqueue(const Transfer& transfer, uintptr_t stream);
};

class CopyEngineMover : public Mover {
 public:
  const char* name() const noexcept override { return "copy_engine"; }
  bool waits() const noexcept override { return true; }
  std::shared_ptr<void> prepare(const Plan& plan) override;
  std::shared_ptr<void> admit(const Transfer& transfer, uintptr_t stream) override;
  void move(const Transfer& transfer, uint64_t first, uint64_t last, MoveReport& report) override;
  void enqueue(const Transfer& transfer, uintptr_t stream);

  // Whether this driver takes many copies in one call; otherwise they are issued one by one.
  static bool has_batched_copies();
};

KernelMover& kernel_mover();
CopyEngineMover& copy_engine_mover();
void register_cuda_movers(std::vector<Mover*>& movers);  // for find_mover()

// A transfer that a CUDA graph replays. Its pairs live in a mapped buffer of its own, from which
// every launch of it reads, so they may be replaced between replays.
class CapturedTransfer {
 public:
  // The lists give classes, layers and how many pairs each may hold. Must not be made under capture.
  CapturedTransfer(const Transfer& shape, KernelTuning tuning);
  ~CapturedTransfer();
  CapturedTransfer(const CapturedTransfer&) = delete;
  CapturedTransfer& operator=(const CapturedTransfer&) = delete;

  // Up to as many pairs as the list was made with; what is left over moves nothing. The caller must
  // know that no replay is under way.
  void set_pairs(size_t list, const BlockPair* pairs, uint64_t count);
  // Into a capture, or at once on a stream that is not captured.
  void launch(uintptr_t stream) const;
  size_t num_launches() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Sets how far this thread's calls may disturb graph captures of other threads, as
// cudaStreamCaptureMode has it (0 global, 1 thread-local, 2 relaxed); returns what it was.
int exchange_capture_mode(int mode);

// What runs here, for people. Never throws; `error` is empty when there is at least one device.
struct CudaDevice {
  int ordinal;
  std::string name;
  int major, minor, multiprocessors, copy_engines;
  uint64_t memory_bytes;
  std::string pci_bus_id;
};
struct CudaStatus {
  int runtime_version = 0;
  int driver_version = 0;
  std::vector<CudaDevice> devices;
  std::string error;
};
CudaStatus cuda_status();

}  // namespace vkvmap
