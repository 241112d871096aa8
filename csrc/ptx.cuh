// Every PTX instruction that is written by hand, one function each, with its twin in C++ for the
// CPU stand-in. Nothing else in the project contains assembly.
//
// What must stay true: the loads and stores of data are `volatile`, which keeps them in program
// order; metadata goes through the read-only path (`.nc`), which no data access uses, so the two can
// be told apart in a disassembly.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastdiv.h"

namespace vkvmap::ptx {

struct alignas(16) Words {  // 16 bytes in four registers
  uint32_t x, y, z, w;
};

#ifdef __CUDACC__
#define VKVMAP_D __device__ __forceinline__
#define VKVMAP_UNROLL _Pragma("unroll")
#else
#define VKVMAP_D inline
#define VKVMAP_UNROLL
#endif

// --- metadata: constant while the kernel runs, shared by all lanes -----------------------------

VKVMAP_D Words load_constant(const void* address) {
#ifdef __CUDACC__
  Words v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
#else
  return *static_cast<const Words*>(address);
#endif
}

// --- data ----------------------------------------------------------------------------------------

// plain: default caching. stream: every byte is read once and written once, so reads do not
// allocate in L1 and writes are evicted first; the L2 then keeps what decoding kernels work on.
enum class Hint { plain, stream };

// Both do nothing where `active` is false: a predicate, not a branch, so that a ragged tail does not
// break up the run of loads. The zeros end the life of what the registers held: without them the
// allocator carries all data registers around the loop, and spills.
template <Hint hint>
VKVMAP_D void load(bool active, uint64_t address, Words& v) {
#ifdef __CUDACC__
  if constexpr (hint == Hint::stream)
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
        " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(address), "r"(static_cast<uint32_t>(active)));
  else
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
        " @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(address), "r"(static_cast<uint32_t>(active)));
#else
  if (active) v = *reinterpret_cast<const Words*>(address);
#endif
}

template <Hint hint>
VKVMAP_D void store(bool active, uint64_t address, const Words& v) {
#ifdef __CUDACC__
  if constexpr (hint == Hint::stream)
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " @p st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(address),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(active))
        : "memory");
  else
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
        " @p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(address),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(active))
        : "memory");
#else
  if (active) *reinterpret_cast<Words*>(address) = v;
#endif
}

// The narrow widths carry no hints: they exist to be right, not to be fast.
template <Hint hint, class Unit>
VKVMAP_D void load(bool active, uint64_t address, Unit& v) {
  v = 0;
  if (active) v = *reinterpret_cast<const volatile Unit*>(address);
}

template <Hint hint, class Unit>
VKVMAP_D void store(bool active, uint64_t address, const Unit& v) {
  if (active) *reinterpret_cast<volatile Unit*>(address) = v;
}

}  // namespace vkvmap::ptx
