// Memory that is allocated or registered in one call, and what is known of a pointer.
#include "stub/hip/door.hpp"

using namespace mori_sim;

extern "C" {

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

}  // extern "C"
