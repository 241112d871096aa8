// Python's view of the native core. No logic: each entry converts arguments and calls one function.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "descriptor.h"
#include "engine.h"
#include "fastdiv.h"
#include "host_copy.h"
#include "host_mover.h"
#include "mover.h"
#include "validate.h"

namespace py = pybind11;

namespace {

// The packer writes the structs of descriptor.h with numpy; it learns their shape from here alone.
#define VKVMAP_FIELD(type, field) \
  fields[#field] = py::make_tuple(offsetof(type, field), sizeof(type::field))

py::dict descriptor_layout() {
  using namespace vkvmap;
  py::dict layout;
  {
    py::dict fields;
    fields["size"] = sizeof(DescriptorHeader);
    VKVMAP_FIELD(DescriptorHeader, magic);
    VKVMAP_FIELD(DescriptorHeader, version);
    VKVMAP_FIELD(DescriptorHeader, num_classes);
    VKVMAP_FIELD(DescriptorHeader, num_layers);
    VKVMAP_FIELD(DescriptorHeader, num_tiles);
    VKVMAP_FIELD(DescriptorHeader, num_groups);
    VKVMAP_FIELD(DescriptorHeader, total_bytes);
    layout["DescriptorHeader"] = fields;
  }
  {
    py::dict fields;
    fields["size"] = sizeof(LayerClass);
    VKVMAP_FIELD(LayerClass, first_layer);
    VKVMAP_FIELD(LayerClass, num_layers);
    VKVMAP_FIELD(LayerClass, group);
    VKVMAP_FIELD(LayerClass, num_writers);
    VKVMAP_FIELD(LayerClass, writer_index);
    VKVMAP_FIELD(LayerClass, pages_per_row);
    VKVMAP_FIELD(LayerClass, store_first_tile);
    VKVMAP_FIELD(LayerClass, store_num_tiles);
    VKVMAP_FIELD(LayerClass, load_first_tile);
    VKVMAP_FIELD(LayerClass, load_num_tiles);
    VKVMAP_FIELD(LayerClass, store_page_bytes);
    VKVMAP_FIELD(LayerClass, load_page_bytes);
    VKVMAP_FIELD(LayerClass, store_page_fragments);
    VKVMAP_FIELD(LayerClass, load_page_fragments);
    VKVMAP_FIELD(LayerClass, num_blocks);
    VKVMAP_FIELD(LayerClass, num_rows);
    layout["LayerClass"] = fields;
  }
  {
    py::dict fields;
    fields["size"] = sizeof(LayerEntry);
    VKVMAP_FIELD(LayerEntry, local_base);
    VKVMAP_FIELD(LayerEntry, local_stride);
    VKVMAP_FIELD(LayerEntry, host_base);
    VKVMAP_FIELD(LayerEntry, host_row_stride);
    VKVMAP_FIELD(LayerEntry, host_page_stride);
    VKVMAP_FIELD(LayerEntry, layer_id);
    VKVMAP_FIELD(LayerEntry, reserved);
    layout["LayerEntry"] = fields;
  }
  {
    py::dict fields;
    fields["size"] = sizeof(Tile);
    VKVMAP_FIELD(Tile, local_offset);
    VKVMAP_FIELD(Tile, host_offset);
    VKVMAP_FIELD(Tile, local_stride);
    VKVMAP_FIELD(Tile, host_stride);
    VKVMAP_FIELD(Tile, fragment_bytes);
    VKVMAP_FIELD(Tile, bytes);
    VKVMAP_FIELD(Tile, count);
    VKVMAP_FIELD(Tile, width_log2);
    VKVMAP_FIELD(Tile, reserved0);
    VKVMAP_FIELD(Tile, units_div);
    VKVMAP_FIELD(Tile, count_div);
    VKVMAP_FIELD(Tile, reserved1);
    layout["Tile"] = fields;
  }
  return layout;
}
#undef VKVMAP_FIELD


using vkvmap::Buffer;
using vkvmap::direction_of;
using vkvmap::Engine;
using vkvmap::Job;
using vkvmap::JobPtr;
using vkvmap::Lane;
using vkvmap::Plan;

// Checking and queueing this many pairs takes longer than handing the interpreter over.
constexpr size_t kPairsWorthTheGil = 4096;

// What a job keeps alive until its last byte: dropped by the engine on a calling thread.
struct Kept {
  py::object object;
  std::unique_ptr<Buffer> progress;
};

Lane lane_of(const std::string& name) {
  if (name == "store") return Lane::Store;
  if (name == "load") return Lane::Load;
  if (name == "expedited") return Lane::Expedited;
  throw py::value_error("lane '" + name + "' must be 'store', 'load' or 'expedited'");
}

const char* lane_name(Lane lane) {
  return lane == Lane::Store ? "store" : lane == Lane::Load ? "load" : "expedited";
}

std::shared_ptr<Plan> make_plan(const py::buffer& descriptor,
                                const std::vector<std::pair<uint64_t, uint64_t>>& local,
                                const std::vector<std::pair<uint64_t, uint64_t>>& host,
                                std::vector<std::string> layer_names, std::string device) {
  const Buffer bytes(descriptor, PyBUF_C_CONTIGUOUS, "descriptor", "contiguous bytes");
  auto ranges = [](const auto& pairs) {
    std::vector<vkvmap::Range> converted;
    for (const auto& [address, length] : pairs) converted.push_back({address, length});
    return converted;
  };
  return vkvmap::freed_without_gil(std::make_shared<Plan>(
      bytes.view().buf, static_cast<size_t>(bytes.view().len), ranges(local), ranges(host),
      std::move(layer_names), std::move(device)));
}

JobPtr submit(Engine& engine, std::shared_ptr<Plan> plan, int direction, const py::list& groups,
              bool expedited, std::optional<std::pair<uint32_t, uint32_t>> layers,
              const py::object& progress, uint32_t progress_value, uint64_t tag,
              const std::string& mover, uintptr_t stream, bool report, bool notify,
              const py::object& keep) {
  vkvmap::SubmitRequest request;
  request.plan = std::move(plan);
  request.direction = direction_of(direction);
  request.expedited = expedited;
  if (layers) request.layers = {layers->first, layers->second};
  request.tag = tag;
  request.mover = &vkvmap::find_mover(mover);
  request.stream = stream;
  request.report = report;
  request.notify = notify;

  const vkvmap::IdLists ids(groups);
  request.groups = ids.groups;

  auto kept = std::make_unique<Kept>();
  kept->object = keep;
  if (py::isinstance<py::int_>(progress)) {
    request.progress.words = reinterpret_cast<uint32_t*>(py::cast<uintptr_t>(progress));
    request.progress.count = UINT64_MAX;
  } else if (!progress.is_none()) {
    kept->progress = std::make_unique<Buffer>(progress, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE,
                                              "progress", "a writable uint32 array");
    if (!kept->progress->holds("IL", 4)) throw py::type_error("progress must be a uint32 array");
    request.progress.words = static_cast<uint32_t*>(kept->progress->view().buf);
    request.progress.count = static_cast<uint64_t>(kept->progress->view().len / 4);
  }
  request.progress.value = progress_value;
  if (!keep.is_none() || kept->progress) {
    request.keep = std::shared_ptr<void>(kept.release(), [](void* held) {
      if (!Py_IsInitialized()) return;
      py::gil_scoped_acquire gil;
      delete static_cast<Kept*>(held);
    });
  }

  JobPtr job;
  {
    std::optional<py::gil_scoped_release> released;
    if (ids.num_pairs > kPairsWorthTheGil) released.emplace();
    job = engine.submit(request);
  }
  return job;
}

// Waits in pieces, so that Ctrl-C is heard.
template <typename Wait>
bool wait_with_signals(const std::optional<double>& timeout, Wait wait) {
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now();
  while (true) {
    double piece = 0.1;
    if (timeout) {
      const double left =
          *timeout - std::chrono::duration<double>(Clock::now() - begun).count();
      piece = std::max(0.0, std::min(piece, left));
    }
    {
      py::gil_scoped_release released;
      if (wait(piece)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout && std::chrono::duration<double>(Clock::now() - begun).count() >= *timeout) {
      return false;
    }
  }
}

py::dict job_result(const Job& job) {
  if (!job.done()) throw std::runtime_error("result: the job is not done; wait for it");
  const vkvmap::JobResult& result = job.result();
  py::list failed;
  for (const vkvmap::PageFailure& failure : result.failures) {
    failed.append(py::make_tuple(job.plan().layer_name(failure.layer_id), failure.block,
                                 failure.page, failure.why));
  }
  py::dict view;
  view["bytes"] = result.bytes;
  view["fragments"] = result.fragments;
  view["pages"] = result.pages;
  view["mover"] = job.mover_name();
  view["queue_s"] = result.queue_seconds;
  view["copy_s"] = result.copy_seconds;
  view["cancelled"] = result.cancelled;
  view["error"] = result.error.empty() ? py::object(py::none()) : py::str(result.error);
  view["failed_pages"] = result.failed_pages;
  view["failed"] = failed;
  return view;
}

py::dict histogram(const vkvmap::TimeHistogram& times) {
  py::dict view;
  view["counts"] = std::vector<uint64_t>(times.counts.begin(), times.counts.end());
  view["sum_s"] = times.sum_seconds;
  return view;
}

py::dict counters(Engine& engine) {
  py::dict by_direction;
  for (const auto& [key, counted] : engine.counters()) {
    py::dict view;
    view["submitted"] = counted.submitted;
    view["finished"] = counted.finished;
    view["failed"] = counted.failed;
    view["cancelled"] = counted.cancelled;
    view["bytes"] = counted.bytes;
    view["pages"] = counted.pages;
    view["fragments"] = counted.fragments;
    view["failed_pages"] = counted.failed_pages;
    view["queue"] = histogram(counted.queue);
    view["copy"] = histogram(counted.copy);
    by_direction[py::make_tuple(key.first, key.second)] = view;
  }
  return by_direction;
}

uint32_t lane_mask(const std::vector<std::string>& lanes) {
  uint32_t mask = 0;
  for (const std::string& lane : lanes) mask |= 1u << static_cast<uint32_t>(lane_of(lane));
  return mask;
}

}  // namespace

#ifdef VKVMAP_CUDA_BINDINGS
namespace vkvmap {
void bind_cuda(py::module_& module);  // cuda_bindings.cpp
}
#endif

PYBIND11_MODULE(_C, module) {
  using namespace vkvmap;
  module.doc() = "Native core of vkvmap: descriptor, movers, transfer engine.";
  module.attr("DESCRIPTOR_MAGIC") = kDescriptorMagic;
  module.attr("DESCRIPTOR_VERSION") = kDescriptorVersion;
  module.attr("TILE_BYTES") = kTileBytes;
  module.attr("HOST_LINE_BYTES") = kHostLineBytes;
  module.attr("MAX_VECTOR_BYTES") = kMaxVectorBytes;
  module.attr("FASTDIV_SHIFT") = kFastDivShift;
  module.attr("DESCRIPTOR_LAYOUT") = descriptor_layout();
  module.attr("STORE") = 0;
  module.attr("LOAD") = 1;

  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init(&make_plan), py::arg("descriptor"), py::arg("local_ranges"),
           py::arg("host_ranges"), py::arg("layer_names") = std::vector<std::string>{},
           py::arg("device") = "cpu")
      .def_property_readonly("nbytes", &Plan::size)
      .def_property_readonly("num_layers", [](const Plan& p) { return p.header().num_layers; })
      .def_property_readonly("num_tiles", [](const Plan& p) { return p.header().num_tiles; })
      .def_property_readonly("num_groups", [](const Plan& p) { return p.groups().size(); })
      .def("num_blocks", [](const Plan& p, size_t g) { return p.groups().at(g).num_blocks; })
      .def("num_pages", [](const Plan& p, size_t g) { return p.groups().at(g).num_pages; });

  py::class_<Job, JobPtr>(module, "Job")
      .def_property_readonly("id", &Job::id)
      .def_property_readonly("tag", &Job::tag)
      .def_property_readonly("direction", [](const Job& j) { return static_cast<int>(j.direction()); })
      .def_property_readonly("lane", [](const Job& j) { return lane_name(j.lane()); })
      .def_property_readonly("mover", &Job::mover_name)
      .def("done", &Job::done)
      .def("wait", [](Job& j, std::optional<double> timeout) {
             return j.done() || wait_with_signals(timeout, [&](double s) { return j.wait(s); });
           }, py::arg("timeout") = py::none())
      .def("result", &job_result)
      .def("cancel", &Job::cancel);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init([](size_t threads) { return freed_without_gil(Engine::create(threads)); }),
           py::arg("threads"))
      .def_property_readonly("threads", &Engine::num_threads)
      .def_property_readonly("in_flight", &Engine::in_flight)
      .def("submit", &submit, py::arg("plan"), py::arg("direction"), py::arg("groups"),
           py::kw_only(), py::arg("expedited") = false, py::arg("layers") = py::none(),
           py::arg("progress") = py::none(), py::arg("progress_value") = 1, py::arg("tag") = 0,
           py::arg("mover") = "host", py::arg("stream") = 0, py::arg("report") = true,
           py::arg("notify") = false, py::arg("keep") = py::none())
      .def("finished", [](Engine& e, const std::string& lane) { return e.finished(lane_of(lane)); },
           py::arg("lane"))
      .def("wait_notified", &Engine::wait_notified, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("drain", [](Engine& e, const Plan& plan, std::optional<double> timeout) {
             return wait_with_signals(timeout, [&](double s) { return e.drain(plan, s); });
           }, py::arg("plan"), py::arg("timeout") = py::none())
      .def("cancel_pending", &Engine::cancel_pending, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", [](Engine& e, bool drain, std::optional<double> timeout) {
             return wait_with_signals(timeout, [&](double s) { return e.shutdown(drain, s); });
           }, py::arg("drain") = true, py::arg("timeout") = py::none())
      .def("counters", &counters)
      .def("reports_dropped", &Engine::reports_dropped)
      .def("stall", [](Engine& e, const std::vector<std::string>& lanes) { e.stall(lane_mask(lanes)); },
           py::arg("lanes") = std::vector<std::string>{"store", "load", "expedited"})
      .def("resume", &Engine::resume)
      .def("inject_fault", [](Engine& e, int direction, uint32_t layer_id, uint64_t page,
                              std::string why) {
             e.inject_fault(direction_of(direction), layer_id, page, std::move(why));
           }, py::arg("direction"), py::arg("layer_id"), py::arg("page"), py::arg("why"))
      .def("clear_faults", &Engine::clear_faults);

  module.def("mover_names", &mover_names);
  module.def("instruction_sets", &instruction_sets);
  module.def("instruction_set", &instruction_set);
  module.def("set_instruction_set", &set_instruction_set, py::arg("name"));
  module.def("host_streaming_bytes", &host_streaming_bytes);
  module.def("set_host_streaming_bytes", &set_host_streaming_bytes, py::arg("bytes"));
  module.attr("HISTOGRAM_BUCKETS") = TimeHistogram::kBuckets;

  // Caches are freed while the interpreter ends; nothing may be copied to or from them then.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release released;
    Engine::shutdown_all(10);
  }));
#ifdef VKVMAP_CUDA_BINDINGS
  bind_cuda(module);
#endif
}
