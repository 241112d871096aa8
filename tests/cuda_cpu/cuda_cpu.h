// Compiles the project's CUDA sources with a C++ compiler and runs its kernels on the CPU: one fiber
// per thread, the threads of a block take turns, blocks run one after the other. For tests only.
//
// What must stay true: it is stricter than a GPU where it can be. Stream work runs late and in a
// seeded order; a missing wait therefore shows as wrong bytes. What it does not model: memory
// models, caches, timing.
#pragma once
#ifdef __CUDACC__
#error "for the host compiler only"
#endif
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <cuda_runtime.h>  // the real header: types and declarations only

#undef __global__
#define __global__
#undef __shared__
#define __shared__ static thread_local  // one block at a time on one OS thread
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace cuda_cpu {

enum class At { run, barrier, warp, done };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  At at;
  unsigned mask;
  dim3 index;
  unsigned number;
};

inline thread_local Thread* current;
inline thread_local ucontext_t scheduler;
inline thread_local const std::function<void()>* body;
inline thread_local dim3 block_index, block_size, grid_size;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_cpu: %s\n", what);
  std::abort();
}
inline void enter() {
  (*body)();
  current->at = At::done;
  swapcontext(&current->context, &scheduler);
}
inline void wait(At at) {
  current->at = at;
  swapcontext(&current->context, &scheduler);
}
inline void warp_wait(unsigned mask) {
  current->mask = mask;
  wait(At::warp);
}

// 0: threads in order; else a pseudo-random order of threads and warps, to find missing barriers.
inline unsigned order = 0;

inline void run(dim3 grid, dim3 block, const std::function<void()>& f) {
  const unsigned n = block.x * block.y * block.z;
  static thread_local std::vector<Thread> threads;
  if (threads.size() < n) threads.resize(n);
  body = &f;
  block_size = block;
  grid_size = grid;
  constexpr size_t stack = 512 << 10;  // sanitizers make frames large; untouched pages cost nothing
  unsigned random = order * 2654435761u + 1;
  for (unsigned b = 0; b < grid.x; ++b) {
    block_index = dim3(b, 0, 0);
    for (unsigned i = 0; i < n; ++i) {
      Thread& t = threads[i];
      if (!t.stack) t.stack.reset(new char[stack]);
      t.number = i;
      t.at = At::run;
      t.index = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.get();
      t.context.uc_stack.ss_size = stack;
      t.context.uc_link = nullptr;
      makecontext(&t.context, enter, 0);
    }
    for (;;) {
      bool ran = false;
      unsigned alive = 0, at_barrier = 0, start = 0;
      if (order) {
        random = random * 1664525u + 1013904223u;
        start = (random >> 8) % n;
      }
      for (unsigned k = 0; k < n; ++k) {
        const unsigned i = (start + k) % n;
        Thread& t = threads[i];
        if (t.at != At::run) continue;
        ran = true;
        // With a pseudo-random order half of the warps sit out each pass.
        if (order && (((i / 32 + 1) * 2246822519u ^ random) * 2654435761u >> 31)) continue;
        current = &t;
        swapcontext(&scheduler, &t.context);
      }
      for (unsigned i = 0; i < n; ++i) {
        alive += threads[i].at != At::done;
        at_barrier += threads[i].at == At::barrier;
      }
      if (!alive) break;
      if (at_barrier == alive) {
        for (unsigned i = 0; i < n; ++i)
          if (threads[i].at == At::barrier) threads[i].at = At::run;
        continue;
      }
      for (unsigned w = 0; w < n; w += 32) {  // a warp goes on when all lanes of the mask have come
        unsigned in = 0, mask = 0;
        for (unsigned i = w; i < n && i < w + 32; ++i)
          if (threads[i].at == At::warp) {
            in |= 1u << (i - w);
            mask |= threads[i].mask;
          }
        const unsigned have = n - w >= 32 ? ~0u : (1u << (n - w)) - 1;
        if (in && (in & mask & have) == (mask & have)) {
          for (unsigned i = w; i < n && i < w + 32; ++i)
            if (in >> (i - w) & 1) threads[i].at = At::run;
          ran = true;
        }
      }
      if (!ran) fail("deadlock: threads wait for threads that never come");
    }
  }
  current = nullptr;
}

// What the launch macro of the sources calls. `kernel` is the function that `run` calls.
cudaError_t launch_async(const void* kernel, cudaStream_t stream, dim3 grid, dim3 block,
                         std::function<void()> run);

// ---- controls for tests ---------------------------------------------------------------------------

void seed(uint64_t value);               // the order among streams
void fail_call(const char* name, int n); // the n-th call of `name` from now on fails; null: none
int num_calls(const char* name);         // since fail_call or reset_calls
void reset_calls();
struct Live {
  size_t device_allocations, host_allocations, registrations, streams, events, graphs;
};
Live live();
bool idle();  // nothing is queued on any stream but the default one
// Registered memory appears at another address than its own, through a second mapping of the same
// pages; needs shared mappings. Otherwise alias and address are the same.
void use_aliases(bool on);  // at the start: whether CUDA_CPU_ALIASES is set
void set_devices(int count);
void adopt_device_memory(void* p, size_t n, int device);  // as if cudaMalloc had returned it
void disown_device_memory(void* p);
void set_batched_copies(bool on);  // whether the driver has cuMemcpyBatchAsync

}  // namespace cuda_cpu

#define threadIdx (cuda_cpu::current->index)
#define blockIdx (cuda_cpu::block_index)
#define blockDim (cuda_cpu::block_size)
#define gridDim (cuda_cpu::grid_size)
inline void __syncthreads() { cuda_cpu::wait(cuda_cpu::At::barrier); }
inline void __syncwarp(unsigned mask = ~0u) { cuda_cpu::warp_wait(mask); }
