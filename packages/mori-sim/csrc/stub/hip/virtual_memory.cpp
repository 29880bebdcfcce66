// Virtual memory: ranges are reserved, physical memory is created, mapped and permitted, and travels between processes
// as a file descriptor.
#include <fcntl.h>

#include <algorithm>

#include "stub/hip/door.hpp"

using namespace mori_sim;

namespace {

struct Allocation {  // hipMemGenericAllocationHandle_t
  BackingPtr backing;
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
static_assert(sizeof(AllocationProperties) == 32 && sizeof(AccessDescription) == 12);
constexpr int kTypePinned = 1, kTypeUncached = 0x40000000, kHandleNone = 0, kHandleFd = 1, kLocationDevice = 1;
constexpr uint64_t kGranularity = 2 << 20;

}  // namespace

extern "C" {

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
    const BackingPtr backing = node().memory.create(nbytes, node().physical(p.location_device), p.type == kTypeUncached);
    backing->exportable = p.handle_types == kHandleFd;
    *handle = new Allocation{backing};
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
    if (!static_cast<Allocation*>(handle)->backing->exportable) throw ApiError(kInvalidValue, "this memory was created without a handle type to export");
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
    Range range;
    if (!node().memory.find(at(memory), &range) || range.kind != RangeKind::mapping)
      throw ApiError(kInvalidValue, node().memory.describe(at(memory)) + ": only memory of hipMemMap has a handle");
    *handle = new Allocation{range.backing};
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

}  // extern "C"
