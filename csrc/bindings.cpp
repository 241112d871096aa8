// Python's view of the native core. No logic: each entry converts arguments and calls one function.
#include <pybind11/pybind11.h>

#include "descriptor.h"
#include "fastdiv.h"

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
#ifdef VKVMAP_CUDA_BINDINGS
  bind_cuda(module);
#endif
}
