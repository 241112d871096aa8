// What both movers of a GPU do around the work itself: wait for the caller's stream, run on a lane,
// wait for the end, and account for it.
//
// What must stay true: when move() returns, nothing of the transfer is running, also after a failure;
// a failure is told for every page of the range, because which of them the device got to is unknown.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda_device.h"
#include "mover.h"

namespace vkvmap::cuda {

struct Ticket {
  Event event;  // behind all that the caller's stream had been given when the transfer was submitted
};

// Handle 0 is the legacy default stream: the event is then behind everything in blocking streams.
inline std::shared_ptr<void> record_caller(int device, uintptr_t stream) {
  DeviceGuard guard(device);
  const cudaStream_t caller = stream_of(stream);
  if (is_capturing(caller))
    throw std::invalid_argument(
        "the stream is being captured into a graph; an engine's transfer cannot be part of a graph. "
        "Make a captured transfer before the capture and launch it inside");
  auto ticket = std::make_shared<Ticket>();
  ticket->event.record(caller);
  return ticket;
}

// Every page of units [first, last): what a success amounts to, or one failure each.
inline void account(const Transfer& transfer, uint64_t first, uint64_t last, const std::string& why,
                    MoveReport& report) {
  for (const WorkList& list : transfer.lists) {
    const uint64_t end = list.first_unit + list.num_layers * list.num_pairs;
    const uint64_t from = std::max(first, list.first_unit), to = std::min(last, end);
    if (from >= to) continue;
    const LayerClass& layer_class = transfer.plan->classes()[list.class_index];
    if (why.empty()) {
      report.pages += to - from;
      report.bytes += (to - from) * transfer.plan->page_bytes(layer_class, transfer.direction);
      report.fragments +=
          (to - from) * transfer.plan->page_fragments(layer_class, transfer.direction);
      continue;
    }
    for (uint64_t unit = from; unit < to; ++unit) {
      const uint64_t at = unit - list.first_unit;
      const BlockPair& pair = list.pairs[at % list.num_pairs];
      const LayerEntry& layer =
          transfer.plan->layers()[list.first_layer + static_cast<uint32_t>(at / list.num_pairs)];
      report.failures.push_back(
          {layer.layer_id, pair.block,
           uint64_t{pair.row} * layer_class.pages_per_row + pair.page, why});
    }
  }
}

// Short transfers are over before a sleeping thread would wake: ask for a while, then sleep.
inline void wait_for(const Event& event) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  while (std::chrono::steady_clock::now() < until) {
    if (event.done()) return;
    std::this_thread::yield();
  }
  event.wait();
}

template <class Enqueue>
void run_on_lane(const Transfer& transfer, uint64_t first, uint64_t last, int device,
                 MoveReport& report, Enqueue enqueue) {
  std::string why;
  cudaStream_t stream = nullptr;
  try {
    DeviceGuard guard(device);
    CaptureModeGuard relaxed;
    stream = Device::get(device).stream(transfer.direction == Direction::Store ? Lane::store
                                        : transfer.expedited                   ? Lane::expedited
                                                                               : Lane::load);
    try {
      if (transfer.ticket) static_cast<Ticket*>(transfer.ticket.get())->event.hold(stream);
      Event end;
      enqueue(stream);
      end.record(stream);
      wait_for(end);
    } catch (const std::exception& e) {
      why = e.what();
      succeeded(cudaStreamSynchronize(stream));
    }
  } catch (const std::exception& e) {
    why = e.what();
  }
  account(transfer, first, last, why, report);
}

template <class Enqueue>
void run_on_caller(int device, uintptr_t handle, Enqueue enqueue) {
  DeviceGuard guard(device);
  const cudaStream_t stream = stream_of(handle);
  if (is_capturing(stream))
    throw std::invalid_argument(
        "the stream is being captured into a graph: launch a captured transfer instead, whose pairs "
        "stay readable for every replay");
  CaptureModeGuard relaxed;
  try {
    enqueue(stream);
  } catch (...) {
    succeeded(cudaStreamSynchronize(stream));
    throw;
  }
}

}  // namespace vkvmap::cuda
