#include "rocm/vmm.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

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

void check_hip_with_descriptor(int code, const char* call) {
  if (code == kHipSuccess) return;
  const int probe = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int reason = probe < 0 ? errno : 0;
  if (probe >= 0) ::close(probe);
  if (reason == EMFILE || reason == ENFILE) {
    hip().hipGetLastError();
    throw system_error(call, reason);
  }
  check_hip(code, call);
}

int export_fd(void* handle) {
  int fd = -1;
  check_hip_with_descriptor(hip().hipMemExportToShareableHandle(&fd, handle, kFileDescriptor, 0),
                            "hipMemExportToShareableHandle");
  return fd;
}

void* import_fd(int fd) {
  int version = 0;
  check_hip(hip().hipRuntimeGetVersion(&version), "hipRuntimeGetVersion");
  void* const by_value = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  void* handle = nullptr;
  check_hip_with_descriptor(hip().hipMemImportFromShareableHandle(
                                &handle, version >= kHipWithPlainDescriptors ? by_value : &fd, kFileDescriptor),
                            "hipMemImportFromShareableHandle");
  return handle;
}

}  // namespace mori::rocm
