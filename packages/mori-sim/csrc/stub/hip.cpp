// libamdhip64.so.7: the HIP entry points that this project, FlyDSL and their tests call, in front of the node.
//
// Each function checks its pointers, turns handles into the node's objects and exceptions into error codes; what it
// means is in node/. Structures are declared here as bytes or small structs with the offsets of HIP 7.1.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <new>

#include "node/device.hpp"
#include "node/node.hpp"

using namespace mori_sim;

namespace {

// Runs one call's body; what it throws becomes the code that is returned and remembered.
template <class Body>
int guarded(const char* name, Body body) {
  int code = kSuccess;
  try {
    body();
  } catch (const ApiError& error) {
    code = error.code;
    if (code != kNotReady) std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
  } catch (const std::invalid_argument& error) {
    code = kInvalidValue;
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
  } catch (const std::bad_alloc&) {
    code = kOutOfMemory;
  } catch (const std::exception& error) {
    code = kOutOfMemory;
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
  }
  if (code != kSuccess) last_error() = code;
  return code;
}
#define HIP(name, ...) return guarded(name, [&] __VA_ARGS__)

void need(const void* pointer, const char* what) {
  if (pointer == nullptr) throw ApiError(kInvalidValue, std::string(what) + " is a null pointer");
}
Node& node() { return Node::instance(); }
uint64_t at(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

struct Allocation {  // hipMemGenericAllocationHandle_t
  BackingPtr backing;
};
struct GraphHandle {
  std::shared_ptr<Graph> graph;
};

struct AllocationProperties {
  int type, handle_types, location_type, location_device;
  void* metadata;
  uint8_t compression, rdma;
  uint16_t usage;
};
struct AccessDescription {
  int location_type, location_device, flags;
};
struct IpcHandle {  // 64 bytes
  uint64_t magic;
  int32_t pid, fd;
  uint64_t inode, offset, nbytes;
  uint8_t unused[24];
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(AccessDescription) == 12 && sizeof(IpcHandle) == 64);
constexpr uint64_t kIpcMagic = 0x6d6f72692d697063ull;
constexpr int kTypePinned = 1, kTypeUncached = 0x40000000, kHandleNone = 0, kHandleFd = 1, kLocationDevice = 1;
constexpr uint64_t kGranularity = 2 << 20;

const char* error_name(int code) {
  switch (code) {
    case kSuccess: return "hipSuccess";
    case kInvalidValue: return "hipErrorInvalidValue";
    case kOutOfMemory: return "hipErrorOutOfMemory";
    case kNotInitialized: return "hipErrorNotInitialized";
    case kInvalidConfiguration: return "hipErrorInvalidConfiguration";
    case kInvalidDevicePointer: return "hipErrorInvalidDevicePointer";
    case kInvalidDevice: return "hipErrorInvalidDevice";
    case kInvalidImage: return "hipErrorInvalidImage";
    case kInvalidContext: return "hipErrorInvalidContext";
    case kMapFailed: return "hipErrorMapFailed";
    case kFileNotFound: return "hipErrorFileNotFound";
    case kInvalidHandle: return "hipErrorInvalidHandle";
    case kIllegalState: return "hipErrorIllegalState";
    case kNotFound: return "hipErrorNotFound";
    case kNotReady: return "hipErrorNotReady";
    case kIllegalAddress: return "hipErrorIllegalAddress";
    case kLaunchTimeOut: return "hipErrorLaunchTimeOut";
    case kPeerAccessAlreadyEnabled: return "hipErrorPeerAccessAlreadyEnabled";
    case kPeerAccessNotEnabled: return "hipErrorPeerAccessNotEnabled";
    case kHostMemoryAlreadyRegistered: return "hipErrorHostMemoryAlreadyRegistered";
    case kHostMemoryNotRegistered: return "hipErrorHostMemoryNotRegistered";
    case kLaunchFailure: return "hipErrorLaunchFailure";
    case kNotSupported: return "hipErrorNotSupported";
    case kStreamCaptureUnsupported: return "hipErrorStreamCaptureUnsupported";
    case kStreamCaptureUnmatched: return "hipErrorStreamCaptureUnmatched";
    default: return "hipErrorUnknown";
  }
}

// A launch that cannot start is a fault: some callers print its error code and go on.
template <class Body>
int guarded_launch(const char* name, Body body) {
  return guarded(name, [&] {
    try {
      body();
    } catch (const ApiError& error) {
      if (node().sticky_code() == 0) node().fail(error.code, std::string(name) + ": " + error.what());
      throw;
    }
  });
}

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

// ---------------------------------------------------------------------------------------------- devices
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

// ---------------------------------------------------------------------------------------------- errors
const char* hipGetErrorName(int code) { return error_name(code); }
const char* hipGetErrorString(int code) { return error_name(code); }
int hipDrvGetErrorName(int code, const char** text) { *text = error_name(code); return kSuccess; }
int hipDrvGetErrorString(int code, const char** text) { *text = error_name(code); return kSuccess; }
int hipPeekAtLastError() { return node().sticky_code() != 0 ? node().sticky_code() : last_error(); }
int hipGetLastError() {
  const int code = hipPeekAtLastError();
  last_error() = kSuccess;
  return code;
}

// ---------------------------------------------------------------------------------------------- memory
int hipExtMallocWithFlags(void** out, size_t nbytes, unsigned flags) {
  HIP("hipExtMallocWithFlags", {
    need(out, "pointer");
    *out = nullptr;
    node().check_alive();
    if (flags > 3) throw ApiError(kInvalidValue, "allocation flags " + std::to_string(flags) + ": 0, fine grained 1, signal 2 or uncached 3");
    const int device = node().current_device();
    if (nbytes > mi355x::kMemoryBytes - node().memory.used_nbytes(device))
      throw ApiError(kOutOfMemory, std::to_string(nbytes) + " bytes asked, " + std::to_string(mi355x::kMemoryBytes - node().memory.used_nbytes(device)) + " left");
    if (nbytes > 0) *out = pointer(node().memory.allocate(nbytes, device, flags == 3));
  });
}
int hipMalloc(void** out, size_t nbytes) { return hipExtMallocWithFlags(out, nbytes, 0); }
int hipMallocAsync(void** out, size_t nbytes, void*) { return hipMalloc(out, nbytes); }
int hipFree(void* memory) {
  HIP("hipFree", {
    if (memory == nullptr) return;
    // As on hardware: freeing waits for the device, so that no kernel in flight loses its memory.
    if (node().sticky_code() == 0) node().synchronize_device(node().current_device());
    node().memory.release(at(memory));
  });
}
int hipFreeAsync(void* memory, void* stream) {
  HIP("hipFreeAsync", {
    if (memory == nullptr) return;
    node().synchronize(node().known(stream));
    node().memory.release(at(memory));
  });
}
int hipHostMalloc(void** out, size_t nbytes, unsigned) {
  HIP("hipHostMalloc", {
    need(out, "pointer");
    *out = nbytes > 0 ? pointer(node().memory.allocate(nbytes, kHostMemory, true, RangeKind::host)) : nullptr;
  });
}
int hipHostAlloc(void** out, size_t nbytes, unsigned flags) { return hipHostMalloc(out, nbytes, flags); }
int hipHostFree(void* memory) {
  HIP("hipHostFree", {
    if (memory == nullptr) return;
    if (node().sticky_code() == 0) node().synchronize_device(node().current_device());
    node().memory.release(at(memory));
  });
}
int hipHostRegister(void* memory, size_t nbytes, unsigned flags) {
  HIP("hipHostRegister", {
    try {
      node().memory.register_host(at(memory), nbytes, flags);
    } catch (const std::invalid_argument& error) {
      throw ApiError(nbytes == 0 ? kInvalidValue : kHostMemoryAlreadyRegistered, error.what());
    }
  });
}
int hipHostUnregister(void* memory) {
  HIP("hipHostUnregister", {
    try {
      node().memory.unregister_host(at(memory));
    } catch (const std::invalid_argument& error) {
      throw ApiError(kHostMemoryNotRegistered, error.what());
    }
  });
}
int hipHostGetDevicePointer(void** out, void* host, unsigned) {
  HIP("hipHostGetDevicePointer", {
    need(out, "pointer");
    Range range;
    if (!node().memory.find(at(host), &range) && !node().memory.lent(at(host))) throw ApiError(kInvalidValue, node().memory.describe(at(host)));
    *out = host;
  });
}
int hipMemGetAddressRange(void** base, size_t* nbytes, void* memory) {
  HIP("hipMemGetAddressRange", {
    Range range;
    if (!node().memory.find(at(memory), &range)) throw ApiError(kNotFound, node().memory.describe(at(memory)));
    if (base != nullptr) *base = pointer(range.begin);
    if (nbytes != nullptr) *nbytes = range.end - range.begin;
  });
}
int hipPointerGetAttributes(void* attributes, const void* memory) {
  HIP("hipPointerGetAttributes", {
    need(attributes, "attributes");
    struct Attributes { int type, device; void *device_pointer, *host_pointer; int managed; unsigned flags; };
    auto& out = *static_cast<Attributes*>(attributes);
    Range range;
    std::memset(&out, 0, sizeof out);
    if (!node().memory.find(at(memory), &range)) throw ApiError(kInvalidValue, node().memory.describe(at(memory)));
    const bool host = range.home == kHostMemory;
    out.type = host ? 1 : 2;
    out.device = host ? node().current_ordinal() : node().ordinal(range.home);
    out.device_pointer = const_cast<void*>(memory);
    out.host_pointer = host ? const_cast<void*>(memory) : nullptr;
    out.flags = static_cast<unsigned>(range.host_flags);
  });
}

// ---------------------------------------------------------------------------------------------- copies and fills
int hipMemcpyAsync(void* to, const void* from, size_t nbytes, int, void* stream) {
  HIP("hipMemcpyAsync", { node().copy(node().known(stream), at(to), at(from), nbytes); });
}
int hipMemcpy(void* to, const void* from, size_t nbytes, int) {
  HIP("hipMemcpy", {
    Stream* stream = node().known(nullptr);
    node().copy(stream, at(to), at(from), nbytes);
    node().synchronize(stream);
  });
}
int hipMemcpyWithStream(void* to, const void* from, size_t nbytes, int, void* stream) {
  HIP("hipMemcpyWithStream", {
    node().copy(node().known(stream), at(to), at(from), nbytes);
    node().synchronize(node().known(stream));
  });
}
int hipMemcpyHtoD(void* to, void* from, size_t nbytes) { return hipMemcpy(to, from, nbytes, 1); }
int hipMemcpyDtoH(void* to, void* from, size_t nbytes) { return hipMemcpy(to, from, nbytes, 2); }
int hipMemcpyDtoD(void* to, void* from, size_t nbytes) { return hipMemcpy(to, from, nbytes, 3); }
int hipMemcpyHtoDAsync(void* to, void* from, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 1, stream); }
int hipMemcpyDtoHAsync(void* to, void* from, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 2, stream); }
int hipMemcpyDtoDAsync(void* to, void* from, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 3, stream); }
int hipMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 3, stream); }
int hipMemcpyPeer(void* to, int, const void* from, int, size_t nbytes) { return hipMemcpy(to, from, nbytes, 3); }
int hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int, void* stream) {
  HIP("hipMemcpy2DAsync", {
    for (size_t row = 0; row < height; ++row) node().copy(node().known(stream), at(to) + row * to_pitch, at(from) + row * from_pitch, width);
  });
}
int hipMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind) {
  const int code = hipMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  if (code != kSuccess) return code;
  HIP("hipMemcpy2D", { node().synchronize(node().known(nullptr)); });
}
int hipMemsetAsync(void* to, int value, size_t nbytes, void* stream) {
  HIP("hipMemsetAsync", { node().fill(node().known(stream), at(to), static_cast<uint8_t>(value), 1, nbytes); });
}
int hipMemset(void* to, int value, size_t nbytes) {
  HIP("hipMemset", {
    node().fill(node().known(nullptr), at(to), static_cast<uint8_t>(value), 1, nbytes);
    node().synchronize(node().known(nullptr));
  });
}
int hipMemsetD8Async(void* to, unsigned char value, size_t count, void* stream) { return hipMemsetAsync(to, value, count, stream); }
int hipMemsetD16Async(void* to, unsigned short value, size_t count, void* stream) {
  HIP("hipMemsetD16Async", { node().fill(node().known(stream), at(to), value, 2, count); });
}
int hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  HIP("hipMemsetD32Async", { node().fill(node().known(stream), at(to), static_cast<uint32_t>(value), 4, count); });
}
int hipMemsetD32(void* to, int value, size_t count) {
  const int code = hipMemsetD32Async(to, value, count, nullptr);
  if (code != kSuccess) return code;
  HIP("hipMemsetD32", { node().synchronize(node().known(nullptr)); });
}

// ---------------------------------------------------------------------------------------------- virtual memory
int hipMemGetAllocationGranularity(size_t* nbytes, const void* properties, int) {
  HIP("hipMemGetAllocationGranularity", { need(nbytes, "granularity"); need(properties, "properties"); *nbytes = kGranularity; });
}
int hipMemAddressReserve(void** out, size_t nbytes, size_t alignment, void* wish, unsigned long long) {
  HIP("hipMemAddressReserve", {
    need(out, "pointer");
    if (nbytes % kGranularity) throw ApiError(kInvalidValue, std::to_string(nbytes) + " bytes: a multiple of the granularity of 2 MiB is needed");
    *out = pointer(node().memory.reserve(nbytes, std::max<uint64_t>(alignment, kGranularity), at(wish)));
  });
}
int hipMemAddressFree(void* memory, size_t nbytes) { HIP("hipMemAddressFree", { node().memory.unreserve(at(memory), nbytes); }); }
int hipMemCreate(void** handle, size_t nbytes, const void* properties, unsigned long long flags) {
  HIP("hipMemCreate", {
    need(handle, "handle");
    need(properties, "properties");
    AllocationProperties p;
    std::memcpy(&p, properties, sizeof p);
    if ((p.type != kTypePinned && p.type != kTypeUncached) || flags != 0 || p.location_type != kLocationDevice)
      throw ApiError(kInvalidValue, "allocation type " + std::to_string(p.type) + ", location type " + std::to_string(p.location_type) + ": pinned 1 or uncached 0x40000000, on a device 1");
    if (p.handle_types != kHandleNone && p.handle_types != kHandleFd)
      throw ApiError(kNotSupported, "handle types " + std::to_string(p.handle_types) + ": this node exports file descriptors (1)");
    if (nbytes == 0 || nbytes % kGranularity) throw ApiError(kInvalidValue, std::to_string(nbytes) + " bytes: a multiple of the granularity of 2 MiB is needed");
    *handle = new Allocation{node().memory.create(nbytes, node().physical(p.location_device), p.type == kTypeUncached)};
  });
}
int hipMemRelease(void* handle) { HIP("hipMemRelease", { need(handle, "handle"); delete static_cast<Allocation*>(handle); }); }
int hipMemMap(void* memory, size_t nbytes, size_t offset, void* handle, unsigned long long) {
  HIP("hipMemMap", { need(handle, "handle"); node().memory.map(at(memory), nbytes, offset, static_cast<Allocation*>(handle)->backing); });
}
int hipMemUnmap(void* memory, size_t nbytes) {
  HIP("hipMemUnmap", {
    if (node().sticky_code() == 0) node().synchronize_device(node().current_device());
    node().memory.unmap(at(memory), nbytes);
  });
}
int hipMemSetAccess(void* memory, size_t nbytes, const void* descriptions, size_t count) {
  HIP("hipMemSetAccess", {
    need(descriptions, "descriptions");
    for (size_t i = 0; i < count; ++i) {
      AccessDescription d;
      std::memcpy(&d, static_cast<const uint8_t*>(descriptions) + i * sizeof d, sizeof d);
      if (d.location_type != kLocationDevice || (d.flags != 0 && d.flags != 1 && d.flags != 3))
        throw ApiError(kInvalidValue, "access flags " + std::to_string(d.flags) + ": none 0, read 1, read and write 3");
      node().memory.permit(at(memory), nbytes, node().physical(d.location_device), static_cast<uint8_t>(d.flags));
    }
  });
}
int hipMemGetAccess(unsigned long long* flags, const void* location, void* memory) {
  HIP("hipMemGetAccess", {
    int place[2];
    std::memcpy(place, location, sizeof place);
    Range range;
    if (!node().memory.find(at(memory), &range)) throw ApiError(kInvalidValue, node().memory.describe(at(memory)));
    *flags = range.rights[static_cast<size_t>(node().physical(place[1]))];
  });
}
int hipMemExportToShareableHandle(void* out, void* handle, int type, unsigned long long) {
  HIP("hipMemExportToShareableHandle", {
    need(out, "descriptor");
    need(handle, "handle");
    if (type != kHandleFd) throw ApiError(kNotSupported, "handle type " + std::to_string(type) + ": this node exports file descriptors (1)");
    const int fd = fcntl(static_cast<Allocation*>(handle)->backing->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) throw ApiError(kOutOfMemory, "no file descriptor left");
    static_cast<Allocation*>(handle)->backing->exported = true;
    std::memcpy(out, &fd, sizeof fd);
  });
}
int hipMemImportFromShareableHandle(void** handle, void* descriptor, int type) {
  HIP("hipMemImportFromShareableHandle", {
    need(handle, "handle");
    if (type != kHandleFd) throw ApiError(kNotSupported, "handle type " + std::to_string(type) + ": this node imports file descriptors (1)");
    // From HIP 7.1 on the descriptor itself is passed, not a pointer to it.
    *handle = new Allocation{AddressSpace::import_fd(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)))};
  });
}
int hipMemRetainAllocationHandle(void** handle, void* memory) {
  HIP("hipMemRetainAllocationHandle", {
    need(handle, "handle");
    const BackingPtr backing = node().memory.backing_of(at(memory), nullptr);
    if (backing == nullptr) throw ApiError(kInvalidValue, node().memory.describe(at(memory)));
    *handle = new Allocation{backing};
  });
}
int hipMemGetHandleForAddressRange(void* out, void* memory, size_t, int type, unsigned long long) {
  HIP("hipMemGetHandleForAddressRange", {
    need(out, "descriptor");
    const BackingPtr backing = node().memory.backing_of(at(memory), nullptr);
    if (type != 1 || backing == nullptr) throw ApiError(kInvalidValue, node().memory.describe(at(memory)));
    const int fd = fcntl(backing->fd, F_DUPFD_CLOEXEC, 3);
    backing->exported = true;
    std::memcpy(out, &fd, sizeof fd);
  });
}

// ---------------------------------------------------------------------------------------------- between processes
int hipIpcGetMemHandle(void* out, void* memory) {
  HIP("hipIpcGetMemHandle", {
    need(out, "handle");
    Range range;
    if (!node().memory.find(at(memory), &range) || range.kind != RangeKind::allocation)
      throw ApiError(kInvalidValue, node().memory.describe(at(memory)) + ": only hipMalloc'ed memory has an IPC handle");
    struct stat status;
    fstat(range.backing->fd, &status);
    const IpcHandle handle{kIpcMagic, getpid(), range.backing->fd, status.st_ino, at(memory) - range.begin, range.end - range.begin, {}};
    range.backing->exported = true;
    std::memcpy(out, &handle, sizeof handle);
  });
}
int hipIpcOpenMemHandle(void** out, IpcHandle handle, unsigned) {
  HIP("hipIpcOpenMemHandle", {
    need(out, "pointer");
    if (handle.magic != kIpcMagic) throw ApiError(kInvalidValue, "not an IPC handle of this node");
    if (handle.pid == getpid()) throw ApiError(kInvalidContext, "the process that exported the memory cannot open it again");
    const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status{};
    if (fd < 0 || fstat(fd, &status) != 0 || status.st_ino != handle.inode) {
      if (fd >= 0) close(fd);
      throw ApiError(kInvalidValue, "the memory of process " + std::to_string(handle.pid) + " is gone, or that process may not be looked into");
    }
    BackingPtr backing = AddressSpace::import_fd(fd);
    close(fd);
    const uint64_t begin = node().memory.open_imported(backing);
    opened_ipc()[begin + handle.offset] = begin;
    *out = pointer(begin + handle.offset);
  });
}
int hipIpcCloseMemHandle(void* memory) {
  HIP("hipIpcCloseMemHandle", {
    const auto found = opened_ipc().find(at(memory));
    if (found == opened_ipc().end()) throw ApiError(kInvalidValue, "not opened from an IPC handle");
    if (node().sticky_code() == 0) node().synchronize_device(node().current_device());
    node().memory.release(found->second);
    opened_ipc().erase(found);
  });
}

// ---------------------------------------------------------------------------------------------- streams and events
int hipStreamCreateWithFlags(void** out, unsigned flags) {
  HIP("hipStreamCreateWithFlags", { need(out, "stream"); *out = node().create_stream(node().current_device(), (flags & 1) == 0); });
}
int hipStreamCreate(void** out) { return hipStreamCreateWithFlags(out, 0); }
int hipStreamCreateWithPriority(void** out, unsigned flags, int) { return hipStreamCreateWithFlags(out, flags); }
int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  HIP("hipDeviceGetStreamPriorityRange", {
    if (least != nullptr) *least = 1;
    if (greatest != nullptr) *greatest = -1;
  });
}
int hipStreamDestroy(void* stream) {
  HIP("hipStreamDestroy", {
    if (reinterpret_cast<uintptr_t>(stream) <= 2) throw ApiError(kInvalidHandle, "the null stream cannot be destroyed");
    node().destroy_stream(node().known(stream));
  });
}
int hipStreamSynchronize(void* stream) { HIP("hipStreamSynchronize", { node().synchronize(node().known(stream)); }); }
int hipStreamQuery(void* stream) {
  HIP("hipStreamQuery", { if (!node().finished(node().known(stream))) throw ApiError(kNotReady, "not finished"); });
}
int hipStreamWaitEvent(void* stream, void* event, unsigned) {
  HIP("hipStreamWaitEvent", { need(event, "event"); node().wait_event(node().known(stream), static_cast<Event*>(event)); });
}
int hipStreamGetDevice(void* stream, int* device) {
  HIP("hipStreamGetDevice", { need(device, "device"); *device = node().ordinal(node().known(stream)->device); });
}
int hipStreamWriteValue32(void* stream, void* where, uint32_t value, unsigned) {
  HIP("hipStreamWriteValue32", { node().write_value(node().known(stream), at(where), value, 4); });
}
int hipStreamWriteValue64(void* stream, void* where, uint64_t value, unsigned) {
  HIP("hipStreamWriteValue64", { node().write_value(node().known(stream), at(where), value, 8); });
}
int hipStreamWaitValue32(void* stream, void* where, uint32_t value, unsigned compare, uint32_t mask) {
  HIP("hipStreamWaitValue32", { node().wait_value(node().known(stream), at(where), value, 4, compare, mask); });
}
int hipStreamWaitValue64(void* stream, void* where, uint64_t value, unsigned compare, uint64_t mask) {
  HIP("hipStreamWaitValue64", { node().wait_value(node().known(stream), at(where), value, 8, compare, mask); });
}
int hipLaunchHostFunc(void* stream, void (*call)(void*), void* argument) {
  HIP("hipLaunchHostFunc", { node().host_call(node().known(stream), [=] { call(argument); }); });
}
int hipEventCreateWithFlags(void** out, unsigned) { HIP("hipEventCreateWithFlags", { need(out, "event"); *out = new Event(); }); }
int hipEventCreate(void** out) { return hipEventCreateWithFlags(out, 0); }
int hipEventDestroy(void* event) { HIP("hipEventDestroy", { need(event, "event"); delete static_cast<Event*>(event); }); }
int hipEventRecord(void* event, void* stream) {
  HIP("hipEventRecord", { need(event, "event"); node().record(static_cast<Event*>(event), node().known(stream)); });
}
int hipEventSynchronize(void* event) { HIP("hipEventSynchronize", { need(event, "event"); node().synchronize_mark(static_cast<Event*>(event)->recorded); }); }
int hipEventQuery(void* event) {
  HIP("hipEventQuery", {
    need(event, "event");
    const MarkPtr& mark = static_cast<Event*>(event)->recorded;
    if (mark != nullptr && !mark->reached) throw ApiError(kNotReady, "not finished");
    node().check_alive();
  });
}
int hipEventElapsedTime(float* ms, void* from, void* to) {
  HIP("hipEventElapsedTime", {
    need(ms, "time");
    const MarkPtr &first = static_cast<Event*>(from)->recorded, &second = static_cast<Event*>(to)->recorded;
    if (first == nullptr || second == nullptr) throw ApiError(kInvalidHandle, "an event was never recorded");
    if (!first->reached || !second->reached) throw ApiError(kNotReady, "not finished");
    *ms = std::chrono::duration<float, std::milli>(second->when - first->when).count();  // the simulator's time, not the device's
  });
}

// ---------------------------------------------------------------------------------------------- modules and launches
int hipModuleLoadData(void** out, const void* image) {
  HIP("hipModuleLoadData", { need(out, "module"); need(image, "image"); *out = node().load_module(image, 0); });
}
int hipModuleLoadDataEx(void** out, const void* image, unsigned, void*, void**) { return hipModuleLoadData(out, image); }
int hipModuleLoad(void** out, const char* path) {
  HIP("hipModuleLoad", {
    need(out, "module");
    need(path, "path");
    std::ifstream file(path, std::ios::binary);
    if (!file) throw ApiError(kFileNotFound, std::string("cannot read ") + path);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    *out = node().load_module(bytes.data(), bytes.size());
  });
}
int hipModuleUnload(void* module) { HIP("hipModuleUnload", { node().unload_module(static_cast<Module*>(module)); }); }
int hipModuleGetFunction(void** out, void* module, const char* name) {
  HIP("hipModuleGetFunction", { need(out, "function"); need(name, "name"); *out = node().find_kernel(static_cast<Module*>(module), name); });
}
int hipModuleGetGlobal(void** out, size_t* nbytes, void* module, const char* name) {
  HIP("hipModuleGetGlobal", {
    const auto* m = static_cast<Module*>(module);
    const auto found = m->object.objects.find(name);
    if (found == m->object.objects.end()) throw ApiError(kNotFound, std::string("no global ") + name);
    if (out != nullptr) *out = pointer(m->address + found->second.offset);
    if (nbytes != nullptr) *nbytes = found->second.nbytes;
  });
}
int hipFuncGetAttribute(int* value, int which, void* function) {
  HIP("hipFuncGetAttribute", {
    need(value, "value");
    const KernelInfo& info = static_cast<Kernel*>(function)->info;
    switch (which) {
      case 0: *value = static_cast<int>(info.max_workgroup_size); break;
      case 1: *value = static_cast<int>(info.lds_nbytes); break;
      case 3: *value = static_cast<int>(info.scratch_nbytes); break;
      case 4: *value = static_cast<int>(info.num_vgprs); break;
      case 8: *value = static_cast<int>(mi355x::kLdsBytes - info.lds_nbytes); break;
      default: *value = 0;
    }
  });
}
int hipFuncSetAttribute(const void*, int, int) { return kSuccess; }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int block, size_t dynamic_lds) {
  HIP("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", {
    need(count, "count");
    const KernelInfo& info = static_cast<Kernel*>(function)->info;
    *count = workgroups_per_cu(info, static_cast<uint32_t>(block), static_cast<uint32_t>(dynamic_lds));
  });
}
int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned dynamic_lds, void* stream, void** parameters, void** extra) {
  return guarded_launch("hipModuleLaunchKernel", [&] {
    need(function, "function");
    const LaunchShape shape{{gx, gy, gz}, {bx, by, bz}, dynamic_lds};
    const void* packed = nullptr;
    size_t nbytes = 0;
    for (void** e = extra; e != nullptr && *e != reinterpret_cast<void*>(3); e += 2) {
      if (*e == reinterpret_cast<void*>(1)) packed = e[1];
      else if (*e == reinterpret_cast<void*>(2)) nbytes = *static_cast<size_t*>(e[1]);
      else throw ApiError(kInvalidValue, "unknown entry in the extra list");
    }
    auto* kernel = static_cast<Kernel*>(function);
    const bool wants = std::any_of(kernel->info.arguments.begin(), kernel->info.arguments.end(), [](const auto& a) { return !a.hidden(); });
    if (packed == nullptr && wants) need(parameters, "kernelParams");
    node().launch(node().known(stream), kernel, shape, parameters, packed, nbytes);
  });
}
int hipDrvLaunchKernelEx(const void* configuration, void* function, void** parameters, void** extra) {
  struct Configuration { unsigned g[3], b[3], lds; void* stream; void* attributes; unsigned num_attributes; };
  const auto& c = *static_cast<const Configuration*>(configuration);
  if (c.num_attributes != 0) return guarded_launch("hipDrvLaunchKernelEx", [] { throw ApiError(kNotSupported, "launch attributes (clusters) do not exist on gfx950"); });
  return hipModuleLaunchKernel(function, c.g[0], c.g[1], c.g[2], c.b[0], c.b[1], c.b[2], c.lds, c.stream, parameters, extra);
}

// ---------------------------------------------------------------------------------------------- graphs
int hipStreamBeginCapture(void* stream, int) { HIP("hipStreamBeginCapture", { node().begin_capture(node().known(stream)); }); }
int hipStreamEndCapture(void* stream, void** graph) {
  HIP("hipStreamEndCapture", { need(graph, "graph"); *graph = new GraphHandle{node().end_capture(node().known(stream))}; });
}
int hipStreamIsCapturing(void* stream, int* status) {
  HIP("hipStreamIsCapturing", { need(status, "status"); *status = node().known(stream)->capturing != nullptr; });
}
int hipGraphInstantiate(void** executable, void* graph, void*, char*, size_t) {
  HIP("hipGraphInstantiate", { need(executable, "graph"); need(graph, "graph"); *executable = new GraphHandle(*static_cast<GraphHandle*>(graph)); });
}
int hipGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) { return hipGraphInstantiate(executable, graph, nullptr, nullptr, 0); }
int hipGraphLaunch(void* executable, void* stream) {
  HIP("hipGraphLaunch", { need(executable, "graph"); node().launch_graph(node().known(stream), static_cast<GraphHandle*>(executable)->graph); });
}
int hipGraphDestroy(void* graph) { HIP("hipGraphDestroy", { need(graph, "graph"); delete static_cast<GraphHandle*>(graph); }); }
int hipGraphExecDestroy(void* graph) { return hipGraphDestroy(graph); }
int hipGraphGetNodes(void* graph, void**, size_t* count) {
  HIP("hipGraphGetNodes", { need(graph, "graph"); need(count, "count"); *count = static_cast<GraphHandle*>(graph)->graph->nodes.size(); });
}

}  // extern "C"
