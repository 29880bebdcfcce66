#include "rocm/window.h"

#include "rocm/device.h"
#include "rocm/vmm.h"

namespace mori::rocm {

DeviceWindow::DeviceWindow(int ordinal, int rank_, int world_size_, uint64_t nbytes_, bool uncached)
    : Mapping(nbytes_, world_size_), rank(rank_), ordinal_(ordinal), handles_(static_cast<size_t>(world_size_)) {
  const OnDevice on(ordinal);
  const std::lock_guard<std::mutex> lock(vmm_mutex());
  const AllocationProperties wanted = properties(ordinal, uncached);
  const uint64_t granularity = granularity_of(ordinal, uncached);
  stride = (nbytes + granularity - 1) / granularity * granularity;
  check_hip(hip().hipMemAddressReserve(&reservation_, stride * handles_.size(), granularity, nullptr, 0),
            "hipMemAddressReserve");
  base = reinterpret_cast<uint64_t>(reservation_);
  try {
    void* handle = nullptr;
    check_hip_with_descriptor(hip().hipMemCreate(&handle, stride, &wanted, 0), "hipMemCreate");
    map(rank, handle);
    zero();
  } catch (...) {
    give_back();
    throw;
  }
}

DeviceWindow::~DeviceWindow() {
  const std::lock_guard<std::mutex> lock(vmm_mutex());
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

int DeviceWindow::export_fd() const { return rocm::export_fd(handles_[static_cast<size_t>(rank)]); }

void DeviceWindow::import_peers(const std::vector<int>& fds) {
  const OnDevice on(ordinal_);
  const std::lock_guard<std::mutex> lock(vmm_mutex());
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) continue;
    map(peer, import_fd(fds[static_cast<size_t>(peer)]));
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
