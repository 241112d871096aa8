// The process that something was made in. A forked child has copies of its parent's objects, and
// neither threads nor CUDA to end them with.
#pragma once

#include <unistd.h>

namespace vkvmap {

class Home {
 public:
  bool is_here() const { return pid_ == getpid(); }

 private:
  const pid_t pid_ = getpid();
};

}  // namespace vkvmap
