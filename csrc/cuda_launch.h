// How a kernel is launched: the one place where the CUDA compiler's own syntax is needed, so that
// the same sources compile with a plain C++ compiler against the CPU stand-in of the runtime that
// the tests bring.
//
// What must stay true: VKVMAP_LAUNCH returns the launch's error and leaves the last-error slot
// clean, whatever the caller of this library had left there is not ours to report.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>

#define VKVMAP_GRID_CONSTANT __grid_constant__

namespace vkvmap {
template <class Kernel, class Args>
inline cudaError_t launch_kernel(Kernel kernel, unsigned grid, unsigned block, cudaStream_t stream,
                                 const Args& args) {
  void* parameters[] = {const_cast<Args*>(&args)};
  const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid),
                                             dim3(block), parameters, 0, stream);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}
}  // namespace vkvmap
#else
#include "cuda_cpu.h"

#define VKVMAP_GRID_CONSTANT

namespace vkvmap {
template <class Kernel, class Args>
inline cudaError_t launch_kernel(Kernel kernel, unsigned grid, unsigned block, cudaStream_t stream,
                                 const Args& args) {
  return cuda_cpu::launch_async(reinterpret_cast<const void*>(kernel), stream, dim3(grid),
                                dim3(block), [kernel, args] { kernel(args); });
}
}  // namespace vkvmap
#endif

namespace vkvmap {
// Puts a kernel on the current device, before its first launch would.
template <class Kernel>
inline cudaError_t load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes = {};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}
}  // namespace vkvmap
