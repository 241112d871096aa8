// Arithmetic that says so when it would wrap, for numbers that come from outside.
#pragma once

#include <cstdint>

namespace vkvmap {

// Accumulates products and sums of unsigned numbers; `ok` turns false, and stays false, at the
// first one that does not fit 64 bits. The value is meaningless from then on.
class Checked {
 public:
  explicit Checked(uint64_t value = 0) : value_(value) {}

  Checked& add(uint64_t term) {
    ok_ &= !__builtin_add_overflow(value_, term, &value_);
    return *this;
  }
  Checked& add_product(uint64_t a, uint64_t b) {
    uint64_t product = 0;
    ok_ &= !__builtin_mul_overflow(a, b, &product);
    return add(product);
  }

  bool ok() const { return ok_; }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_;
  bool ok_ = true;
};

}  // namespace vkvmap
