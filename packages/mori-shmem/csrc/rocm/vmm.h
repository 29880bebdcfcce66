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
void* import_fd(int fd);  // a handle, the caller's; so stays the descriptor

}  // namespace mori::rocm
