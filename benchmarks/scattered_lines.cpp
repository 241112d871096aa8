// The roof of a mover that scatters 64-byte fragments: what this machine's memory takes when a rank of
// eight writes one line in eight, against memcpy of as many bytes.
//
//   g++ -O3 -march=native -pthread -o /tmp/scattered_lines benchmarks/scattered_lines.cpp
//   /tmp/scattered_lines THREADS
//
// Where canonical rows are whole memory pages apart, all of one rank's lines agree in bits 6 to 8 of their
// addresses. Lines of rows that each start 256 bytes further do not agree in bit 8.
//
// Needs AVX-512. Memory is asked for in huge pages, so that address translation costs nothing.
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
constexpr size_t kRanks = 8;
constexpr size_t kLinesPerRow = 32;  // of one rank: K and V of 16 tokens
constexpr size_t kRow = kLinesPerRow * kRanks * kLine;
constexpr size_t kPadding = 256;
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
  constexpr size_t kRows = kBytes / kLine / kLinesPerRow;
  uint8_t* sparse = memory(kRows * (kRow + kPadding));
  auto stream = [](uint8_t* at, __m512i value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), value);
  };
  const __m512i value = _mm512_set1_epi8(3);
  // Each thread has rows [first, last).
  auto on_threads = [&](const std::function<void(size_t, size_t, size_t)>& work) {
    return [=] {
      std::vector<std::thread> others;
      const size_t n = static_cast<size_t>(threads);
      for (size_t t = 1; t < n; ++t) {
        others.emplace_back(work, kRows * t / n, kRows * (t + 1) / n, t);
      }
      work(0, kRows / n, 0);
      for (std::thread& other : others) other.join();
    };
  };
  // Calls `put` with where each line of `rank` goes, and where it comes from.
  auto scatter = [&](size_t first, size_t last, size_t rank, size_t padding, auto put) {
    for (size_t row = first; row < last; ++row) {
      uint8_t* to = sparse + row * (kRow + padding) + rank * kLine;
      const uint8_t* from = source + row * kLinesPerRow * kLine;
      for (size_t i = 0; i < kLinesPerRow; ++i) put(to + i * kRanks * kLine, from + i * kLine);
    }
    _mm_sfence();
  };
  auto write = [=](uint8_t* to, const uint8_t*) { stream(to, value); };
  auto copy = [=](uint8_t* to, const uint8_t* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from + 2048), _MM_HINT_NTA);
    stream(to, _mm512_load_si512(from));
  };
  struct Contender {
    const char* name;
    std::function<void()> run;
    std::vector<double> taken;
  };
  std::vector<Contender> contenders{
      {"memcpy", on_threads([&](size_t first, size_t last, size_t) {
         constexpr size_t kPage = kLinesPerRow * kLine;
         std::memcpy(dense + first * kPage, source + first * kPage, (last - first) * kPage);
       }),
       {}},
      {"lines written, nothing read", on_threads([&](size_t first, size_t last, size_t) {
         scatter(first, last, 3, 0, write);
       }),
       {}},
      {"lines written through the caches", on_threads([&](size_t first, size_t last, size_t) {
         scatter(first, last, 3, 0,
                 [=](uint8_t* to, const uint8_t*) { _mm512_store_si512(to, value); });
       }),
       {}},
      {"lines copied", on_threads([&](size_t first, size_t last, size_t) {
         scatter(first, last, 3, 0, copy);
       }),
       {}},
      {"lines written, padded rows", on_threads([&](size_t first, size_t last, size_t) {
         scatter(first, last, 3, kPadding, write);
       }),
       {}},
      {"lines copied, padded rows", on_threads([&](size_t first, size_t last, size_t) {
         scatter(first, last, 3, kPadding, copy);
       }),
       {}},
      {"lines copied, a rank per thread", on_threads([&](size_t first, size_t last, size_t thread) {
         scatter(first, last, (3 + 2 * thread) % kRanks, 0, copy);
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
