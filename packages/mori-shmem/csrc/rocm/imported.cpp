#include "rocm/imported.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "rocm/device.h"
#include "rocm/vmm.h"

namespace mori::rocm {

namespace {

Error not_importable(const std::string& why) { return Error("not_importable", {{"why", why}}); }

void check_owner(int ordinal, uint64_t address) {
  PointerAttributes attributes{};
  const int code = hip().hipPointerGetAttributes(&attributes, reinterpret_cast<void*>(address));
  if (code != kHipSuccess) {
    hip().hipGetLastError();
    throw not_importable("it is not memory of a GPU");
  }
  if (attributes.device != ordinal)
    throw not_importable("it lies on device " + std::to_string(attributes.device) + ", this rank uses device " + std::to_string(ordinal));
}

}  // namespace

Pieces::Pieces(int ordinal, uint64_t address, uint64_t nbytes_) : nbytes(nbytes_) {
  const OnDevice on(ordinal);
  try {
    for (uint64_t at = address; at < address + nbytes;) {
      check_owner(ordinal, at);
      void *base = nullptr, *handle = nullptr;
      size_t size = 0;
      if (hip().hipMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)) != kHipSuccess) {
        hip().hipGetLastError();
        throw not_importable(
            "it was not mapped by hipMemMap and has no handle that could be exported. Torch maps its memory so with "
            "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True, set before the process starts");
      }
      handles_.push_back(handle);
      check_hip(hip().hipMemGetAddressRange(&base, &size, reinterpret_cast<void*>(at)), "hipMemGetAddressRange");
      const uint64_t first = reinterpret_cast<uint64_t>(base);
      if (sizes.empty()) lead = at - first;
      sizes.push_back(size);
      at = first + size;
    }
  } catch (...) {
    for (void* handle : handles_) hip().hipMemRelease(handle);
    throw;
  }
}

Pieces::~Pieces() {
  for (void* handle : handles_) hip().hipMemRelease(handle);
}

std::vector<int> Pieces::export_fds() const {
  std::vector<int> fds;
  try {
    for (void* handle : handles_) fds.push_back(export_fd(handle));
  } catch (...) {
    for (const int fd : fds) ::close(fd);
    throw;
  }
  return fds;
}

ImportedWindow::ImportedWindow(int ordinal, int rank_, const Pieces& mine, const std::vector<PeerPieces>& ranks)
    : Mapping(mine.nbytes, static_cast<int>(ranks.size())), rank(rank_), ordinal_(ordinal) {
  const OnDevice on(ordinal);
  const std::lock_guard<std::mutex> lock(vmm_mutex());
  const uint64_t granularity = granularity_of(ordinal, false);
  uint64_t lead = 0;
  for (const PeerPieces& of : ranks) lead = std::max(lead, of.lead);
  for (const PeerPieces& of : ranks) {
    uint64_t end = lead - of.lead;
    for (const uint64_t size : of.sizes) end += size;
    stride = std::max(stride, (end + granularity - 1) / granularity * granularity);
  }
  reserved_bytes_ = stride * ranks.size();
  check_hip(hip().hipMemAddressReserve(&reservation_, reserved_bytes_, granularity, nullptr, 0), "hipMemAddressReserve");
  base = reinterpret_cast<uint64_t>(reservation_) + lead;
  try {
    for (size_t r = 0; r < ranks.size(); ++r) {
      const bool own = static_cast<int>(r) == rank;
      if (!own && ranks[r].fds.size() != ranks[r].sizes.size())
        throw std::invalid_argument("rank " + std::to_string(r) + " has " + std::to_string(ranks[r].sizes.size()) +
                                    " pieces, but " + std::to_string(ranks[r].fds.size()) + " descriptors came");
      uint64_t at = base - ranks[r].lead + r * stride;
      for (size_t i = 0; i < ranks[r].sizes.size(); ++i) {
        map(at, own ? mine.handles()[i] : import_fd(ranks[r].fds[i]), ranks[r].sizes[i], !own);
        at += ranks[r].sizes[i];
      }
    }
  } catch (...) {
    give_back();
    throw;
  }
}

ImportedWindow::~ImportedWindow() {
  const std::lock_guard<std::mutex> lock(vmm_mutex());
  give_back();
}

void ImportedWindow::map(uint64_t at, void* handle, uint64_t size, bool imported) {
  void* const address = reinterpret_cast<void*>(at);
  const int code = hip().hipMemMap(address, size, 0, handle, 0);
  if (code != kHipSuccess && imported) hip().hipMemRelease(handle);
  check_hip(code, "hipMemMap");
  mapped_.push_back({address, handle, size, imported});
  allow_access(address, size, ordinal_);
}

void ImportedWindow::give_back() {
  for (const Mapped& m : mapped_) {
    hip().hipMemUnmap(m.address, m.nbytes);
    if (m.imported) hip().hipMemRelease(m.handle);
  }
  mapped_.clear();
  if (reservation_) hip().hipMemAddressFree(reservation_, reserved_bytes_);
  reservation_ = nullptr;
}

}  // namespace mori::rocm
