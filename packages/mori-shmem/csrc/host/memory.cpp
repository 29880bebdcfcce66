#include "host/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace mori {

namespace {

constexpr uint64_t kHugePage = 2u << 20;
constexpr uint64_t kMaxPart = uint64_t{1} << 46;  // far above any machine's memory, far below any overflow

uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

void check_size(uint64_t nbytes) {
  if (nbytes == 0 || nbytes > kMaxPart) throw bad_value("nbytes", nbytes, "1 .. 2**46");
}

void check_file(int fd, uint64_t nbytes) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw system_error("fstat");
  if (static_cast<uint64_t>(status.st_size) < nbytes)
    throw bad_value("size of the memory file", uint64_t(status.st_size), ("at least " + std::to_string(nbytes)).c_str());
}

}  // namespace

int create_memory(uint64_t nbytes, const std::string& name) {
  check_size(nbytes);
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_error("memfd_create");
  const bool sized = ftruncate(fd, static_cast<off_t>(round_up(nbytes, page_bytes()))) == 0;
  if (!sized || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int code = errno;
    close(fd);
    throw system_error(sized ? "fcntl(F_ADD_SEALS)" : "ftruncate", code);
  }
  return fd;
}

FileMapping::FileMapping(const std::vector<int>& fds, uint64_t nbytes_) : Mapping(nbytes_, static_cast<int>(fds.size())) {
  check_size(nbytes);
  for (const int fd : fds) check_file(fd, nbytes);
  const uint64_t unit = nbytes >= kHugePage ? std::max(kHugePage, page_bytes()) : page_bytes();
  stride = round_up(nbytes, unit);
  reserved_bytes_ = stride * fds.size() + unit;
  reservation_ = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reservation_ == MAP_FAILED) throw system_error("mmap(reserve)");
  base = round_up(reinterpret_cast<uint64_t>(reservation_), unit);
  for (size_t rank = 0; rank < fds.size(); ++rank) {
    void* const part = reinterpret_cast<void*>(base + rank * stride);
    if (mmap(part, round_up(nbytes, page_bytes()), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fds[rank], 0) == MAP_FAILED) {
      const int code = errno;
      munmap(reservation_, reserved_bytes_);
      throw system_error("mmap(part)", code);
    }
  }
}

FileMapping::~FileMapping() { munmap(reservation_, reserved_bytes_); }

void AddressSpace::replace(Windows windows) {
  windows_ = std::make_shared<const Windows>(std::move(windows));
  version_.fetch_add(1, std::memory_order_release);
}

void AddressSpace::add(std::shared_ptr<const Mapping> window) {
  std::lock_guard<std::mutex> lock(mutex_);
  Windows windows = *windows_;
  windows.push_back(std::move(window));
  std::sort(windows.begin(), windows.end(), [](const auto& a, const auto& b) { return a->base < b->base; });
  replace(std::move(windows));
}

void AddressSpace::remove(const Mapping* window) {
  std::lock_guard<std::mutex> lock(mutex_);
  Windows windows = *windows_;
  windows.erase(std::remove_if(windows.begin(), windows.end(), [&](const auto& w) { return w.get() == window; }),
                windows.end());
  replace(std::move(windows));
}

void AddressSpace::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  replace({});
}

std::shared_ptr<const AddressSpace::Windows> AddressSpace::snapshot(uint64_t* version) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *version = version_.load(std::memory_order_relaxed);
  return windows_;
}

void View::refresh() {
  if (space_.version() != version_) windows_ = space_.snapshot(&version_);
}

const Mapping* View::nearest(uint64_t address) const {
  const auto above = std::upper_bound(windows_->begin(), windows_->end(), address,
                                      [](uint64_t a, const auto& window) { return a < window->base; });
  if (above != windows_->begin()) return std::prev(above)->get();
  return windows_->empty() ? nullptr : windows_->front().get();
}

Place View::find(uint64_t address, uint64_t nbytes) const {
  const Mapping* const window = nearest(address);
  if (!window || address < window->base) return {};
  const uint64_t rank = (address - window->base) / window->stride;
  const uint64_t offset = (address - window->base) % window->stride;
  if (rank >= static_cast<uint64_t>(window->world_size)) return {};
  if (nbytes > window->nbytes || offset > window->nbytes - nbytes) return {};
  return {reinterpret_cast<char*>(address), static_cast<int>(rank)};
}

Place View::require(const char* what, uint64_t address, uint64_t nbytes, uint64_t alignment) const {
  if (address % alignment)
    throw Error("misaligned", {{"what", std::string(what)}, {"address", address}, {"alignment", alignment}});
  const Place place = find(address, nbytes);
  if (place.pointer) return place;
  const Mapping* const window = nearest(address);
  throw Error("out_of_range", {{"what", std::string(what)},
                               {"address", address},
                               {"nbytes", nbytes},
                               {"base", window ? window->base : 0},
                               {"stride", window ? window->stride : 0},
                               {"size", window ? window->nbytes : 0}});
}

}  // namespace mori
