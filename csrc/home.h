// The process that something was made in. A forked child has copies of its parent's objects, and
// neither threads nor CUDA to end them with.
//
// What must stay true: asking costs no system call, for every submission asks.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace vkvmap {

class Home {
 public:
  bool is_here() const { return forks_ == forks(); }

 private:
  // How many forks lie between the process that first asked and this one.
  static uint64_t forks() {
    static std::atomic<uint64_t> count{0};
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return count.load(std::memory_order_relaxed);
  }

  const uint64_t forks_ = forks();
};

}  // namespace vkvmap
