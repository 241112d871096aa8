// Python's view of the GPU: `vkvmap._C.cuda`. No logic. In a build without CUDA the submodule exists,
// says so, and has nothing but arithmetic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "coalescing.h"
#ifdef VKVMAP_WITH_CUDA
#include "cuda_direct.h"
#include "cuda_mover.h"
#include "pinning.h"
#endif

namespace py = pybind11;

namespace vkvmap {

namespace {

// Arithmetic on a plan: needs neither CUDA nor a GPU.
void bind_coalescing(py::module_& cuda) {
  cuda.def("count_accesses", [](const Plan& plan, int direction) {
    py::list classes;
    for (uint32_t c = 0; c < plan.header().num_classes; ++c) {
      const AccessCounts n = count_accesses(plan, direction_of(direction), c);
      py::dict view;
      view["bytes"] = n.bytes;
      view["requests"] = n.requests;
      view["tiles"] = n.tiles;
      view["host_lines"] = n.host_lines;
      view["host_sectors"] = n.host_sectors;
      view["device_lines"] = n.device_lines;
      view["device_sectors"] = n.device_sectors;
      classes.append(view);
    }
    return classes;
  }, py::arg("plan"), py::arg("direction"));
}

}  // namespace

#ifdef VKVMAP_WITH_CUDA

namespace {

py::dict status() {
  const CudaStatus s = cuda_status();
  py::list devices;
  for (const CudaDevice& d : s.devices) {
    py::dict view;
    view["ordinal"] = d.ordinal;
    view["name"] = d.name;
    view["compute_capability"] = py::make_tuple(d.major, d.minor);
    view["multiprocessors"] = d.multiprocessors;
    view["copy_engines"] = d.copy_engines;
    view["memory_bytes"] = d.memory_bytes;
    view["pci_bus_id"] = d.pci_bus_id;
    devices.append(view);
  }
  py::dict view;
  view["runtime_version"] = s.runtime_version;
  view["driver_version"] = s.driver_version;
  view["devices"] = devices;
  view["error"] = s.error;
  return view;
}

py::dict tuning_view(const KernelTuning& t) {
  py::dict view;
  view["ctas"] = t.ctas;
  view["threads"] = t.threads;
  view["unroll"] = t.unroll;
  view["stream_hints"] = t.stream_hints;
  view["slice_bytes"] = t.slice_bytes;
  return view;
}

template <class M>
void enqueue_with(M& mover, const std::shared_ptr<const Plan>& plan, Direction direction,
                  const IdLists& ids, uintptr_t stream) {
  Transfer transfer = make_direct_transfer(plan, direction, ids.groups);
  if (transfer.num_units == 0) return;
  transfer.state = plan->mover_state(mover);
  mover.enqueue(transfer, stream);
}

}  // namespace

void bind_cuda(py::module_& module) {
  py::module_ cuda = module.def_submodule("cuda", "GPU movers, registration, device information.");
  cuda.attr("BUILT") = true;
  bind_coalescing(cuda);
  cuda.def("status", &status);
  cuda.def("exchange_capture_mode", &exchange_capture_mode, py::arg("mode"));
  cuda.def("has_batched_copies", &CopyEngineMover::has_batched_copies);
  cuda.def("cache_device", &cache_device, py::arg("plan"));
  cuda.def("mean_run_bytes", [](const Plan& plan, int direction) {
    return mean_run_bytes(plan, direction_of(direction));
  }, py::arg("plan"), py::arg("direction"));
  cuda.def("tuning", [](int direction) {
    return tuning_view(kernel_mover().tuning(direction_of(direction)));
  }, py::arg("direction"));
  cuda.def("set_tuning", [](int direction, uint32_t ctas, uint32_t threads, uint32_t unroll,
                            bool stream_hints, uint64_t slice_bytes) {
    kernel_mover().set_tuning(direction_of(direction),
                              {ctas, threads, unroll, stream_hints, slice_bytes});
  }, py::arg("direction"), py::kw_only(), py::arg("ctas"), py::arg("threads"), py::arg("unroll"),
     py::arg("stream_hints"), py::arg("slice_bytes"));
  cuda.def("prepare", [](const std::string& mover, const Plan& plan) {
    py::gil_scoped_release released;
    plan.mover_state(find_mover(mover));
  }, py::arg("mover"), py::arg("plan"));
  cuda.def("enqueue", [](const std::string& mover, std::shared_ptr<Plan> plan, int direction,
                         const py::list& groups, uintptr_t stream) {
    const IdLists ids(groups);
    py::gil_scoped_release released;
    if (mover == "kernel")
      enqueue_with(kernel_mover(), plan, direction_of(direction), ids, stream);
    else if (mover == "copy_engine")
      enqueue_with(copy_engine_mover(), plan, direction_of(direction), ids, stream);
    else
      throw py::value_error("mover '" + mover + "' runs on no stream; use kernel or copy_engine");
  }, py::arg("mover"), py::arg("plan").none(false), py::arg("direction"), py::arg("groups"),
     py::arg("stream"));

  py::class_<GraphTransfer, std::shared_ptr<GraphTransfer>>(cuda, "GraphTransfer")
      .def(py::init([](std::shared_ptr<Plan> plan, int direction,
                       const std::vector<std::pair<uint32_t, uint64_t>>& capacities) {
             std::vector<GraphTransfer::Capacity> list;
             for (const auto& [group, pairs] : capacities) list.push_back({group, pairs});
             const Direction d = direction_of(direction);
             py::gil_scoped_release released;
             return freed_without_gil(
                 std::make_shared<GraphTransfer>(plan, d, list, kernel_mover().tuning(d)));
           }), py::arg("plan").none(false), py::arg("direction"), py::arg("capacities"))
      .def("set_ids", [](GraphTransfer& t, const py::list& groups) {
             t.set_ids(IdLists(groups).groups);
           }, py::arg("groups"))
      .def("launch", &GraphTransfer::launch, py::arg("stream"))
      .def_property_readonly("num_launches", &GraphTransfer::num_launches);

  py::class_<Registration, std::shared_ptr<Registration>>(cuda, "Registration")
      .def(py::init([](const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& ranges,
                       uint64_t max_piece_bytes) {
             std::vector<PinRange> list;
             for (const auto& [address, bytes, row] : ranges) list.push_back({address, bytes, row});
             py::gil_scoped_release released;
             return freed_without_gil(std::make_shared<Registration>(list, max_piece_bytes));
           }), py::arg("ranges"), py::arg("max_piece_bytes") = kMaxPieceBytes)
      .def_property_readonly("pinned", &Registration::pinned)
      .def_property_readonly("why_not", &Registration::why_not)
      .def_property_readonly("pieces", [](const Registration& r) {
             std::vector<std::pair<uint64_t, uint64_t>> pieces;
             for (const PinnedPiece& p : r.pieces()) pieces.emplace_back(p.address, p.bytes);
             return pieces;
           })
      .def("release", &Registration::release, py::call_guard<py::gil_scoped_release>());
}

#else

void bind_cuda(py::module_& module) {
  py::module_ cuda = module.def_submodule("cuda", "This build has no CUDA.");
  cuda.attr("BUILT") = false;
  bind_coalescing(cuda);
}

#endif

}  // namespace vkvmap
