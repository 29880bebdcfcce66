// Devices: which there are, what they say about themselves, who may reach whom.
#include <algorithm>

#include "stub/hip/door.hpp"

using namespace mori_sim;

namespace {

int attribute(int which, int physical) {
  switch (which) {
    case 0: return 1;                                    // ECC
    case 2: return mi355x::kOrdinaryEngines;             // asynchronous engines
    case 3: case 4: return 1;                            // host memory can be mapped, at the same address
    case 5: return mi355x::kClockKhz;
    case 8: case 10: case 11: return 1;                  // concurrent kernels, cooperative launches
    case 15: return 0;                                   // native atomics to the host
    case 16: return 0;                                   // integrated
    case 19: return mi355x::kL2Bytes;
    case 23: return 9;                                   // compute capability 9.5
    case 61: return 5;
    case 25: return 2;                                   // workgroups of maximal size on a CU
    case 26: case 27: case 28: case 56: return mi355x::kMaxWorkgroup;
    case 29: return INT32_MAX;
    case 30: case 31: return 65536;
    case 57: return mi355x::kSimdsPerCu * mi355x::kWavesPerSimd * mi355x::kLanes;
    case 58: return INT32_MAX;
    case 59: return mi355x::kMemoryBusBits;
    case 60: return mi355x::kMemoryClockKhz;
    case 63: case 10015: return mi355x::kNumCus;
    case 65: return node().settings.lend_host_memory;    // pageable memory access
    case 67: return 0x10 + physical * 0x10;              // PCI bus, device, domain
    case 68: case 69: return 0;
    case 71: case 72: return mi355x::kRegistersPerSimdLane * mi355x::kSimdsPerCu * mi355x::kLanes;
    case 74: case 75: case 76: case 10002: return mi355x::kLdsBytes;
    case 78: return 1;                                   // stream priorities
    case 83: return INT32_MAX;
    case 84: return INT32_MAX;                           // total memory does not fit an int
    case 85: return 1;                                   // unified addressing
    case 87: return mi355x::kLanes;
    case 88: return 0;                                   // memory pools
    case 89: case 90: return 1;                          // VMM, host registration
    case 10000: case 10017: return mi355x::kTimerKhz;
    case 10011: return 1;                                // large BAR
    case 10013: case 10016: return 1;                    // stream wait value, fine grain
    case 10018: return mi355x::kNumXcds;
    case 10019: return mi355x::kRegistersPerSimdLane;
    case 10020: return mi355x::kChipId;
    default: throw ApiError(kInvalidValue, "device attribute " + std::to_string(which) + " is not known to this node");
  }
}

uint64_t parse_bdf_bus(int physical) { return 0x10 + static_cast<uint64_t>(physical) * 0x10; }

}  // namespace

extern "C" {

int hipInit(unsigned) { HIP("hipInit", { node().check_alive(); }); }
int hipRuntimeGetVersion(int* version) { HIP("hipRuntimeGetVersion", { need(version, "version"); *version = mi355x::kHipVersion; }); }
int hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }
int hipGetDeviceCount(int* count) { HIP("hipGetDeviceCount", { need(count, "count"); *count = node().num_visible(); }); }
int hipGetDevice(int* device) { HIP("hipGetDevice", { need(device, "device"); *device = node().current_ordinal(); }); }
int hipSetDevice(int device) { HIP("hipSetDevice", { node().set_current(device); }); }
int hipDeviceGet(int* device, int ordinal) { HIP("hipDeviceGet", { need(device, "device"); node().physical(ordinal); *device = ordinal; }); }
int hipDeviceGetName(char* name, int nbytes, int device) {
  HIP("hipDeviceGetName", { need(name, "name"); node().physical(device); std::snprintf(name, static_cast<size_t>(nbytes), "%s", mi355x::kName); });
}
int hipDeviceTotalMem(size_t* nbytes, int device) {
  HIP("hipDeviceTotalMem", { need(nbytes, "size"); node().physical(device); *nbytes = mi355x::kMemoryBytes; });
}
int hipDeviceGetAttribute(int* value, int which, int device) {
  HIP("hipDeviceGetAttribute", { need(value, "value"); *value = attribute(which, node().physical(device)); });
}
int hipDeviceGetPCIBusId(char* text, int nbytes, int device) {
  HIP("hipDeviceGetPCIBusId", {
    need(text, "bus id");
    std::snprintf(text, static_cast<size_t>(nbytes), "0000:%02x:00.0", static_cast<unsigned>(parse_bdf_bus(node().physical(device))));
  });
}
int hipDeviceGetByPCIBusId(int* device, const char* text) {
  HIP("hipDeviceGetByPCIBusId", {
    need(device, "device");
    need(text, "bus id");
    unsigned domain = 0, bus = 0;
    for (int i = 0; i < node().num_visible() && std::sscanf(text, "%x:%x", &domain, &bus) == 2; ++i)
      if (parse_bdf_bus(node().physical(i)) == bus) { *device = i; return; }
    throw ApiError(kInvalidValue, std::string("no device at ") + text);
  });
}
int hipDeviceCanAccessPeer(int* can, int device, int peer) {
  HIP("hipDeviceCanAccessPeer", { need(can, "result"); *can = node().physical(device) != node().physical(peer); });
}
int hipDeviceEnablePeerAccess(int peer, unsigned) {
  HIP("hipDeviceEnablePeerAccess", {
    const int own = node().current_device(), other = node().physical(peer);
    if (own == other) throw ApiError(kInvalidDevice, "a device is not its own peer");
    if (node().memory.peer_enabled(own, other)) throw ApiError(kPeerAccessAlreadyEnabled, "peer access is enabled already");
    node().memory.enable_peer(own, other);
  });
}
int hipDeviceSynchronize() { HIP("hipDeviceSynchronize", { node().synchronize_device(node().current_device()); }); }
int hipDeviceReset() { HIP("hipDeviceReset", { node().synchronize_device(node().current_device()); }); }
int hipMemGetInfo(size_t* free_bytes, size_t* total) {
  HIP("hipMemGetInfo", {
    const uint64_t used = node().memory.used_nbytes(node().current_device());
    if (free_bytes != nullptr) *free_bytes = mi355x::kMemoryBytes - std::min(used, mi355x::kMemoryBytes);
    if (total != nullptr) *total = mi355x::kMemoryBytes;
  });
}
int hipGetDevicePropertiesR0600(void* properties, int device) {
  HIP("hipGetDevicePropertiesR0600", {
    need(properties, "properties");
    const int physical = node().physical(device);
    auto* out = static_cast<uint8_t*>(properties);
    std::memset(out, 0, 1472);
    const auto put = [out](size_t offset, auto value) { std::memcpy(out + offset, &value, sizeof value); };
    std::strcpy(reinterpret_cast<char*>(out), mi355x::kName);
    put(256, static_cast<uint64_t>(physical) + 1);  // uuid
    put(288, size_t{mi355x::kMemoryBytes});
    put(296, size_t{mi355x::kLdsBytes});
    put(304, attribute(71, physical));
    put(308, mi355x::kLanes);
    put(312, size_t{INT32_MAX});
    put(320, mi355x::kMaxWorkgroup);
    for (int i = 0; i < 3; ++i) put(324 + 4 * static_cast<size_t>(i), mi355x::kMaxWorkgroup), put(336 + 4 * static_cast<size_t>(i), attribute(29 + i, physical));
    put(348, mi355x::kClockKhz);
    put(352, size_t{INT32_MAX});
    put(360, 9);
    put(364, 5);
    put(388, mi355x::kNumCus);
    put(400, 1);
    put(576, 1);
    put(580, 1);
    put(584, attribute(67, physical));
    put(600, mi355x::kOrdinaryEngines);
    put(604, 1);
    put(608, mi355x::kMemoryClockKhz);
    put(612, mi355x::kMemoryBusBits);
    put(616, mi355x::kL2Bytes);
    put(624, attribute(57, physical));
    put(628, 1);
    put(640, size_t{mi355x::kLdsBytes});
    put(648, attribute(72, physical));
    put(672, attribute(65, physical));
    put(684, 1);
    put(688, 1);
    put(696, size_t{mi355x::kLdsBytes});
    put(712, attribute(25, physical));
    put(728, 1);
    std::strcpy(reinterpret_cast<char*>(out + 1160), mi355x::kArch);
    put(1416, size_t{mi355x::kLdsBytes});
    put(1424, mi355x::kTimerKhz);
    put(1464, 1);
  });
}
int hipGetDeviceProperties(void* properties, int device) { return hipGetDevicePropertiesR0600(properties, device); }

}  // extern "C"
