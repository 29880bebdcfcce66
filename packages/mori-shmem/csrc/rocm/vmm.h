// What every mapping of device memory takes.
#pragma once
#include <cstdint>
#include <mutex>

#include "rocm/vendor.h"

namespace mori::rocm {

std::mutex& vmm_mutex();  // the driver's calls for mappings are made one at a time
AllocationProperties properties(int ordinal, bool uncached);
uint64_t granularity_of(int ordinal, bool uncached);
void allow_access(void* address, uint64_t nbytes, int ordinal);  // read and write, for a device
int export_fd(void* handle);  // a descriptor, the caller's
void* import_fd(int fd);      // a handle, the caller's; so stays the descriptor
// Of a call that takes a descriptor: the driver has no code for "none is left", so that is found out here.
void check_hip_with_descriptor(int code, const char* call);

}  // namespace mori::rocm
