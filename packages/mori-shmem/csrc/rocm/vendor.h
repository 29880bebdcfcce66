// The vendor's libraries, opened when the first rank asks for this target: one table of prototypes for each.
//
// A library that the process has already (torch brings its own) is used as it is; else it is looked for by its names, and
// then in $ROCM_PATH/lib. A missing library or function is an answer: Error "missing_library" with what was tried.
// Types are the vendor's ABI, written down here: handles are pointers, enumerations int.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "host/errors.h"

namespace mori::rocm {

struct AllocationProperties {  // hipMemAllocationProp
  int type, handle_types, location_type, location_id;
  void* win32;
  uint8_t compression, rdma;
  uint16_t usage;
};
struct AccessDescription {  // hipMemAccessDesc
  int location_type, location_id, flags;
};
struct PointerAttributes {  // hipPointerAttribute_t, and room for what a later one may add
  int type, device;
  void *device_pointer, *host_pointer;
  int managed;
  unsigned flags;
  uint64_t later_fields[8];
};
constexpr int kPinned = 1, kUncached = 0x40000000, kFileDescriptor = 1, kOnDevice = 1, kReadWrite = 3;
constexpr unsigned kDeviceUncached = 3, kSignalMemory = 2;  // hipExtMallocWithFlags
constexpr int kHipSuccess = 0, kHipNotReady = 600, kHipPeerAlreadyEnabled = 704;

// name, result, arguments
#define MORI_HIP_FUNCTIONS(X)                                                                     \
  X(hipGetDeviceCount, int, (int*))                                                               \
  X(hipGetDevice, int, (int*))                                                                    \
  X(hipSetDevice, int, (int))                                                                     \
  X(hipDeviceGetPCIBusId, int, (char*, int, int))                                                 \
  X(hipDeviceCanAccessPeer, int, (int*, int, int))                                                \
  X(hipDeviceEnablePeerAccess, int, (int, unsigned))                                              \
  X(hipRuntimeGetVersion, int, (int*))                                                            \
  X(hipGetErrorString, const char*, (int))                                                        \
  X(hipGetLastError, int, ())                                                                     \
  X(hipHostMalloc, int, (void**, size_t, unsigned))                                               \
  X(hipHostFree, int, (void*))                                                                    \
  X(hipExtMallocWithFlags, int, (void**, size_t, unsigned))                                       \
  X(hipFree, int, (void*))                                                                        \
  X(hipMemcpy, int, (void*, const void*, size_t, int))                                            \
  X(hipMemsetAsync, int, (void*, int, size_t, void*))                                             \
  X(hipStreamCreateWithFlags, int, (void**, unsigned))                                            \
  X(hipStreamDestroy, int, (void*))                                                               \
  X(hipStreamSynchronize, int, (void*))                                                           \
  X(hipStreamQuery, int, (void*))                                                                 \
  X(hipStreamIsCapturing, int, (void*, int*))                                                     \
  X(hipStreamWriteValue64, int, (void*, void*, uint64_t, unsigned))                               \
  X(hipStreamWaitValue64, int, (void*, void*, uint64_t, unsigned, uint64_t))                      \
  X(hipMemGetAllocationGranularity, int, (size_t*, const AllocationProperties*, int))             \
  X(hipMemAddressReserve, int, (void**, size_t, size_t, void*, unsigned long long))               \
  X(hipMemAddressFree, int, (void*, size_t))                                                      \
  X(hipMemCreate, int, (void**, size_t, const AllocationProperties*, unsigned long long))         \
  X(hipMemRelease, int, (void*))                                                                  \
  X(hipMemMap, int, (void*, size_t, size_t, void*, unsigned long long))                           \
  X(hipMemUnmap, int, (void*, size_t))                                                            \
  X(hipMemSetAccess, int, (void*, size_t, const AccessDescription*, size_t))                      \
  X(hipMemExportToShareableHandle, int, (void*, void*, int, unsigned long long))                  \
  X(hipMemImportFromShareableHandle, int, (void**, void*, int))                                   \
  X(hipMemRetainAllocationHandle, int, (void**, void*))                                           \
  X(hipMemGetAddressRange, int, (void**, size_t*, void*))                                         \
  X(hipPointerGetAttributes, int, (PointerAttributes*, const void*))

// libhsakmt, its 2025 structures (packed to 4 bytes)
#pragma pack(push, 4)
struct KmtSystem {
  uint32_t num_nodes, oem, id, revision;
};
struct KmtNode {
  uint32_t num_cpu_cores, num_simds, num_neural_cores, num_memory_banks, num_caches, num_io_links, cpu_id, simd_id;
  uint32_t capability, capability2;
  uint32_t max_waves_per_simd, lds_kb, gds_kb, wavefront_size, num_shader_banks, num_arrays, num_cu_per_array,
      num_simd_per_cu, max_scratch_slots, engine_id, override_engine_id;
  uint16_t vendor_id, device_id;
  uint32_t location_id;
  uint64_t local_memory_bytes;
  uint32_t max_clock_gpu, max_clock_cpu;
  int32_t drm_render_minor;
  uint16_t marketing_name[64];
  uint8_t amd_name[64];
  uint32_t engine_versions;
  uint64_t debug_properties, hive_id;
  uint32_t num_sdma_engines, num_sdma_xgmi_engines;
  uint8_t num_queues_per_engine, num_cp_queues, num_gws, integrated;
  uint32_t domain;
  uint64_t unique_id;
  uint8_t later_fields[256];
};
struct KmtLink {
  uint32_t type, version_major, version_minor, node_from, node_to, weight, min_latency, max_latency, min_bandwidth,
      max_bandwidth, transfer_bytes, recommended_engines, flags;
};
struct KmtQueue {
  uint64_t id;
  uint64_t *doorbell, *write_pointer, *read_pointer;
  int64_t* error;
};
#pragma pack(pop)
constexpr int kKmtByEngine = 6, kKmtSuccess = 0, kKmtAlreadyOpened = 22;
// non-paged, host access, no NUMA binding, executable, uncached
constexpr uint32_t kKmtRingFlags = 1u | 1u << 6 | 1u << 16 | 1u << 12 | 1u << 17;

#define MORI_KMT_FUNCTIONS(X)                                                                                     \
  X(hsaKmtOpenKFD, int, ())                                                                                       \
  X(hsaKmtAcquireSystemProperties, int, (KmtSystem*))                                                             \
  X(hsaKmtGetNodeProperties, int, (uint32_t, KmtNode*))                                                           \
  X(hsaKmtGetNodeIoLinkProperties, int, (uint32_t, uint32_t, KmtLink*))                                           \
  X(hsaKmtAllocMemory, int, (uint32_t, uint64_t, uint32_t, void**))                                               \
  X(hsaKmtFreeMemory, int, (void*, uint64_t))                                                                     \
  X(hsaKmtMapMemoryToGPU, int, (void*, uint64_t, uint64_t*))                                                      \
  X(hsaKmtUnmapMemoryToGPU, int, (void*))                                                                         \
  X(hsaKmtCreateQueueExt, int, (uint32_t, int, uint32_t, int, uint32_t, void*, uint64_t, void*, KmtQueue*))       \
  X(hsaKmtDestroyQueue, int, (uint64_t))

// libhsa-runtime64: SDMA queues are part of its interface from 1.31 on
struct HsaQueue {  // hsa_queue_t
  uint32_t type, features;
  void* base;
  uint64_t doorbell_signal;
  uint32_t nbytes, reserved;
  uint64_t id;
};
struct HsaSignal {  // amd_signal_t, its beginning
  int64_t kind;
  uint64_t* doorbell;
};
struct HsaQueueDescription {  // hsa_amd_queue_create_desc_t, version 1
  uint16_t version, flags;
  uint8_t engine_type, reserved0[3];
  uint32_t nbytes;
  int priority;
  void (*callback)(int, HsaQueue*, void*);
  void* callback_data;
  HsaQueue* queue;
  uint32_t engine_id, reserved1[7];
  uint32_t traffic_class;
  uint8_t reserved2[20];
};
static_assert(sizeof(HsaQueueDescription) == 96 && sizeof(HsaQueue) == 40);
constexpr int64_t kHsaDoorbellKind = -1;
constexpr uint8_t kHsaSdma = 1;
constexpr uint16_t kHsaRingInDeviceMemory = 1;
constexpr int kHsaDeviceType = 17, kHsaGpu = 1, kHsaBdf = 0xA006, kHsaDomain = 0xA00F;
constexpr int kHsaReadPointer = 15, kHsaWritePointer = 16;

#define MORI_HSA_FUNCTIONS(X)                                                                              \
  X(hsa_init, int, ())                                                                                     \
  X(hsa_iterate_agents, int, (int (*)(uint64_t, void*), void*))                                            \
  X(hsa_agent_get_info, int, (uint64_t, int, void*))                                                       \
  X(hsa_status_string, int, (int, const char**))                                                           \
  X(hsa_amd_memory_get_preferred_copy_engine, int, (uint64_t, uint64_t, uint32_t*))                        \
  X(hsa_amd_queue_create, int, (uint64_t, HsaQueueDescription*, uint32_t))                                 \
  X(hsa_amd_queue_get_info, int, (HsaQueue*, int, void*))                                                  \
  X(hsa_queue_destroy, int, (HsaQueue*))

#define MORI_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
struct Hip {
  MORI_HIP_FUNCTIONS(MORI_MEMBER)
};
struct Kmt {
  MORI_KMT_FUNCTIONS(MORI_MEMBER)
};
struct Hsa {
  MORI_HSA_FUNCTIONS(MORI_MEMBER)
};
#undef MORI_MEMBER

const Hip& hip();
const Kmt& kmt();
const Hsa& hsa();

// Throws Error "driver" with the call's name, its code and the driver's own words.
void check_hip(int code, const char* call);
Error driver_error(const char* call, int code, const std::string& words);

}  // namespace mori::rocm
