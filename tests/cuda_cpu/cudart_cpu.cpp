// The part of the CUDA runtime that the sources call, on the CPU.
//
// Work on a stream is queued and runs only when someone waits for it, or now and then when someone
// asks; which stream goes next is pseudo-random. Work has the prerequisites that CUDA gives it: what
// is before it on its stream, the events it was told to wait for, and the legacy default stream's
// implicit ones. Using a stream or an event under the wrong device is an error here, as it is there.
#include <sys/mman.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "cuda_cpu.h"

namespace {

struct Stream;
using StreamPtr = std::shared_ptr<Stream>;
struct Mark {  // a place in a stream: done once the stream has run `ticket` pieces of work
  StreamPtr stream;
  uint64_t ticket = 0;
};
using Clock = std::chrono::steady_clock;
struct Work {
  std::function<void()> run;
  std::vector<Mark> after;
  std::chrono::duration<double> takes{};
  Clock::time_point due{};  // known once it is its turn
};
struct Stream {
  std::deque<Work> queue;
  uint64_t submitted = 0, completed = 0;
  bool blocking = true;
  int device = 0;
  bool capturing = false, spoiled = false;
  std::vector<std::function<void()>> captured;
};

}  // namespace

struct CUstream_st {
  StreamPtr stream;
};
struct CUevent_st {
  Mark mark;
  int device = 0;
  bool timed = false;
  std::shared_ptr<double> at = std::make_shared<double>(0);  // outlives the event: it may go first
};
struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

namespace {

std::recursive_mutex mutex;
const StreamPtr null_stream = std::make_shared<Stream>();
std::set<StreamPtr> streams{null_stream};
struct Block {
  size_t bytes;
  int device;
  uintptr_t alias;
};
std::map<uintptr_t, Block> device_memory, host_memory, registered;
size_t events = 0, graphs = 0;
std::map<std::string, int> calls;
std::string failing;
int failing_at = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
int num_devices = 1;
bool aliases = std::getenv("CUDA_CPU_ALIASES") != nullptr, batched = true;
std::set<const void*> loaded;  // kernels that the device has
double clock_now = 0;  // milliseconds
// Set, events are not waited for: what a forgotten wait would do, for tests of tests.
const bool waits_are_lost = std::getenv("CUDA_CPU_LOSE_WAITS") != nullptr;
uint64_t random_state = [] {
  const char* text = std::getenv("CUDA_CPU_SEED");
  return text ? std::strtoull(text, nullptr, 10) + 1 : 1ull;
}();

unsigned next_random() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<unsigned>(random_state >> 33);
}
cudaError_t set(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
bool inject(const char* name) {
  const int n = ++calls[name];
  return failing == name && n == failing_at;
}
StreamPtr of(cudaStream_t s) {
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) return null_stream;
  return s->stream;
}
bool done(const Mark& m) { return !m.stream || m.stream->completed >= m.ticket; }
bool ready(const StreamPtr& s) {
  if (s->queue.empty()) return false;
  for (const Mark& m : s->queue.front().after)
    if (!done(m)) return false;
  Work& work = s->queue.front();
  if (work.takes.count() == 0) return true;
  const Clock::time_point now = Clock::now();
  if (work.due == Clock::time_point{})
    work.due = now + std::chrono::duration_cast<Clock::duration>(work.takes);
  return now >= work.due;
}
bool any_takes_time() {
  for (const StreamPtr& s : streams)
    if (!s->queue.empty() && s->queue.front().due != Clock::time_point{}) return true;
  return false;
}
bool step_any() {
  std::vector<StreamPtr> can;
  for (const StreamPtr& s : streams)
    if (ready(s)) can.push_back(s);
  if (can.empty()) return false;
  const StreamPtr s = can[next_random() % can.size()];
  Work work = std::move(s->queue.front());
  s->queue.pop_front();
  clock_now += 0.001 + 1e3 * work.takes.count();
  if (work.run) work.run();
  ++s->completed;
  return true;
}
// Lets work run until `p`. Other threads go on meanwhile: the caller holds the mutex once.
template <class Predicate>
void until(Predicate p) {
  for (unsigned steps = 1; !p(); ++steps) {
    if (step_any()) {
      if (steps % 16) continue;
      mutex.unlock();
      std::this_thread::yield();
    } else {
      if (!any_takes_time()) cuda_cpu::fail("deadlock between streams");
      mutex.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    mutex.lock();
  }
}
// Until what is queued now has run, whatever other threads add.
void until_all_done() {
  std::vector<Mark> marks;
  for (const StreamPtr& s : streams) marks.push_back({s, s->submitted});
  until([&] {
    for (const Mark& m : marks)
      if (!done(m)) return false;
    return true;
  });
}
void push(const StreamPtr& s, std::function<void()> run, std::vector<Mark> after = {},
          std::chrono::duration<double> takes = {}) {
  if (s == null_stream) {
    for (const StreamPtr& other : streams)
      if (other != null_stream && other->blocking && other->submitted > other->completed)
        after.push_back({other, other->submitted});
  } else if (s->blocking && null_stream->submitted > null_stream->completed) {
    after.push_back({null_stream, null_stream->submitted});
  }
  s->queue.push_back({std::move(run), std::move(after), takes, {}});
  ++s->submitted;
}
// Queues, or captures.
cudaError_t give(cudaStream_t handle, std::function<void()> run) {
  const StreamPtr s = of(handle);
  if (s != null_stream && s->device != current_device) return set(cudaErrorInvalidResourceHandle);
  if (s->capturing)
    s->captured.push_back(std::move(run));
  else
    push(s, std::move(run));
  return cudaSuccess;
}
bool any_capture() {
  for (const StreamPtr& s : streams)
    if (s->capturing) return true;
  return false;
}
// Calls that may synchronise are refused during a capture and spoil it, unless their thread says that
// it knows what it does.
bool forbidden() {
  if (capture_mode == cudaStreamCaptureModeRelaxed || !any_capture()) return false;
  for (const StreamPtr& s : streams) s->spoiled = s->spoiled || s->capturing;
  return true;
}

const Block* find(const std::map<uintptr_t, Block>& m, uintptr_t a, size_t n, uintptr_t* base) {
  auto i = m.upper_bound(a);
  if (i == m.begin()) return nullptr;
  --i;
  if (a + n > i->first + i->second.bytes) return nullptr;
  if (base) *base = i->first;
  return &i->second;
}
bool inside(const std::map<uintptr_t, Block>& m, const void* p, size_t n) {
  return find(m, reinterpret_cast<uintptr_t>(p), n, nullptr) != nullptr;
}
// Whether a copy would leave what one call has allocated or registered.
bool torn(const void* p, size_t n) {
  const uintptr_t a = reinterpret_cast<uintptr_t>(p);
  for (const auto* m : {&device_memory, &host_memory, &registered})
    for (const auto& [at, b] : *m)
      if (a < at + b.bytes && at < a + n && !(at <= a && a + n <= at + b.bytes)) return true;
  return false;
}
bool pinned(const void* p, size_t n) { return inside(host_memory, p, n) || inside(registered, p, n); }

int batch_copy(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count, void*, size_t*,
               size_t, size_t*, cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (inject("cuMemcpyBatchAsync")) return 999;
  if (of(stream) == null_stream) return 1;
  if (of(stream)->capturing) return 900;
  for (size_t i = 0; i < count; ++i)
    if (torn(reinterpret_cast<void*>(targets[i]), sizes[i]) ||
        torn(reinterpret_cast<void*>(sources[i]), sizes[i]))
      return 1;
  std::vector<size_t> turn(count);
  for (size_t i = 0; i < count; ++i) turn[i] = i;
  for (size_t i = count; i > 1; --i) std::swap(turn[i - 1], turn[next_random() % i]);
  std::vector<uint64_t> t(targets, targets + count), s(sources, sources + count);
  std::vector<size_t> n(sizes, sizes + count);
  return give(stream, [=] {
    for (const size_t i : turn)
      std::memcpy(reinterpret_cast<void*>(t[i]), reinterpret_cast<const void*>(s[i]), n[i]);
  });
}

}  // namespace

namespace cuda_cpu {

cudaError_t launch_async(const void* kernel, cudaStream_t stream, dim3 grid, dim3 block,
                         std::function<void()> work) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (inject("cudaLaunchKernel")) return set(cudaErrorLaunchOutOfResources);
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return set(cudaErrorInvalidConfiguration);
  if (loaded.insert(kernel).second && any_capture()) {  // the first launch loads, at a bad time
    loaded.erase(kernel);
    return set(cudaErrorStreamCaptureUnsupported);
  }
  return give(stream, [=] {
    // A kernel may use the alias alone, so while it runs there is nothing at the address.
    for (const auto& [address, b] : registered)
      if (b.alias != address) mprotect(reinterpret_cast<void*>(address), b.bytes, PROT_NONE);
    run(grid, block, work);
    for (const auto& [address, b] : registered)
      if (b.alias != address) mprotect(reinterpret_cast<void*>(address), b.bytes, PROT_READ | PROT_WRITE);
  });
}
void seed(uint64_t value) { random_state = value * 2 + 1; }
void fail_call(const char* name, int n) {
  failing = name ? name : "";
  failing_at = n;
  calls.clear();
}
int num_calls(const char* name) { return calls[name]; }
void reset_calls() { calls.clear(); }
Live live() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return {device_memory.size(), host_memory.size(), registered.size(), streams.size() - 1, events,
          graphs};
}
bool idle() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (const StreamPtr& s : streams)
    if (s != null_stream && !s->queue.empty()) return false;
  return true;
}
void use_aliases(bool on) { aliases = on; }
void set_devices(int count) { num_devices = count; }
void adopt_device_memory(void* p, size_t n, int device) {
  device_memory[reinterpret_cast<uintptr_t>(p)] = {n, device, 0};
}
void disown_device_memory(void* p) { device_memory.erase(reinterpret_cast<uintptr_t>(p)); }
void set_batched_copies(bool on) { batched = on; }

}  // namespace cuda_cpu

#define ENTER                                          \
  std::lock_guard<std::recursive_mutex> lock(mutex);   \
  if (inject(__func__)) return set(cudaErrorUnknown)

extern "C" {

// ---- errors, versions, devices
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "cudaErrorOther";
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "stand-in error"; }
cudaError_t cudaRuntimeGetVersion(int* v) { ENTER; *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { ENTER; *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) { ENTER; *n = num_devices; return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { ENTER; *d = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
  ENTER;
  if (d < 0 || d >= num_devices) return set(cudaErrorInvalidDevice);
  current_device = d;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  ENTER;
  *p = {};
  std::strcpy(p->name, "CPU stand-in");
  p->major = 9;
  p->multiProcessorCount = 8;
  p->asyncEngineCount = 2;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { ENTER; std::snprintf(s, n, "0000:%02x:00.0", d); return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr, int) { ENTER; *v = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { ENTER; *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { ENTER; std::swap(*mode, capture_mode); return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
  ENTER;
  const bool has = batched && std::string(name) == "cuMemcpyBatchAsync";
  *f = has ? reinterpret_cast<void*>(&batch_copy) : nullptr;
  *r = has ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* kernel) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  *a = {};
  loaded.insert(kernel);
  return cudaSuccess;
}

// ---- memory
cudaError_t cudaMalloc(void** p, size_t n) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  *p = std::aligned_alloc(512, (n + 511) / 512 * 512);
  std::memset(*p, 0xA5, n);
  device_memory[reinterpret_cast<uintptr_t>(*p)] = {n, current_device, 0};
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  ENTER;
  if (!p) return cudaSuccess;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  if (!device_memory.erase(reinterpret_cast<uintptr_t>(p))) return set(cudaErrorInvalidValue);
  until_all_done();
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  *p = std::aligned_alloc(4096, (n + 4095) / 4096 * 4096);
  host_memory[reinterpret_cast<uintptr_t>(*p)] = {n, current_device, reinterpret_cast<uintptr_t>(*p)};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  if (!host_memory.erase(reinterpret_cast<uintptr_t>(p))) return set(cudaErrorInvalidValue);
  until_all_done();
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  ENTER;
  const uintptr_t a = reinterpret_cast<uintptr_t>(p);
  for (const auto* m : {&host_memory, &registered}) {
    auto i = m->lower_bound(a + n);
    if (i != m->begin() && (--i)->first + i->second.bytes > a) return set(cudaErrorHostMemoryAlreadyRegistered);
  }
  uintptr_t alias = a;
  if (aliases) {
    void* again = mremap(p, 0, n, MREMAP_MAYMOVE);  // of a shared mapping: the same pages once more
    if (again == MAP_FAILED) cuda_cpu::fail("aliases need page-aligned shared mappings");
    alias = reinterpret_cast<uintptr_t>(again);
  }
  registered[a] = {n, current_device, alias};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  ENTER;
  const auto i = registered.find(reinterpret_cast<uintptr_t>(p));
  if (i == registered.end()) return set(cudaErrorHostMemoryNotRegistered);
  until_all_done();
  if (i->second.alias != i->first) munmap(reinterpret_cast<void*>(i->second.alias), i->second.bytes);
  registered.erase(i);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  ENTER;
  const uintptr_t a = reinterpret_cast<uintptr_t>(h);
  for (const auto* m : {&host_memory, &registered}) {
    uintptr_t base = 0;
    if (const Block* b = find(*m, a, 1, &base)) {
      *d = reinterpret_cast<void*>(b->alias + (a - base));
      return cudaSuccess;
    }
  }
  return set(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  ENTER;
  *a = {};
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  if (const Block* b = find(device_memory, at, 1, nullptr)) {
    a->type = cudaMemoryTypeDevice;
    a->device = b->device;
    a->devicePointer = const_cast<void*>(p);
  } else {
    a->type = pinned(p, 1) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->hostPointer = const_cast<void*>(p);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind kind, cudaStream_t t) {
  ENTER;
  if (kind == cudaMemcpyHostToDevice && !inside(device_memory, d, n)) return set(cudaErrorInvalidValue);
  if (kind == cudaMemcpyDeviceToHost && !inside(device_memory, s, n)) return set(cudaErrorInvalidValue);
  if (torn(d, n) || torn(s, n)) return set(cudaErrorInvalidValue);
  const cudaError_t error = give(t, [=] { std::memcpy(d, s, n); });
  if (error != cudaSuccess) return error;
  // Pageable memory: done on return.
  const void* h = kind == cudaMemcpyDeviceToHost ? d : s;
  if (kind != cudaMemcpyDeviceToDevice && !pinned(h, n)) {
    const StreamPtr stream = of(t);
    until([&] { return stream->queue.empty(); });
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind kind, cudaStream_t t) {
  ENTER;
  if (dp < w || sp < w || h == 0) return set(cudaErrorInvalidPitchValue);
  if (torn(d, dp * (h - 1) + w) || torn(s, sp * (h - 1) + w)) return set(cudaErrorInvalidValue);
  if (kind == cudaMemcpyHostToDevice && !inside(device_memory, d, dp * (h - 1) + w)) return set(cudaErrorInvalidValue);
  if (kind == cudaMemcpyDeviceToHost && !inside(device_memory, s, sp * (h - 1) + w)) return set(cudaErrorInvalidValue);
  return give(t, [=] {
    for (size_t r = 0; r < h; ++r) std::memcpy(static_cast<char*>(d) + r * dp, static_cast<const char*>(s) + r * sp, w);
  });
}
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind kind) {
  if (forbidden()) return set(cudaErrorStreamCaptureImplicit);
  const cudaError_t error = cudaMemcpyAsync(d, s, n, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t t) { ENTER; return give(t, [=] { std::memset(d, v, n); }); }
cudaError_t cudaMemset(void* d, int v, size_t n) { return cudaMemsetAsync(d, v, n, nullptr); }

// ---- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int) {
  ENTER;
  *s = new CUstream_st{std::make_shared<Stream>()};
  (*s)->stream->blocking = !(flags & cudaStreamNonBlocking);
  (*s)->stream->device = current_device;
  streams.insert((*s)->stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  ENTER;
  until([&] { return s->stream->queue.empty(); });
  streams.erase(s->stream);
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  const StreamPtr stream = of(s);
  if (stream->capturing) return set(cudaErrorStreamCaptureUnsupported);
  const Mark m{stream, stream->submitted};
  until([&] { return done(m); });
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  if (next_random() % 2) step_any();
  return of(s)->queue.empty() ? cudaSuccess : set(cudaErrorNotReady);
}
cudaError_t cudaDeviceSynchronize() {
  ENTER;
  if (forbidden() || any_capture()) return set(cudaErrorStreamCaptureUnsupported);
  until_all_done();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  ENTER;
  if (of(s)->capturing) return set(cudaErrorStreamCaptureIsolation);
  if (!waits_are_lost && !done(e->mark)) push(of(s), nullptr, {e->mark});
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* user) { ENTER; return give(s, [=] { f(user); }); }

// Not of the runtime: a kernel that does nothing, for so long from when it is its turn.
cudaError_t cuda_cpu_sleep(cudaStream_t s, double seconds) {
  ENTER;
  if (of(s)->capturing) return set(cudaErrorStreamCaptureUnsupported);
  push(of(s), nullptr, {}, std::chrono::duration<double>(seconds));
  return cudaSuccess;
}

// ---- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  ENTER;
  *e = new CUevent_st;
  (*e)->device = current_device;
  (*e)->timed = !(flags & cudaEventDisableTiming);
  ++events;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  ENTER;
  const StreamPtr stream = of(s);
  if (stream->capturing) return set(cudaErrorStreamCaptureUnsupported);
  if (e->device != current_device || (stream != null_stream && stream->device != e->device))
    return set(cudaErrorInvalidResourceHandle);
  push(stream, [at = e->at] { *at = clock_now; });
  e->mark = {stream, stream->submitted};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  if (next_random() % 2) step_any();
  return done(e->mark) ? cudaSuccess : set(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  ENTER;
  if (forbidden()) return set(cudaErrorStreamCaptureUnsupported);
  until([&] { return done(e->mark); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  ENTER;
  if (!a->timed || !b->timed) return set(cudaErrorInvalidResourceHandle);
  if (!done(a->mark) || !done(b->mark)) return set(cudaErrorNotReady);
  *ms = static_cast<float>(*b->at - *a->at);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  ENTER;
  delete e;
  --events;
  return cudaSuccess;
}

// ---- graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  ENTER;
  if (of(s) == null_stream) return set(cudaErrorStreamCaptureUnsupported);
  s->stream->capturing = true;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  ENTER;
  if (of(s) == null_stream && any_capture()) return set(cudaErrorStreamCaptureImplicit);
  *status = of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  ENTER;
  std::vector<std::function<void()>> captured;
  captured.swap(s->stream->captured);
  s->stream->capturing = false;
  *g = nullptr;
  if (std::exchange(s->stream->spoiled, false)) return set(cudaErrorStreamCaptureInvalidated);
  *g = new CUgraph_st{std::move(captured)};
  ++graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) { ENTER; *x = new CUgraphExec_st{g->work}; ++graphs; return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
  ENTER;
  for (const auto& work : x->work) push(of(s), work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { ENTER; delete g; --graphs; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) { ENTER; delete x; --graphs; return cudaSuccess; }

}  // extern "C"
