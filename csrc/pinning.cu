#include "pinning.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>

#include "cuda_api.h"

namespace vkvmap {

namespace {

constexpr uint64_t kOsPage = 4096;

std::mutex starts_mutex;
std::set<uint64_t>& starts() {
  static auto& set = *new std::set<uint64_t>;
  return set;
}

}  // namespace

std::vector<PinnedPiece> cut_into_pieces(const PinRange& range, uint64_t max_bytes) {
  std::vector<PinnedPiece> pieces;
  const uint64_t row = range.row_stride == 0 ? range.bytes : range.row_stride;
  if (range.bytes == 0) return pieces;
  // Two registrations must not meet inside an OS page.
  const uint64_t rows_per_step = kOsPage / std::gcd(row, kOsPage);
  uint64_t rows = std::max<uint64_t>(1, max_bytes / row);
  rows = std::max(rows_per_step, rows / rows_per_step * rows_per_step);
  const uint64_t step = rows > range.bytes / row ? range.bytes : rows * row;
  for (uint64_t at = 0; at < range.bytes; at += step)
    pieces.push_back({range.address + at, std::min(step, range.bytes - at)});
  return pieces;
}

Registration::Registration(const std::vector<PinRange>& ranges, uint64_t max_bytes) {
  cuda::CaptureModeGuard relaxed;
  for (const PinRange& range : ranges) {
    for (const PinnedPiece& piece : cut_into_pieces(range, max_bytes)) {
      const cudaError_t error =
          cudaHostRegister(reinterpret_cast<void*>(piece.address), piece.bytes,
                           cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (error == cudaSuccess) {
        pieces_.push_back(piece);
        std::lock_guard<std::mutex> lock(starts_mutex);
        starts().insert(piece.address);
        continue;
      }
      (void)cudaGetLastError();
      std::string why = cuda::describe("cudaHostRegister", error) + " for " +
                        std::to_string(piece.bytes) + " bytes at " +
                        std::to_string(piece.address) + " after " +
                        std::to_string(pieces_.size()) +
                        " pieces, which were given back; the memory stays pageable";
      if (error == cudaErrorMemoryAllocation)
        why += ". Raise the locked-memory limit (ulimit -l) or make the region smaller";
      if (error == cudaErrorHostMemoryAlreadyRegistered)
        why += ". Somebody else has registered it: leave that in place and do not pin it again";
      release();
      why_not_ = why;
      return;
    }
  }
}

Registration::~Registration() { release(); }

void Registration::unregister() {
  cuda::CaptureModeGuard relaxed;
  for (const PinnedPiece& piece : pieces_) {
    {
      std::lock_guard<std::mutex> lock(starts_mutex);
      starts().erase(piece.address);
    }
    cuda::succeeded(cudaHostUnregister(reinterpret_cast<void*>(piece.address)));
  }
}

void Registration::release() {
  if (pieces_.empty()) return;
  if (home_.is_here()) unregister();
  pieces_.clear();
  why_not_ = "the registration was released";
}

std::vector<uint64_t> piece_starts(uint64_t begin, uint64_t end) {
  std::lock_guard<std::mutex> lock(starts_mutex);
  return {starts().lower_bound(begin), starts().lower_bound(end)};
}

}  // namespace vkvmap
