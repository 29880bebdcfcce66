// libhsakmt.so.1: the part of the driver's library through which user-mode SDMA queues are made.
//
// On a real machine these functions live in a static archive; programs that load them by name find them only here.
// Node 0 is the CPU, node n + 1 is device n. Structures are packed to 4 bytes as in the 2025 headers (the ones with
// NumNeuralCores and Capability2 in the node properties).
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "node/copy_engines.hpp"
#include "node/device.hpp"
#include "node/node.hpp"

using namespace mori_sim;

namespace {

enum Status { kOk = 0, kError = 1, kBadParameter = 3, kBadNode = 5, kNoMemory = 6, kNotOpened = 20, kAlreadyOpened = 22 };
enum QueueType { kQueueSdma = 2, kQueueSdmaXgmi = 5, kQueueSdmaByEngine = 6 };
constexpr uint32_t kLinkPcie = 2, kLinkXgmi = 11;
constexpr uint32_t kUncachedFlag = 1u << 17;

#pragma pack(push, 4)
struct SystemProperties {
  uint32_t num_nodes, oem, id, revision;
};
struct NodeProperties {
  uint32_t num_cpu_cores, num_simds, num_neural_cores, num_memory_banks, num_caches, num_io_links, cpu_id, simd_id;
  uint32_t capability, capability2;
  uint32_t max_waves_per_simd, lds_kb, gds_kb, wavefront_size, num_shader_banks, num_arrays, num_cu_per_array,
      num_simd_per_cu, max_scratch_slots;
  uint32_t engine_id, override_engine_id;
  uint16_t vendor_id, device_id;
  uint32_t location_id;
  uint64_t local_memory_bytes;
  uint32_t max_clock_gpu_mhz, max_clock_cpu_mhz;
  int32_t drm_render_minor;
  uint16_t marketing_name[64];
  uint8_t amd_name[64];
  uint32_t engine_versions;
  uint64_t debug_properties, hive_id;
  uint32_t num_sdma_engines, num_sdma_xgmi_engines;
  uint8_t num_queues_per_engine, num_cp_queues, num_gws, integrated;
  uint32_t domain;
  uint64_t unique_id;
  uint32_t vgpr_bytes_per_cu, sgpr_bytes_per_cu, num_xcc, kfd_gpu_id, family_id, cwsr_bytes, control_stack_bytes;
};
struct IoLink {
  uint32_t type, version_major, version_minor, node_from, node_to, weight, min_latency, max_latency, min_bandwidth,
      max_bandwidth, transfer_bytes, recommended_engines, flags;
};
struct QueueResource {
  uint64_t id;
  uint64_t *doorbell, *write_pointer, *read_pointer;
  int64_t* error;
};
struct VersionInfo {
  uint32_t major, minor;
};
#pragma pack(pop)
static_assert(sizeof(QueueResource) == 40 && sizeof(IoLink) == 52);

std::mutex g_mutex;
int g_opened = 0;
std::map<uint64_t, uint64_t> g_allocations;  // address -> bytes

int num_devices() { return Node::instance().settings.num_devices; }
bool is_device(uint32_t node) { return node >= 1 && node <= static_cast<uint32_t>(num_devices()); }
int device_of(uint32_t node) { return static_cast<int>(node) - 1; }

template <class Body>
int guarded(const char* name, Body body) {
  try {
    if (g_opened == 0) return kNotOpened;
    return body();
  } catch (const QueueLimit& error) {
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
    return kError;  // as the library reports the driver's ENOMEM
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
    return kBadParameter;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
    return kError;
  }
}

IoLink link(int from, int to) {  // -1: the CPU
  IoLink l{};
  const bool peer = from >= 0 && to >= 0;
  l.type = peer ? kLinkXgmi : kLinkPcie;
  l.node_from = static_cast<uint32_t>(from + 1);
  l.node_to = static_cast<uint32_t>(to + 1);
  l.weight = peer ? 15 : 20;
  if (peer) l.recommended_engines = CopyEngines::recommended_engines(num_devices(), from, to);
  else if (from >= 0) l.recommended_engines = (1u << mi355x::kOrdinaryEngines) - 1;
  return l;
}

}  // namespace

extern "C" {

int hsaKmtOpenKFD() {
  try {
    Node::instance();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mori-sim: hsaKmtOpenKFD: %s\n", error.what());
    return kError;
  }
  std::lock_guard lock(g_mutex);
  return g_opened++ == 0 ? kOk : kAlreadyOpened;
}
int hsaKmtCloseKFD() {
  std::lock_guard lock(g_mutex);
  if (g_opened == 0) return kNotOpened;
  --g_opened;
  return kOk;
}
int hsaKmtGetVersion(VersionInfo* version) {
  return guarded("hsaKmtGetVersion", [&] {
    *version = {1, 18};
    return kOk;
  });
}
int hsaKmtAcquireSystemProperties(SystemProperties* properties) {
  return guarded("hsaKmtAcquireSystemProperties", [&] {
    if (properties == nullptr) return kBadParameter;
    *properties = {};
    properties->num_nodes = static_cast<uint32_t>(num_devices()) + 1;
    return kOk;
  });
}
int hsaKmtReleaseSystemProperties() { return g_opened > 0 ? kOk : kNotOpened; }
int hsaKmtGetNodeProperties(uint32_t node, NodeProperties* properties) {
  return guarded("hsaKmtGetNodeProperties", [&] {
    if (properties == nullptr) return kBadParameter;
    std::memset(properties, 0, sizeof *properties);
    NodeProperties& p = *properties;
    p.num_io_links = static_cast<uint32_t>(num_devices());
    if (node == 0) {
      p.num_cpu_cores = 1;
      return kOk;
    }
    if (!is_device(node)) return kBadNode;
    p.num_simds = 1024;
    p.max_waves_per_simd = mi355x::kWavesPerSimd;
    p.lds_kb = mi355x::kLdsBytes / 1024;
    p.wavefront_size = mi355x::kLanes;
    p.num_arrays = 32;
    p.num_shader_banks = 32;
    p.num_cu_per_array = 9;
    p.num_simd_per_cu = mi355x::kSimdsPerCu;
    p.engine_id = 9u << 10 | 5u << 16;  // 9.5.0
    p.vendor_id = 0x1002;
    p.device_id = mi355x::kChipId;
    p.location_id = static_cast<uint32_t>(0x10 + device_of(node) * 0x10) << 8;
    p.local_memory_bytes = mi355x::kMemoryBytes;
    p.max_clock_gpu_mhz = mi355x::kClockKhz / 1000;
    p.drm_render_minor = 128 + device_of(node);
    std::strcpy(reinterpret_cast<char*>(p.amd_name), "gfx950");
    p.hive_id = 0x6d6f7269;
    p.num_sdma_engines = mi355x::kOrdinaryEngines;
    p.num_sdma_xgmi_engines = mi355x::kXgmiEngines;
    p.num_queues_per_engine = static_cast<uint8_t>(Node::instance().settings.queues_per_engine);
    p.num_cp_queues = 24;
    p.unique_id = 0x1000 + static_cast<uint64_t>(node);
    p.num_xcc = mi355x::kNumXcds;
    p.kfd_gpu_id = 0x100 + node;
    return kOk;
  });
}
int hsaKmtGetNodeIoLinkProperties(uint32_t node, uint32_t count, IoLink* links) {
  return guarded("hsaKmtGetNodeIoLinkProperties", [&] {
    if (links == nullptr) return kBadParameter;
    if (node != 0 && !is_device(node)) return kBadNode;
    const int from = static_cast<int>(node) - 1;
    uint32_t filled = 0;
    for (int to = -1; to < num_devices() && filled < count; ++to)
      if (to != from) links[filled++] = link(from, to);
    return kOk;
  });
}

int hsaKmtAllocMemory(uint32_t node, uint64_t nbytes, uint32_t flags, void** memory) {
  return guarded("hsaKmtAllocMemory", [&] {
    if (memory == nullptr || nbytes == 0 || nbytes % 4096 != 0) return kBadParameter;
    if (node != 0 && !is_device(node)) return kBadNode;
    const bool host = node == 0;
    const uint64_t address = Node::instance().memory.allocate(nbytes, host ? kHostMemory : device_of(node), host || (flags & kUncachedFlag),
                                                              host ? RangeKind::host : RangeKind::mapped_to_gpu);
    Node::instance().memory.set_rights(address, host ? 3 : 0);  // a device sees it once it is mapped to the GPU
    std::lock_guard lock(g_mutex);
    g_allocations[address] = nbytes;
    *memory = reinterpret_cast<void*>(address);
    return kOk;
  });
}
int hsaKmtFreeMemory(void* memory, uint64_t) {
  return guarded("hsaKmtFreeMemory", [&] {
    const auto address = reinterpret_cast<uint64_t>(memory);
    {
      std::lock_guard lock(g_mutex);
      if (g_allocations.erase(address) == 0) return kBadParameter;
    }
    Node::instance().memory.release(address);
    return kOk;
  });
}
int hsaKmtMapMemoryToGPU(void* memory, uint64_t, uint64_t* other_address) {
  return guarded("hsaKmtMapMemoryToGPU", [&] {
    Node::instance().memory.set_rights(reinterpret_cast<uint64_t>(memory), 3);
    if (other_address != nullptr) *other_address = reinterpret_cast<uint64_t>(memory);
    return kOk;
  });
}
int hsaKmtUnmapMemoryToGPU(void* memory) {
  return guarded("hsaKmtUnmapMemoryToGPU", [&] {
    Node::instance().memory.set_rights(reinterpret_cast<uint64_t>(memory), 0);
    return kOk;
  });
}

int hsaKmtCreateQueueExt(uint32_t node, int type, uint32_t percent, int priority, uint32_t engine, void* ring, uint64_t nbytes,
                         void*, QueueResource* resource) {
  return guarded("hsaKmtCreateQueueExt", [&] {
    if (resource == nullptr || percent == 0 || percent > 100 || priority < -3 || priority > 3) return kBadParameter;
    if (!is_device(node)) return kBadNode;
    if (type != kQueueSdma && type != kQueueSdmaXgmi && type != kQueueSdmaByEngine) {
      std::fprintf(stderr, "mori-sim: hsaKmtCreateQueueExt: queue type %d: only SDMA queues (2, 5, 6) are simulated\n", type);
      return kError;
    }
    const int asked = type == kQueueSdmaByEngine ? static_cast<int>(std::min(engine, 1000u)) : -1;
    CopyQueue* queue = Node::instance().copy_engines().create(device_of(node), asked, type == kQueueSdmaXgmi, reinterpret_cast<uint64_t>(ring), nbytes);
    resource->id = reinterpret_cast<uint64_t>(queue);
    resource->doorbell = queue->ring.doorbell;
    resource->write_pointer = queue->ring.wptr;
    resource->read_pointer = queue->ring.rptr;
    if (resource->error != nullptr) queue->error = resource->error;
    return kOk;
  });
}
int hsaKmtCreateQueue(uint32_t node, int type, uint32_t percent, int priority, void* ring, uint64_t nbytes, void* event, QueueResource* resource) {
  if (type == kQueueSdmaByEngine) return kError;  // this call has no way to name the engine
  return hsaKmtCreateQueueExt(node, type, percent, priority, 0, ring, nbytes, event, resource);
}
int hsaKmtDestroyQueue(uint64_t id) {
  return guarded("hsaKmtDestroyQueue", [&] {
    Node::instance().copy_engines().destroy(reinterpret_cast<CopyQueue*>(id));
    return kOk;
  });
}

}  // extern "C"
