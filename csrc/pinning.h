// Page-locking of host memory that somebody else allocated, so that the GPU can reach it.
//
// What must stay true: pieces end on row boundaries, so no canonical page is split between two
// registrations; either all pieces are registered or none is; what is registered here is
// unregistered exactly once; a failure leaves the memory pageable, CUDA's last-error slot clean, and
// a sentence that says why. No CUDA types here: without CUDA the same interface says that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "home.h"

namespace vkvmap {

constexpr uint64_t kMaxPieceBytes = uint64_t{1} << 30;

struct PinRange {
  uint64_t address;
  uint64_t bytes;
  uint64_t row_stride;  // rows are not cut; 0: one row
};

struct PinnedPiece {
  uint64_t address;
  uint64_t bytes;
};

// Where a range is cut: whole rows, on whole OS pages where a multiple of the row allows it, at most
// max_bytes each unless one row is longer.
std::vector<PinnedPiece> cut_into_pieces(const PinRange& range, uint64_t max_bytes);

class Registration {
 public:
  // Never throws for what CUDA says; ask pinned() and why_not().
  explicit Registration(const std::vector<PinRange>& ranges, uint64_t max_bytes = kMaxPieceBytes);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  bool pinned() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  const std::vector<PinnedPiece>& pieces() const { return pieces_; }
  // Unregisters, once; transfers that use the memory must have finished. In a forked child it only
  // forgets: the registration is the parent's.
  void release();

 private:
  void unregister();

  const Home home_;
  std::vector<PinnedPiece> pieces_;
  std::string why_not_;
};

// Starts of the pieces registered by this process that lie in [begin, end).
std::vector<uint64_t> piece_starts(uint64_t begin, uint64_t end);

}  // namespace vkvmap
