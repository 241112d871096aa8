// The roof of a mover that scatters 64-byte fragments: what this machine's memory takes when single
// lines are written far apart, without reading anything, against memcpy of as many bytes.
//
//   g++ -O3 -march=native -o /tmp/scattered_lines benchmarks/scattered_lines.cpp && /tmp/scattered_lines
//
// Needs AVX-512. A rank of eight with fragments of 64 bytes writes one line in eight.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

namespace {

constexpr size_t kLine = 64;
constexpr size_t kStride = 8 * kLine;
constexpr size_t kBytes = size_t{256} << 20;
constexpr int kRounds = 9;

uint8_t* memory(size_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) std::abort();
  std::memset(made, 1, bytes);
  return static_cast<uint8_t*>(made);
}

double seconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main() {
  uint8_t* source = memory(kBytes);
  uint8_t* dense = memory(kBytes);
  uint8_t* sparse = memory(kBytes / kLine * kStride);
  auto line = [](uint8_t* at, __m512i value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(at), value);
  };
  const __m512i value = _mm512_set1_epi8(3);
  struct Contender {
    const char* name;
    std::function<void()> run;
    std::vector<double> taken;
  };
  std::vector<Contender> contenders{
      {"memcpy", [&] { std::memcpy(dense, source, kBytes); }, {}},
      {"single lines written, nothing read",
       [&] {
         for (size_t i = 0; i < kBytes / kLine; ++i) line(sparse + i * kStride, value);
         _mm_sfence();
       },
       {}},
      {"single lines copied",
       [&] {
         for (size_t i = 0; i < kBytes / kLine; ++i) {
           _mm_prefetch(reinterpret_cast<const char*>(source + i * kLine + 2048), _MM_HINT_NTA);
           line(sparse + i * kStride, _mm512_load_si512(source + i * kLine));
         }
         _mm_sfence();
       },
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
