#include "rocm/sdma.h"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace mori::rocm {

namespace {

constexpr int kHighestPriority = 3;
constexpr int kNormalHsaPriority = 1;

struct BusId {
  unsigned domain = 0, bus = 0, device = 0, function = 0;
};

BusId parse(const std::string& text) {
  BusId id;
  if (std::sscanf(text.c_str(), "%x:%x:%x.%x", &id.domain, &id.bus, &id.device, &id.function) != 4)
    throw bad_value("PCI bus id", text, "domain:bus:device.function");
  return id;
}

// Bus, device and function in 16 bits, as both libraries have them.
uint32_t location(const BusId& id) { return id.bus << 8 | id.device << 3 | id.function; }

Error no_such_device(const char* library, const std::string& bus_id) {
  return Error("driver", {{"call", std::string(library)}, {"code", int64_t{0}},
                          {"error", "it knows no GPU at " + bus_id + " (HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES?)"}});
}

// ---- hsakmt --------------------------------------------------------------------------------------------------------

void check_kmt(int code, const char* call) {
  if (code != kKmtSuccess) throw driver_error(call, code, "status");
}

KmtNode kmt_node(uint32_t node) {
  KmtNode properties{};
  check_kmt(kmt().hsaKmtGetNodeProperties(node, &properties), "hsaKmtGetNodeProperties");
  return properties;
}

uint32_t find_kmt_node(const std::string& bus_id) {
  static const uint32_t num_nodes = [] {
    KmtSystem system{};
    check_kmt(kmt().hsaKmtAcquireSystemProperties(&system), "hsaKmtAcquireSystemProperties");
    return system.num_nodes;
  }();
  const BusId wanted = parse(bus_id);
  for (uint32_t node = 0; node < num_nodes; ++node) {
    const KmtNode found = kmt_node(node);
    if (found.num_simds && found.domain == wanted.domain && found.location_id == location(wanted)) return node;
  }
  throw no_such_device("libhsakmt", bus_id);
}

class KmtRing {  // memory that the driver's library allocates and maps for the GPU
 public:
  KmtRing(uint32_t node, uint64_t nbytes_) : nbytes(std::max<uint64_t>(nbytes_, 4096)) {
    check_kmt(kmt().hsaKmtAllocMemory(node, nbytes, kKmtRingFlags, &memory), "hsaKmtAllocMemory");
    uint64_t other_address = 0;
    const int code = kmt().hsaKmtMapMemoryToGPU(memory, nbytes, &other_address);
    if (code == kKmtSuccess) return;
    kmt().hsaKmtFreeMemory(memory, nbytes);
    check_kmt(code, "hsaKmtMapMemoryToGPU");
  }
  ~KmtRing() {
    kmt().hsaKmtUnmapMemoryToGPU(memory);
    kmt().hsaKmtFreeMemory(memory, nbytes);
  }
  KmtRing(const KmtRing&) = delete;
  KmtRing& operator=(const KmtRing&) = delete;

  const uint64_t nbytes;
  void* memory = nullptr;
};

class KmtHardwareQueue : public HardwareQueue {
 public:
  KmtHardwareQueue(const Device& device, uint32_t engine, uint64_t ring_bytes, bool in_device_memory)
      : node_(find_kmt_node(device.bus_id)), ring_(in_device_memory ? node_ : 0, ring_bytes) {
    KmtQueue made{};  // zeroed: the library reads `error`
    check_kmt(kmt().hsaKmtCreateQueueExt(node_, kKmtByEngine, 100, kHighestPriority, engine, ring_.memory, ring_bytes,
                                         nullptr, &made),
              "hsaKmtCreateQueueExt");
    id_ = made.id;
    ring = ring_.memory;
    nbytes = ring_bytes;
    read_pointer = made.read_pointer;
    write_pointer = made.write_pointer;
    doorbell = made.doorbell;
  }
  ~KmtHardwareQueue() override { kmt().hsaKmtDestroyQueue(id_); }

 private:
  const uint32_t node_;
  const KmtRing ring_;
  uint64_t id_ = 0;
};

uint32_t kmt_engines(const std::string& from_bus_id, const std::string& to_bus_id) {
  const uint32_t from = find_kmt_node(from_bus_id), to = find_kmt_node(to_bus_id);
  std::vector<KmtLink> links(kmt_node(from).num_io_links);
  check_kmt(kmt().hsaKmtGetNodeIoLinkProperties(from, static_cast<uint32_t>(links.size()), links.data()),
            "hsaKmtGetNodeIoLinkProperties");
  for (const KmtLink& link : links)
    if (link.node_to == to) return link.recommended_engines;
  return 0;
}

// ---- rocr ----------------------------------------------------------------------------------------------------------

void check_hsa(int code, const char* call) {
  if (code == 0) return;
  const char* words = nullptr;
  hsa().hsa_status_string(code, &words);
  throw driver_error(call, code, words ? words : "status");
}

uint64_t find_agent(const std::string& bus_id) {
  struct Search {
    BusId wanted;
    uint64_t agent = 0;
    bool found = false;
  } search{parse(bus_id)};
  const auto look = [](uint64_t agent, void* user) {
    Search& s = *static_cast<Search*>(user);
    uint32_t kind = 0, bdf = 0, domain = 0;
    if (hsa().hsa_agent_get_info(agent, kHsaDeviceType, &kind) != 0 || kind != kHsaGpu) return 0;
    hsa().hsa_agent_get_info(agent, kHsaBdf, &bdf);
    hsa().hsa_agent_get_info(agent, kHsaDomain, &domain);
    if (bdf == location(s.wanted) && domain == s.wanted.domain) s.agent = agent, s.found = true;
    return 0;
  };
  check_hsa(hsa().hsa_iterate_agents(look, &search), "hsa_iterate_agents");
  if (!search.found) throw no_such_device("libhsa-runtime64", bus_id);
  return search.agent;
}

class RocrHardwareQueue : public HardwareQueue {
 public:
  RocrHardwareQueue(const Device& device, uint32_t engine, uint64_t ring_bytes, bool in_device_memory) {
    HsaQueueDescription wanted{};
    wanted.version = 1;
    wanted.flags = in_device_memory ? kHsaRingInDeviceMemory : 0;
    wanted.engine_type = kHsaSdma;
    wanted.nbytes = static_cast<uint32_t>(ring_bytes);
    wanted.priority = kNormalHsaPriority;
    wanted.engine_id = engine;
    check_hsa(hsa().hsa_amd_queue_create(find_agent(device.bus_id), &wanted, 1), "hsa_amd_queue_create");
    queue_ = wanted.queue;
    try {
      find_words();
    } catch (...) {
      hsa().hsa_queue_destroy(queue_);
      throw;
    }
  }
  ~RocrHardwareQueue() override { hsa().hsa_queue_destroy(queue_); }

 private:
  void find_words() {
    uint64_t read = 0, write = 0;
    check_hsa(hsa().hsa_amd_queue_get_info(queue_, kHsaReadPointer, &read), "hsa_amd_queue_get_info");
    check_hsa(hsa().hsa_amd_queue_get_info(queue_, kHsaWritePointer, &write), "hsa_amd_queue_get_info");
    const auto* const signal = reinterpret_cast<const HsaSignal*>(queue_->doorbell_signal);
    if (!signal || signal->kind != kHsaDoorbellKind)
      throw driver_error("hsa_amd_queue_create", 0, "the queue has no doorbell that can be written to");
    ring = queue_->base;
    nbytes = queue_->nbytes;
    read_pointer = reinterpret_cast<uint64_t*>(read);
    write_pointer = reinterpret_cast<uint64_t*>(write);
    doorbell = signal->doorbell;
  }

  HsaQueue* queue_ = nullptr;
};

}  // namespace

std::unique_ptr<HardwareQueue> create_hardware_queue(Way way, const Device& device, uint32_t engine, uint64_t nbytes,
                                                     bool in_device_memory) {
  const OnDevice on(device.ordinal);
  if (way == Way::kHsakmt) return std::make_unique<KmtHardwareQueue>(device, engine, nbytes, in_device_memory);
  return std::make_unique<RocrHardwareQueue>(device, engine, nbytes, in_device_memory);
}

uint32_t recommended_engines(Way way, const Device& device, const std::string& peer_bus_id) {
  if (peer_bus_id == device.bus_id) return 0;
  if (way == Way::kHsakmt) return kmt_engines(device.bus_id, peer_bus_id);
  uint32_t mask = 0;
  check_hsa(hsa().hsa_amd_memory_get_preferred_copy_engine(find_agent(peer_bus_id), find_agent(device.bus_id), &mask),
            "hsa_amd_memory_get_preferred_copy_engine");
  return mask;
}

}  // namespace mori::rocm
