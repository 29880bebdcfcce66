#include "rocm/window.h"

#include <unistd.h>

#include "rocm/device.h"

namespace mori::rocm {

namespace {

constexpr int kRecommendedGranularity = 1;
constexpr int kHipWithPlainDescriptors = 70100000;  // from 7.1 on a descriptor is imported by value, not by its address
constexpr int kAccessTries = 5;  // the driver may still be busy with the mapping
std::mutex vmm_mutex;  // the driver's calls for mappings are made one at a time

AllocationProperties properties(int ordinal, bool uncached) {
  AllocationProperties wanted{};
  wanted.type = uncached ? kUncached : kPinned;
  wanted.handle_types = kFileDescriptor;
  wanted.location_type = kOnDevice;
  wanted.location_id = ordinal;
  return wanted;
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

}  // namespace

DeviceWindow::DeviceWindow(int ordinal, int rank_, int world_size_, uint64_t nbytes_, bool uncached)
    : Mapping(nbytes_, world_size_), rank(rank_), ordinal_(ordinal), handles_(static_cast<size_t>(world_size_)) {
  const OnDevice on(ordinal);
  const std::lock_guard<std::mutex> lock(vmm_mutex);
  const AllocationProperties wanted = properties(ordinal, uncached);
  size_t granularity = 0;
  check_hip(hip().hipMemGetAllocationGranularity(&granularity, &wanted, kRecommendedGranularity),
            "hipMemGetAllocationGranularity");
  stride = (nbytes + granularity - 1) / granularity * granularity;
  check_hip(hip().hipMemAddressReserve(&reservation_, stride * handles_.size(), granularity, nullptr, 0),
            "hipMemAddressReserve");
  base = reinterpret_cast<uint64_t>(reservation_);
  try {
    void* handle = nullptr;
    check_hip(hip().hipMemCreate(&handle, stride, &wanted, 0), "hipMemCreate");
    map(rank, handle);
    zero();
  } catch (...) {
    give_back();
    throw;
  }
}

DeviceWindow::~DeviceWindow() {
  const std::lock_guard<std::mutex> lock(vmm_mutex);
  give_back();
}

void DeviceWindow::map(int of_rank, void* handle) {
  void* const address = reinterpret_cast<void*>(base + static_cast<uint64_t>(of_rank) * stride);
  const int code = hip().hipMemMap(address, stride, 0, handle, 0);
  if (code != kHipSuccess) {
    hip().hipMemRelease(handle);
    check_hip(code, "hipMemMap");
  }
  handles_[static_cast<size_t>(of_rank)] = handle;
  allow_access(address, stride, ordinal_);
}

void DeviceWindow::zero() const {
  void* stream = nullptr;
  check_hip(hip().hipStreamCreateWithFlags(&stream, 1), "hipStreamCreateWithFlags");
  void* const mine = reinterpret_cast<void*>(base + static_cast<uint64_t>(rank) * stride);
  int code = hip().hipMemsetAsync(mine, 0, stride, stream);
  if (code == kHipSuccess) code = hip().hipStreamSynchronize(stream);
  hip().hipStreamDestroy(stream);
  check_hip(code, "hipMemsetAsync");
}

int DeviceWindow::export_fd() const {
  int fd = -1;
  check_hip(hip().hipMemExportToShareableHandle(&fd, handles_[static_cast<size_t>(rank)], kFileDescriptor, 0),
            "hipMemExportToShareableHandle");
  return fd;
}

void DeviceWindow::import_peers(const std::vector<int>& fds) {
  const OnDevice on(ordinal_);
  const std::lock_guard<std::mutex> lock(vmm_mutex);
  int version = 0;
  check_hip(hip().hipRuntimeGetVersion(&version), "hipRuntimeGetVersion");
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) continue;
    int fd = fds[static_cast<size_t>(peer)];
    void* const by_value = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
    void* handle = nullptr;
    check_hip(hip().hipMemImportFromShareableHandle(&handle, version >= kHipWithPlainDescriptors ? by_value : &fd,
                                                    kFileDescriptor),
              "hipMemImportFromShareableHandle");
    map(peer, handle);
  }
}

void DeviceWindow::give_back() {
  for (size_t of_rank = 0; of_rank < handles_.size(); ++of_rank) {
    if (!handles_[of_rank]) continue;
    hip().hipMemUnmap(reinterpret_cast<void*>(base + of_rank * stride), stride);
    hip().hipMemRelease(handles_[of_rank]);
  }
  handles_.clear();
  if (reservation_) hip().hipMemAddressFree(reservation_, stride * static_cast<uint64_t>(world_size));
  reservation_ = nullptr;
}

}  // namespace mori::rocm
