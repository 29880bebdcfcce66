#include "node/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace mori_sim {
namespace {

constexpr const char* kMemoryName = "mori-sim-memory";
constexpr uint64_t kPage = 4096;
constexpr uint64_t kTrailerMagic = 0x6d656d6972696f6dull;
constexpr uint8_t kReadWrite = 3;
constexpr uint64_t kFirstLent = 65536;  // a null pointer plus an offset is never ordinary memory

struct Trailer {
  uint64_t magic, nbytes;
  int32_t home;
  uint32_t uncached;
};

uint64_t pages(uint64_t nbytes) { return (nbytes + kPage - 1) & ~(kPage - 1); }

[[noreturn]] void fail_system(const std::string& what) {
  std::string text = what + ": " + std::strerror(errno);
  rlimit limit{};
  if (errno == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    text += ": this process may hold " + std::to_string(limit.rlim_cur) + " file descriptors, and device memory takes one an "
            "allocation; raise the limit before it is started (ulimit -n)";
  throw std::runtime_error(text);
}

uint64_t map_anywhere(const Backing& backing) {
  void* at = mmap(nullptr, pages(backing.nbytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, backing.fd, 0);
  if (at == MAP_FAILED) fail_system("cannot map " + std::to_string(backing.nbytes) + " bytes of device memory");
  return reinterpret_cast<uint64_t>(at);
}

uint64_t inode_of(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) fail_system("fstat of device memory");
  return status.st_ino;
}

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

Backing::~Backing() {
  if (fd >= 0) close(fd);
  if (counted_in != nullptr) *counted_in -= nbytes;
}

// ---------------------------------------------------------------------------------------------- backings
BackingPtr AddressSpace::create(uint64_t nbytes, int home, bool uncached) {
  if (nbytes == 0) throw std::invalid_argument("an allocation of 0 bytes");
  auto backing = std::make_shared<Backing>();
  backing->nbytes = nbytes;
  backing->home = home;
  backing->uncached = uncached;
  backing->fd = memfd_create(kMemoryName, MFD_CLOEXEC);
  if (backing->fd < 0) fail_system("memfd_create");
  backing->inode = inode_of(backing->fd);
  const Trailer trailer{kTrailerMagic, nbytes, home, uncached};
  if (ftruncate(backing->fd, static_cast<off_t>(pages(nbytes) + kPage)) != 0 ||
      pwrite(backing->fd, &trailer, sizeof trailer, static_cast<off_t>(pages(nbytes))) != sizeof trailer)
    fail_system("cannot size " + std::to_string(nbytes) + " bytes of device memory");
  if (home >= 0) {
    used_[home] += nbytes;
    backing->counted_in = &used_[home];
  }
  return backing;
}

BackingPtr AddressSpace::import_fd(int fd) {
  struct stat status;
  Trailer trailer{};
  if (fstat(fd, &status) != 0 || status.st_size < static_cast<off_t>(2 * kPage) ||
      pread(fd, &trailer, sizeof trailer, status.st_size - static_cast<off_t>(kPage)) != sizeof trailer ||
      trailer.magic != kTrailerMagic || pages(trailer.nbytes) + kPage != static_cast<uint64_t>(status.st_size))
    throw std::invalid_argument("file descriptor " + std::to_string(fd) + " is not exported device memory of this node");
  auto backing = std::make_shared<Backing>();
  backing->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (backing->fd < 0) fail_system("dup of an exported descriptor");
  backing->inode = status.st_ino;
  backing->nbytes = trailer.nbytes;
  backing->home = trailer.home;
  backing->uncached = trailer.uncached != 0;
  backing->imported = true;
  return backing;
}

// ---------------------------------------------------------------------------------------------- the table
const Range* AddressSpace::containing(uint64_t address) const {
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return nullptr;
  const Range& range = std::prev(next)->second;
  return address < range.end ? &range : nullptr;
}

Range* AddressSpace::containing(uint64_t address) {
  return const_cast<Range*>(static_cast<const AddressSpace*>(this)->containing(address));
}

AddressSpace::Known AddressSpace::known_by(const Range& range) {
  if (range.backing_offset == 0 && range.end - range.begin >= range.backing->nbytes) return {range.begin, 0};
  const uint64_t nbytes = pages(range.backing->nbytes);
  void* at = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail_system("cannot reserve " + std::to_string(nbytes) + " bytes of addresses");
  return {reinterpret_cast<uint64_t>(at), nbytes};
}

void AddressSpace::set_shift(Range& range, const Known& known) {
  if (range.shift != 0) --num_aliases_;
  range.shift = known.begin + range.backing_offset - range.begin;
  if (range.shift != 0) ++num_aliases_;
}

void AddressSpace::insert(Range range) {
  range.shift = 0;
  if (range.backing) {
    auto known = known_.find(range.backing->inode);
    if (known == known_.end()) known = known_.emplace(range.backing->inode, known_by(range)).first;
    set_shift(range, known->second);
  }
  ranges_[range.begin] = std::move(range);
  ++generation_;
}

AddressSpace::Known AddressSpace::forget(const Range& range) {
  ++generation_;
  if (range.shift != 0) --num_aliases_;
  if (!range.backing) return {};
  std::vector<Range*> others;
  for (auto& [begin, other] : ranges_)
    if (other.backing && other.backing->inode == range.backing->inode) others.push_back(&other);
  const auto known = known_.find(range.backing->inode);
  if (others.empty()) {
    const Known last = known->second;
    known_.erase(known);
    return last;
  }
  if (known->second.reserved_nbytes != 0 || known->second.begin != range.begin) return {};
  known->second = known_by(*others.front());
  for (Range* other : others) set_shift(*other, known->second);
  return {};
}

uint64_t AddressSpace::known_as(uint64_t address, uint64_t* nbytes) const {
  if (num_aliases_ == 0) return address;
  std::lock_guard lock(mutex_);
  const auto above = ranges_.upper_bound(address);
  const Range* range = containing(address);
  const uint64_t end = range != nullptr ? range->end : above != ranges_.end() ? above->first : ~0ull;
  *nbytes = std::min(*nbytes, end - address);
  return range == nullptr ? address : address + range->shift;
}

// Throws what `check` throws, which gets null when no range starts there.
Range AddressSpace::take_out(uint64_t address, const std::function<void(const Range*)>& check) {
  Range range;
  Known known;
  {
    std::lock_guard lock(mutex_);
    const auto found = ranges_.find(address);
    check(found == ranges_.end() ? nullptr : &found->second);
    range = found->second;
    ranges_.erase(found);
    known = forget(range);
  }
  on_gone(range.begin, range.end - range.begin);
  if (known.reserved_nbytes != 0) {
    on_gone(known.begin, known.reserved_nbytes);
    munmap(reinterpret_cast<void*>(known.begin), known.reserved_nbytes);
  }
  return range;
}

void AddressSpace::poison(const Range& range) {
  if (poison_ && range.home != kHostMemory && range.kind != RangeKind::code) std::memset(reinterpret_cast<void*>(range.begin), 0xcb, range.end - range.begin);
}

// ---------------------------------------------------------------------------------------------- allocations
uint64_t AddressSpace::allocate(uint64_t nbytes, int home, bool uncached, RangeKind kind) {
  std::lock_guard lock(mutex_);
  Range range;
  range.backing = create(nbytes, home, uncached);
  range.begin = map_anywhere(*range.backing);
  range.end = range.begin + nbytes;
  range.kind = kind;
  range.home = home;
  range.uncached = uncached;
  range.rights.fill(kReadWrite);
  poison(range);
  const uint64_t address = range.begin;
  insert(std::move(range));
  return address;
}

void AddressSpace::release(uint64_t address) {
  const Range range = take_out(address, [&](const Range* r) {
    if (r == nullptr || r->kind == RangeKind::mapping || r->kind == RangeKind::registered)
      throw std::invalid_argument(hex(address) + " is not the start of an allocation");
  });
  munmap(reinterpret_cast<void*>(range.begin), pages(range.end - range.begin));
}

BackingPtr AddressSpace::backing_of(uint64_t address, uint64_t* offset) const {
  std::lock_guard lock(mutex_);
  const Range* range = containing(address);
  if (range == nullptr) return nullptr;
  if (offset != nullptr) *offset = range->backing_offset + (address - range->begin);
  return range->backing;
}

void AddressSpace::set_rights(uint64_t address, uint8_t rights) {
  std::lock_guard lock(mutex_);
  const auto found = ranges_.find(address);
  if (found == ranges_.end()) throw std::invalid_argument(hex(address) + " is not the start of an allocation");
  found->second.rights.fill(rights);
  ++generation_;
}

void AddressSpace::enable_peer(int device, int home) {
  std::lock_guard lock(mutex_);
  peers_[device][home] = true;
  ++generation_;
}

uint64_t AddressSpace::open_imported(const BackingPtr& backing) {
  std::lock_guard lock(mutex_);
  Range range;
  range.backing = backing;
  range.begin = map_anywhere(*backing);
  range.end = range.begin + backing->nbytes;
  range.kind = RangeKind::imported;
  range.home = backing->home;
  range.uncached = backing->uncached;
  range.rights.fill(kReadWrite);
  const uint64_t address = range.begin;
  insert(std::move(range));
  return address;
}

// ---------------------------------------------------------------------------------------------- VMM
uint64_t AddressSpace::reserve(uint64_t nbytes, uint64_t alignment, uint64_t wish) {
  std::lock_guard lock(mutex_);
  if (nbytes == 0 || nbytes % kPage != 0) throw std::invalid_argument("a reservation of " + std::to_string(nbytes) + " bytes: whole pages are needed");
  if (alignment < kPage) alignment = kPage;
  if (alignment & (alignment - 1)) throw std::invalid_argument("an alignment that is no power of two");
  const uint64_t total = nbytes + alignment;
  void* at = mmap(reinterpret_cast<void*>(wish), total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail_system("cannot reserve " + std::to_string(nbytes) + " bytes of addresses");
  const uint64_t first = reinterpret_cast<uint64_t>(at), begin = (first + alignment - 1) & ~(alignment - 1);
  if (begin > first) munmap(at, begin - first);
  if (first + total > begin + nbytes) munmap(reinterpret_cast<void*>(begin + nbytes), first + total - begin - nbytes);
  reservations_[begin] = nbytes;
  return begin;
}

void AddressSpace::unreserve(uint64_t address, uint64_t nbytes) {
  std::lock_guard lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != nbytes)
    throw std::invalid_argument(hex(address) + " is not a reservation of " + std::to_string(nbytes) + " bytes");
  const auto inside = ranges_.lower_bound(address);
  if (inside != ranges_.end() && inside->first < address + nbytes)
    throw std::invalid_argument("the reservation still holds a mapping at " + hex(inside->first));
  munmap(reinterpret_cast<void*>(address), nbytes);
  reservations_.erase(found);
}

void AddressSpace::map(uint64_t address, uint64_t nbytes, uint64_t offset, const BackingPtr& backing) {
  std::lock_guard lock(mutex_);
  auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin() || address + nbytes > std::prev(next)->first + std::prev(next)->second)
    throw std::invalid_argument(hex(address) + ": not inside of one reservation");
  if (nbytes == 0 || address % kPage || nbytes % kPage || offset % kPage || offset + nbytes > pages(backing->nbytes))
    throw std::invalid_argument("mapping " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) + " of an allocation of " + std::to_string(backing->nbytes));
  const auto inside = ranges_.lower_bound(address);
  if (containing(address) != nullptr || (inside != ranges_.end() && inside->first < address + nbytes))
    throw std::invalid_argument(hex(address) + ": something is mapped there already");
  // Readable and writable for the host at once: on hardware, too, access rights are those of devices.
  if (mmap(reinterpret_cast<void*>(address), nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           backing->fd, static_cast<off_t>(offset)) == MAP_FAILED)
    fail_system("cannot map device memory");
  Range range;
  range.begin = address;
  range.end = address + nbytes;
  range.kind = RangeKind::mapping;
  range.home = backing->home;
  range.uncached = backing->uncached;
  range.backing = backing;
  range.backing_offset = offset;
  if (!backing->imported && !backing->filled) poison(range);
  backing->filled = true;
  insert(std::move(range));
}

void AddressSpace::unmap(uint64_t address, uint64_t nbytes) {
  take_out(address, [&](const Range* r) {
    if (r == nullptr || r->kind != RangeKind::mapping || r->end != address + nbytes)
      throw std::invalid_argument(hex(address) + ": no mapping of " + std::to_string(nbytes) + " bytes starts there");
  });
  mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

void AddressSpace::permit(uint64_t address, uint64_t nbytes, int device, uint8_t rights) {
  std::lock_guard lock(mutex_);
  for (uint64_t at = address; at < address + nbytes;) {
    Range* range = containing(at);
    if (range == nullptr || range->kind != RangeKind::mapping) throw std::invalid_argument(hex(at) + ": nothing is mapped there");
    range->rights[device] = rights;
    at = range->end;
  }
  ++generation_;
}

// ---------------------------------------------------------------------------------------------- host memory
void AddressSpace::register_host(uint64_t address, uint64_t nbytes, uint64_t flags) {
  std::lock_guard lock(mutex_);
  if (nbytes == 0 || containing(address) != nullptr) throw std::invalid_argument(hex(address) + ": registered already");
  Range range;
  range.begin = address;
  range.end = address + nbytes;
  range.kind = RangeKind::registered;
  range.home = kHostMemory;
  range.rights.fill(kReadWrite);
  range.host_flags = flags;
  insert(std::move(range));
}

void AddressSpace::unregister_host(uint64_t address) {
  take_out(address, [&](const Range* r) {
    if (r == nullptr || r->kind != RangeKind::registered) throw std::invalid_argument(hex(address) + ": not registered");
  });
}

void AddressSpace::host_mappings_may_have_changed() {
  std::lock_guard lock(mutex_);
  if (lend_host_memory_ && maps_ < 0 && (maps_ = open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) < 0) fail_system("/proc/self/maps");
  if (lent_.empty()) return;
  lent_.clear();
  ++generation_;
}

// Reads the process's mappings when the address is in none that is known: new ones appear all the time.
bool AddressSpace::resolve_lent(int device, uint64_t address, Region* region) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    auto next = lent_.upper_bound(address);
    if (next != lent_.begin() && address < std::prev(next)->second.first) {
      const auto& [begin, mapping] = *std::prev(next);
      *region = {begin, mapping.first, reinterpret_cast<uint8_t*>(begin), MemoryKind::local, device, mapping.second};
      // Tracked ranges inside of the mapping keep their own bounds.
      const auto above = ranges_.lower_bound(address);
      if (above != ranges_.end() && above->first < region->end) region->end = above->first;
      if (above != ranges_.begin() && std::prev(above)->second.end > region->begin) {
        region->begin = std::prev(above)->second.end;
        region->host = reinterpret_cast<uint8_t*>(region->begin);
      }
      return true;
    }
    if (attempt == 1 || address < kFirstLent) return false;
    read_lent();
  }
  return false;
}

void AddressSpace::read_lent() {
  lent_.clear();
  if (maps_ < 0 && (maps_ = open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) < 0) return;
  lseek(maps_, 0, SEEK_SET);
  std::string maps;
  char piece[1 << 14];
  for (ssize_t n; (n = read(maps_, piece, sizeof piece)) > 0;) maps.append(piece, static_cast<size_t>(n));
  std::istringstream lines(maps);
  for (std::string line; std::getline(lines, line);) {
    unsigned long long begin = 0, end = 0;
    char mode[8] = "";
    if (std::sscanf(line.c_str(), "%llx-%llx %7s", &begin, &end, mode) != 3 || mode[0] != 'r' || mode[2] == 'x') continue;
    if (line.find("[v") != std::string::npos) continue;  // vvar, vdso, vsyscall
    if (line.find(kMemoryName) != std::string::npos) continue;  // the rest of a device allocation's last page is nobody's
    const bool writable = mode[1] == 'w';
    auto last = lent_.empty() ? lent_.end() : std::prev(lent_.end());
    if (last != lent_.end() && last->second.first == begin && last->second.second == writable) last->second.first = end;
    else lent_[begin] = {end, writable};
  }
}

// ---------------------------------------------------------------------------------------------- questions
bool AddressSpace::find(uint64_t address, Range* range) const {
  std::lock_guard lock(mutex_);
  const Range* found = containing(address);
  if (found != nullptr) *range = *found;
  return found != nullptr;
}

bool AddressSpace::covers(int device, uint64_t address, uint64_t nbytes, uint8_t rights) {
  std::lock_guard lock(mutex_);
  if (address + nbytes < address) return false;
  for (uint64_t at = address; at < address + nbytes;) {
    Region region;
    if (!resolve(device, at, &region) || ((rights & 2) && !region.writable)) return false;
    at = region.end;
  }
  return true;
}

std::string AddressSpace::describe_access(int device, uint64_t address, uint64_t nbytes) {
  std::lock_guard lock(mutex_);
  Region region;
  uint64_t at = address;
  while (at - address < nbytes && resolve(device, at, &region)) at = region.end;
  return describe(at);
}

bool AddressSpace::reserved(uint64_t address) const {
  std::lock_guard lock(mutex_);
  auto next = reservations_.upper_bound(address);
  return next != reservations_.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

bool AddressSpace::lent(uint64_t address) {
  std::lock_guard lock(mutex_);
  Region region;
  return lend_host_memory_ && containing(address) == nullptr && !reserved(address) && resolve_lent(0, address, &region);
}

bool AddressSpace::resolve(int device, uint64_t address, Region* region) {
  std::lock_guard lock(mutex_);
  const Range* range = containing(address);
  if (range == nullptr) return lend_host_memory_ && !reserved(address) && resolve_lent(device, address, region);
  const uint8_t rights = range->rights[device];
  if (!(rights & 1)) return false;
  if (range->kind == RangeKind::allocation && range->home >= 0 && range->home != device && !peers_[device][range->home]) return false;
  region->begin = range->begin;
  region->end = range->end;
  region->host = reinterpret_cast<uint8_t*>(range->begin);
  region->home_device = range->home;
  region->writable = (rights & 2) != 0;
  region->shift = range->shift;
  region->shared = range->backing != nullptr && (range->backing->imported || range->backing->exported);
  region->kind = range->home == kHostMemory ? MemoryKind::host
                 : range->uncached          ? MemoryKind::uncached
                 : range->home == device    ? MemoryKind::local
                                            : MemoryKind::peer;
  return true;
}

std::string AddressSpace::describe(uint64_t address) const {
  std::lock_guard lock(mutex_);
  const auto shown = [](const Range& r) {
    const char* kind[] = {"allocation", "mapped window", "imported memory", "host allocation", "registered host memory", "code object", "driver allocation"};
    return std::string(kind[static_cast<int>(r.kind)]) + " [" + hex(r.begin) + ", " + hex(r.end) + ") of " +
           (r.home < 0 ? std::string("the host") : "device " + std::to_string(r.home)) + (r.uncached ? ", uncached" : "");
  };
  if (const Range* range = containing(address)) {
    std::string text = hex(address) + " lies in the " + shown(*range);
    if (range->kind == RangeKind::allocation && range->home >= 0) text += "; other devices need hipDeviceEnablePeerAccess";
    if (range->kind == RangeKind::mapping) text += "; devices need hipMemSetAccess";
    return text;
  }
  std::string text = hex(address) + " is not mapped";
  if (reserved(address)) text += ", but reserved";
  const auto next = ranges_.upper_bound(address);
  if (next != ranges_.begin()) {
    const Range& below = std::prev(next)->second;
    text += "; " + std::to_string(address - below.end) + " bytes past the end of the " + shown(below);
  }
  if (next != ranges_.end())
    text += "; " + std::to_string(next->first - address) + " bytes before the " + shown(next->second);
  return text;
}

}  // namespace mori_sim
