// The CUDA runtime as the rest of csrc/ uses it: errors become exceptions, handles have owners, and
// the calling thread's device is put back.
//
// What must stay true: the last-error slot, which other libraries of the process read, is never left
// holding an error of ours; destructors do not throw. Included by .cu files only.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_launch.h"

namespace vkvmap::cuda {

class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& what, cudaError_t code) : std::runtime_error(what), code(code) {}
  const cudaError_t code;
};

inline std::string describe(const char* call, cudaError_t error) {
  return std::string(call) + " failed: " + cudaGetErrorName(error) + " (" +
         cudaGetErrorString(error) + ")";
}

// Throws unless `error` is success; clears the last-error slot, which a failing call has set.
inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw CudaError(describe(call, error), error);
}

// True for success; an error is dropped, from the last-error slot too.
inline bool succeeded(cudaError_t error) {
  if (error == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

// Makes `device` current for a scope. Kernels and events must be used with the device they belong to.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) succeeded(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// While another thread captures a graph in global mode, calls that could synchronise are refused in
// every thread and spoil that capture. Ours have nothing to do with it, and say so.
class CaptureModeGuard {
 public:
  CaptureModeGuard() { ok_ = succeeded(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~CaptureModeGuard() {
    if (ok_) succeeded(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  CaptureModeGuard(const CaptureModeGuard&) = delete;
  CaptureModeGuard& operator=(const CaptureModeGuard&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool ok_ = false;
};

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync) {
    check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
  }
  ~Event() { succeeded(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  // Never blocks. Throws if the device has failed.
  bool done() const {
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  }
  void wait() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  void hold(cudaStream_t stream) const {  // work on `stream` from here on waits for the event
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

inline cudaStream_t stream_of(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  // The legacy default stream cannot be asked while another stream is being captured.
  if (error == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    return false;
  }
  check(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace vkvmap::cuda
