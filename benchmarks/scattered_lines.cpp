// The roof of a mover that scatters 64-byte fragments: what this machine's memory takes when single
// lines are written far apart, without reading anything, against memcpy of as many bytes.
//
//   g++ -O3 -march=native -pthread -o /tmp/scattered_lines benchmarks/scattered_lines.cpp
//   /tmp/scattered_lines THREADS
//
// Needs AVX-512. A rank of eight with fragments of 64 bytes writes one line in eight. Memory is asked
// for in huge pages, so that address translation costs nothing.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr size_t kLine = 64;
constexpr size_t kStride = 8 * kLine;
constexpr size_t kBytes = size_t{256} << 20;
constexpr int kRounds = 9;

uint8_t* memory(size_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) std::abort();
  madvise(made, bytes, MADV_HUGEPAGE);
  std::memset(made, 1, bytes);
  return static_cast<uint8_t*>(made);
}

double seconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
  if (threads < 1) {
    std::fprintf(stderr, "threads: a number from 1 on\n");
    return 2;
  }
  uint8_t* source = memory(kBytes);
  uint8_t* dense = memory(kBytes);
  uint8_t* sparse = memory(kBytes / kLine * kStride);
  auto stream = [](uint8_t* at, __m512i value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), value);
  };
  const __m512i value = _mm512_set1_epi8(3);
  // Each thread has lines [first, last).
  auto on_threads = [&](const std::function<void(size_t, size_t)>& work) {
    return [=] {
      std::vector<std::thread> others;
      const size_t lines = kBytes / kLine;
      for (int t = 1; t < threads; ++t) {
        others.emplace_back(work, lines * t / threads, lines * (t + 1) / threads);
      }
      work(0, lines / threads);
      for (std::thread& other : others) other.join();
    };
  };
  struct Contender {
    const char* name;
    std::function<void()> run;
    std::vector<double> taken;
  };
  std::vector<Contender> contenders{
      {"memcpy", on_threads([&](size_t first, size_t last) {
         std::memcpy(dense + first * kLine, source + first * kLine, (last - first) * kLine);
       }),
       {}},
      {"single lines written, nothing read", on_threads([&](size_t first, size_t last) {
         for (size_t i = first; i < last; ++i) stream(sparse + i * kStride, value);
         _mm_sfence();
       }),
       {}},
      {"single lines written through the caches", on_threads([&](size_t first, size_t last) {
         for (size_t i = first; i < last; ++i) _mm512_store_si512(sparse + i * kStride, value);
       }),
       {}},
      {"single lines copied", on_threads([&](size_t first, size_t last) {
         for (size_t i = first; i < last; ++i) {
           _mm_prefetch(reinterpret_cast<const char*>(source + i * kLine + 2048), _MM_HINT_NTA);
           stream(sparse + i * kStride, _mm512_load_si512(source + i * kLine));
         }
         _mm_sfence();
       }),
       {}},
  };
  for (int round = -1; round < kRounds; ++round) {
    for (Contender& each : contenders) {
      const double taken = seconds(each.run);
      if (round >= 0) each.taken.push_back(taken);
    }
  }
  for (Contender& each : contenders) std::sort(each.taken.begin(), each.taken.end());
  const double base = contenders[0].taken[kRounds / 2];
  for (const Contender& each : contenders) {
    const double taken = each.taken[kRounds / 2];
    std::printf("%-40s %6.2f GB/s   %.2fx of memcpy\n", each.name, kBytes / taken / 1e9,
                base / taken);
  }
}
