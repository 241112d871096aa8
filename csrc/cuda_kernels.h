// The compiled variants of the kernel, and the one function that launches one of them.
#pragma once

#include "cuda_kernel.cuh"

namespace vkvmap::kernel {

// What can be chosen at run time within the compiled variants.
struct Variant {
  uint32_t unroll = 8;                      // loads in flight per lane: 8 or 4
  ptx::Hint hint = ptx::Hint::stream;       // stream with 8 or 4, plain with 8
};

bool is_compiled(const Variant& variant);

// Puts all kernels on the current device. The runtime does that lazily, each with its first launch,
// which may then wait for the whole device and is refused while a graph is being captured.
cudaError_t load_all();

// The block pairs lie in a buffer that stays untouched until the launch has finished. `grid` CTAs of
// `block` threads, block a multiple of 32 and at most kMaxThreads.
cudaError_t launch(Direction direction, const Variant& variant, const BufferArgs& args,
                   unsigned grid, unsigned block, cudaStream_t stream);

// The block pairs travel with the launch, which copies them before it returns.
cudaError_t launch(Direction direction, const Variant& variant, const ParameterArgs& args,
                   unsigned grid, unsigned block, cudaStream_t stream);

}  // namespace vkvmap::kernel
