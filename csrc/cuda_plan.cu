#include "cuda_plan.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "cuda_device.h"
#include "pinning.h"

namespace vkvmap::cuda {

namespace {

// Registrations that were not made here cannot be listed, only probed. Pieces shorter than this
// between two others would go unnoticed; nobody registers host memory that finely.
constexpr uint64_t kProbeStep = uint64_t{2} << 20;

std::string hex(uint64_t value) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), digits[value & 15]);
  } while (value >>= 4);
  return "0x" + text;
}

std::optional<uint64_t> alias_at(uint64_t address) {
  void* alias = nullptr;
  if (!succeeded(cudaHostGetDevicePointer(&alias, reinterpret_cast<void*>(address), 0)))
    return std::nullopt;
  return reinterpret_cast<uint64_t>(alias);
}

}  // namespace

int device_of(const Plan& plan) {
  std::optional<int> device;
  for (const Range& range : plan.local_ranges()) {
    cudaPointerAttributes attributes = {};
    check(cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(range.address)),
          "cudaPointerGetAttributes");
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged)
      throw std::invalid_argument("the cache at " + hex(range.address) +
                                  " is not in device memory; caches in host memory are moved by "
                                  "the host mover");
    if (device && *device != attributes.device)
      throw std::invalid_argument("the caches of one plan lie on devices " +
                                  std::to_string(*device) + " and " +
                                  std::to_string(attributes.device) + "; make a plan per device");
    device = attributes.device;
  }
  if (!device) throw std::invalid_argument("the plan has no cache memory");
  return *device;
}

Alias alias_of(uint64_t address, uint64_t bytes) {
  const uint64_t end = address + bytes;
  std::vector<uint64_t> probes = piece_starts(address, end);
  for (const uint64_t start : std::vector<uint64_t>(probes))  // and the last byte before each
    if (start > address) probes.push_back(start - 1);
  for (uint64_t at = address; at < end; at += kProbeStep) probes.push_back(at);
  probes.push_back(end - 1);
  std::sort(probes.begin(), probes.end());
  std::optional<uint64_t> delta;
  for (const uint64_t at : probes) {
    const std::optional<uint64_t> alias = alias_at(at);
    if (!alias)
      return {std::nullopt, "the device cannot reach host memory at " + hex(at) +
                                ": it is not registered with CUDA. Pin the region, or use the "
                                "copy_engine mover"};
    if (delta && *delta != *alias - at)
      return {std::nullopt, "the device sees host memory at " + hex(at) +
                                " at another distance than the bytes before it, so one base cannot "
                                "address both. Register the region as one piece, or use the "
                                "copy_engine mover"};
    delta = *alias - at;
  }
  if (delta && *delta % kMaxVectorBytes != 0)
    return {std::nullopt, "the device sees host memory at " + hex(address) +
                              " at another alignment than the host does. Use the copy_engine mover"};
  return {delta, ""};
}

bool is_pinned(const Plan& plan) {
  for (const Range& range : plan.host_ranges()) {
    for (uint64_t at = 0; at < range.bytes; at += kProbeStep)
      if (!alias_at(range.address + at)) return false;
    if (range.bytes > 0 && !alias_at(range.address + range.bytes - 1)) return false;
  }
  return true;
}

DevicePlan::DevicePlan(const Plan& plan) : device(device_of(plan)) {
  DeviceGuard guard(device);
  CaptureModeGuard relaxed;
  const DescriptorHeader& header = plan.header();

  std::vector<LayerEntry> layers(plan.layers(), plan.layers() + header.num_layers);
  std::map<std::pair<uint64_t, uint64_t>, Alias> known;
  for (uint32_t c = 0; c < header.num_classes; ++c) {
    const LayerClass& layer_class = plan.classes()[c];
    if (layer_class.num_rows == 0) continue;
    for (uint32_t l = 0; l < layer_class.num_layers; ++l) {
      LayerEntry& layer = layers[layer_class.first_layer + l];
      // A region is one allocation far more often than not: ask once for all of the range the layer
      // lies in, and only if that has no single answer for the layer's own part of it.
      const uint64_t bytes = (layer_class.num_rows - 1) * layer.host_row_stride +
                             (layer_class.pages_per_row - 1) * layer.host_page_stride +
                             plan.host_extent(c);
      const Range* home = nullptr;
      for (const Range& range : plan.host_ranges())
        if (layer.host_base >= range.address &&
            layer.host_base + bytes <= range.address + range.bytes)
          home = &range;
      if (!home)
        throw std::invalid_argument(plan.layer_name(layer.layer_id) +
                                    ": its canonical pages lie in no host range of the plan");
      Alias& whole = known[{home->address, home->bytes}];
      if (!whole.delta && whole.why_not.empty()) whole = alias_of(home->address, home->bytes);
      const Alias own = whole.delta ? whole : alias_of(layer.host_base, bytes);
      if (!own.delta)
        throw std::invalid_argument(plan.layer_name(layer.layer_id) + ": " +
                                    own.why_not);
      layer.host_base += *own.delta;
    }
  }

  const size_t layer_bytes = layers.size() * sizeof(LayerEntry);
  const size_t tile_bytes = header.num_tiles * sizeof(Tile);
  static_assert(sizeof(LayerEntry) % 16 == 0 && sizeof(Tile) % 16 == 0);
  check(cudaMalloc(&memory_, layer_bytes + tile_bytes + 16), "cudaMalloc");
  try {
    uint8_t* base = static_cast<uint8_t*>(memory_);
    // Not on the default stream: that would disturb a capture under way in another thread.
    const cudaStream_t stream = Device::get(device).stream(Lane::setup);
    if (layer_bytes)
      check(cudaMemcpyAsync(base, layers.data(), layer_bytes, cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
    if (tile_bytes)
      check(cudaMemcpyAsync(base + layer_bytes, plan.tiles(), tile_bytes, cudaMemcpyHostToDevice,
                            stream),
            "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    layers_ = reinterpret_cast<const LayerEntry*>(base);
    tiles_ = reinterpret_cast<const Tile*>(base + layer_bytes);
  } catch (...) {
    succeeded(cudaFree(memory_));  // waits for the copies
    throw;
  }
}

DevicePlan::~DevicePlan() {
  if (!home_.is_here()) return;
  try {
    DeviceGuard guard(device);
    CaptureModeGuard relaxed;
    succeeded(cudaFree(memory_));
  } catch (const CudaError&) {
    // The device is gone, and its memory with it.
  }
}

std::vector<CopyBox> merge_tiles(const Tile* tiles, uint32_t num_tiles) {
  // Fragments in host order, joined where both sides continue; then equal runs at equal distances.
  std::vector<CopyBox> runs;
  for (uint32_t t = 0; t < num_tiles; ++t) {
    const Tile& tile = tiles[t];
    for (uint32_t j = 0; j < tile.count[1]; ++j)
      for (uint32_t i = 0; i < tile.count[0]; ++i) {
        const uint64_t local =
            tile.local_offset + i * tile.local_stride[0] + j * tile.local_stride[1];
        const uint64_t host = tile.host_offset + i * tile.host_stride[0] + j * tile.host_stride[1];
        runs.push_back({local, host, tile.fragment_bytes, 1, 0, 0});
      }
  }
  std::sort(runs.begin(), runs.end(), [](const CopyBox& a, const CopyBox& b) {
    return a.host_offset < b.host_offset;
  });
  size_t kept = 0;
  for (const CopyBox& run : runs) {
    if (kept > 0) {
      CopyBox& last = runs[kept - 1];
      if (last.host_offset + last.bytes == run.host_offset &&
          last.local_offset + last.bytes == run.local_offset) {
        last.bytes += run.bytes;
        continue;
      }
    }
    runs[kept++] = run;
  }
  runs.resize(kept);

  std::vector<CopyBox> boxes;
  for (const CopyBox& run : runs) {
    if (!boxes.empty() && boxes.back().bytes == run.bytes) {
      CopyBox& box = boxes.back();
      const uint64_t last_local = box.local_offset + (box.rows - 1) * box.local_stride;
      const uint64_t last_host = box.host_offset + (box.rows - 1) * box.host_stride;
      // A pitch must not be negative, nor shorter than a row.
      const bool ascends = run.local_offset >= last_local + run.bytes;
      const uint64_t local_step = run.local_offset - last_local;
      const uint64_t host_step = run.host_offset - last_host;
      if (ascends && (box.rows == 1 ||
                      (box.local_stride == local_step && box.host_stride == host_step))) {
        box.local_stride = local_step;
        box.host_stride = host_step;
        ++box.rows;
        continue;
      }
    }
    boxes.push_back(run);
  }
  return boxes;
}

}  // namespace vkvmap::cuda
