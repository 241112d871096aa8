// Every instantiation of the kernel, under names that can be read in a profiler:
// vkvmap_<direction>_u<loads in flight>_<cache hint>_<where the pairs are>.
//
// Few on purpose: each costs build time and module size on every architecture. A variant that
// measurement shows to be of no use goes.
#include "cuda_kernels.h"

namespace vkvmap::kernel {

#define VKVMAP_KERNEL(name, direction, unroll, hint, Args)                   \
  extern "C" __global__ void __launch_bounds__(kMaxThreads)                  \
      name(const VKVMAP_GRID_CONSTANT Args args) {                           \
    move<Direction::direction, unroll, ptx::Hint::hint>(args);               \
  }

#define VKVMAP_VARIANT(unroll, hint)                                                             \
  VKVMAP_KERNEL(vkvmap_store_u##unroll##_##hint##_buffer, Store, unroll, hint, BufferArgs)       \
  VKVMAP_KERNEL(vkvmap_store_u##unroll##_##hint##_params, Store, unroll, hint, ParameterArgs)    \
  VKVMAP_KERNEL(vkvmap_load_u##unroll##_##hint##_buffer, Load, unroll, hint, BufferArgs)         \
  VKVMAP_KERNEL(vkvmap_load_u##unroll##_##hint##_params, Load, unroll, hint, ParameterArgs)

#define VKVMAP_VARIANTS(use) \
  use(8, stream);            \
  use(8, plain);             \
  use(4, stream)

VKVMAP_VARIANTS(VKVMAP_VARIANT);

#define VKVMAP_SELECT(kind, use)                                                          \
  const bool store = direction == Direction::Store;                                      \
  if (variant.unroll == 4 && variant.hint == ptx::Hint::stream)                           \
    return use(store ? vkvmap_store_u4_stream_##kind : vkvmap_load_u4_stream_##kind);     \
  if (variant.unroll == 8 && variant.hint == ptx::Hint::plain)                            \
    return use(store ? vkvmap_store_u8_plain_##kind : vkvmap_load_u8_plain_##kind);       \
  if (variant.unroll == 8 && variant.hint == ptx::Hint::stream)                           \
    return use(store ? vkvmap_store_u8_stream_##kind : vkvmap_load_u8_stream_##kind);     \
  return cudaErrorInvalidDeviceFunction

bool is_compiled(const Variant& variant) {
  return variant.unroll == 8 || (variant.unroll == 4 && variant.hint == ptx::Hint::stream);
}

cudaError_t load_all() {
#define VKVMAP_LOAD(unroll, hint)                                                            \
  for (const cudaError_t error : {load_kernel(vkvmap_store_u##unroll##_##hint##_buffer),     \
                                  load_kernel(vkvmap_store_u##unroll##_##hint##_params),     \
                                  load_kernel(vkvmap_load_u##unroll##_##hint##_buffer),      \
                                  load_kernel(vkvmap_load_u##unroll##_##hint##_params)})     \
    if (error != cudaSuccess) return error

  VKVMAP_VARIANTS(VKVMAP_LOAD);
  return cudaSuccess;
}

cudaError_t launch(Direction direction, const Variant& variant, const BufferArgs& args,
                   unsigned grid, unsigned block, cudaStream_t stream) {
  const auto run = [&](auto kernel) { return launch_kernel(kernel, grid, block, stream, args); };
  VKVMAP_SELECT(buffer, run);
}

cudaError_t launch(Direction direction, const Variant& variant, const ParameterArgs& args,
                   unsigned grid, unsigned block, cudaStream_t stream) {
  const auto run = [&](auto kernel) { return launch_kernel(kernel, grid, block, stream, args); };
  VKVMAP_SELECT(params, run);
}

}  // namespace vkvmap::kernel
