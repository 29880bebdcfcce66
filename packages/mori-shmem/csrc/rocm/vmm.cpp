#include "rocm/vmm.h"

#include <unistd.h>

namespace mori::rocm {

namespace {

constexpr int kRecommendedGranularity = 1;
constexpr int kHipWithPlainDescriptors = 70100000;  // from 7.1 on a descriptor is imported by value, not by its address
constexpr int kAccessTries = 5;  // the driver may still be busy with the mapping

}  // namespace

std::mutex& vmm_mutex() {
  static std::mutex mutex;
  return mutex;
}

AllocationProperties properties(int ordinal, bool uncached) {
  AllocationProperties wanted{};
  wanted.type = uncached ? kUncached : kPinned;
  wanted.handle_types = kFileDescriptor;
  wanted.location_type = kOnDevice;
  wanted.location_id = ordinal;
  return wanted;
}

uint64_t granularity_of(int ordinal, bool uncached) {
  const AllocationProperties wanted = properties(ordinal, uncached);
  size_t granularity = 0;
  check_hip(hip().hipMemGetAllocationGranularity(&granularity, &wanted, kRecommendedGranularity),
            "hipMemGetAllocationGranularity");
  return granularity;
}

void allow_access(void* address, uint64_t nbytes, int ordinal) {
  const AccessDescription access{kOnDevice, ordinal, kReadWrite};
  int code = kHipSuccess;
  for (int tries = 0; tries < kAccessTries; ++tries) {
    code = hip().hipMemSetAccess(address, nbytes, &access, 1);
    if (code == kHipSuccess) return;
    usleep(1000u << tries);
  }
  check_hip(code, "hipMemSetAccess");
}

void* import_fd(int fd) {
  int version = 0;
  check_hip(hip().hipRuntimeGetVersion(&version), "hipRuntimeGetVersion");
  void* const by_value = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  void* handle = nullptr;
  check_hip(hip().hipMemImportFromShareableHandle(&handle, version >= kHipWithPlainDescriptors ? by_value : &fd,
                                                  kFileDescriptor),
            "hipMemImportFromShareableHandle");
  return handle;
}

}  // namespace mori::rocm
