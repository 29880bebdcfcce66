// The node's memory as this process sees it: every range that kernels, copy engines and HIP calls may touch.
//
// Device memory is a memfd, so another process can map the same bytes. A device address is the address at which the
// bytes are mapped here. Behind the bytes of each memfd lies one trailer page that says whose memory it is and
// whether it is uncached; whoever imports the descriptor reads it, as a driver would know the page table bits.
//
// Bounds are exact: a range ends where the user's request ended, not at the end of its page.
// Ordinary process memory may be lent to kernels (a CPU tensor standing in for a device tensor): it then counts as
// memory of the device that touches it, and its bounds are those of the process's mapping.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exec/machine.hpp"

namespace mori_sim {

constexpr int kMaxDevices = 8;
constexpr int kHostMemory = -1;  // home of system memory

struct Backing {  // one memfd; closed with the last owner
  int fd = -1;
  uint64_t inode = 0;     // the same for all descriptors of the same bytes
  uint64_t nbytes = 0;
  int home = 0;
  bool uncached = false;
  bool imported = false;
  bool exported = false;  // another process may have mapped it: strict mode expects unseen writes
  bool exportable = true;
  bool filled = false;    // poisoned when it was mapped first, and not again
  std::atomic<uint64_t>* counted_in = nullptr;  // the home device's used bytes
  ~Backing();
};
using BackingPtr = std::shared_ptr<Backing>;

enum class RangeKind { allocation, mapping, imported, host, registered, code, mapped_to_gpu };

struct Range {
  uint64_t begin = 0, end = 0;
  RangeKind kind = RangeKind::allocation;
  int home = 0;
  bool uncached = false;
  BackingPtr backing;            // null for registered host memory
  uint64_t backing_offset = 0;
  std::array<uint8_t, kMaxDevices> rights{};  // bit 0 read, bit 1 write, for each device
  uint64_t host_flags = 0;       // what the caller asked for, shown by pointer queries
  uint64_t shift = 0;            // to the address by which checkers know these bytes
};

class AddressSpace : public Memory {
 public:
  AddressSpace(bool lend_host_memory, bool poison) : lend_host_memory_(lend_host_memory), poison_(poison) {}

  // Called, without a lock, when a range (first address, bytes) is in no table any more and its addresses are still
  // taken: nobody reaches it, and nothing new lies there yet.
  std::function<void(uint64_t, uint64_t)> on_gone = [](uint64_t, uint64_t) {};

  // ---- allocations: backed, mapped and accessible at once
  uint64_t allocate(uint64_t nbytes, int home, bool uncached, RangeKind kind = RangeKind::allocation);
  void release(uint64_t address);           // throws std::invalid_argument unless an allocation starts there
  BackingPtr backing_of(uint64_t address, uint64_t* offset) const;
  void set_rights(uint64_t address, uint8_t rights);  // of every device, for the range that starts there
  void enable_peer(int device, int home);   // hipMalloc'ed memory of `home` becomes reachable from `device`
  bool peer_enabled(int device, int home) const { return peers_[device][home]; }

  // ---- virtual memory management: reserve, create, map and permit are four steps
  uint64_t reserve(uint64_t nbytes, uint64_t alignment, uint64_t wish);
  void unreserve(uint64_t address, uint64_t nbytes);
  BackingPtr create(uint64_t nbytes, int home, bool uncached);
  static BackingPtr import_fd(int fd);      // the descriptor stays the caller's
  void map(uint64_t address, uint64_t nbytes, uint64_t offset, const BackingPtr& backing);
  void unmap(uint64_t address, uint64_t nbytes);
  void permit(uint64_t address, uint64_t nbytes, int device, uint8_t rights);
  uint64_t open_imported(const BackingPtr& backing);  // IPC: maps the whole of another process's allocation

  // ---- host memory
  void register_host(uint64_t address, uint64_t nbytes, uint64_t flags);
  void unregister_host(uint64_t address);

  // ---- questions
  bool find(uint64_t address, Range* range) const;
  // Is all of [address, address + nbytes) mapped with these rights for `device`?
  bool covers(int device, uint64_t address, uint64_t nbytes, uint8_t rights);
  bool reserved(uint64_t address) const;    // inside of a reservation, mapped or not
  bool lent(uint64_t address);              // ordinary memory of this process that kernels may use
  std::string describe(uint64_t address) const;
  std::string describe_access(int device, uint64_t address, uint64_t nbytes);  // of the first byte out of reach
  uint64_t used_nbytes(int home) const { return used_[home]; }

  bool resolve(int device, uint64_t address, Region* region) override;
  uint64_t generation() const override { return generation_; }
  bool aliased() const override { return num_aliases_ > 0; }
  uint64_t known_as(uint64_t address, uint64_t* nbytes) const override;
  void host_mappings_may_have_changed();    // before a launch: what is lent is looked up anew

 private:
  Range take_out(uint64_t address, const std::function<void(const Range*)>& check);
  Range* containing(uint64_t address);
  const Range* containing(uint64_t address) const;
  void insert(Range range);
  // By which address the bytes of a backing are known: that of a mapping which has all of them, or else addresses that
  // are reserved for it, where nothing is mapped.
  struct Known {
    uint64_t begin = 0, reserved_nbytes = 0;
  };
  static Known known_by(const Range& range);
  void set_shift(Range& range, const Known& known);
  Known forget(const Range& range);  // what it was known by, if that ends with it
  bool resolve_lent(int device, uint64_t address, Region* region);
  void read_lent();
  void poison(const Range& range);

  const bool lend_host_memory_, poison_;
  mutable std::recursive_mutex mutex_;
  std::map<uint64_t, Range> ranges_;               // by first address
  std::map<uint64_t, Known> known_;                // by inode of the backing
  std::map<uint64_t, uint64_t> reservations_;      // first address -> nbytes
  std::map<uint64_t, std::pair<uint64_t, bool>> lent_;  // ordinary mappings: first -> (end, writable)
  int maps_ = -1;  // /proc/self/maps, kept open: while a kernel runs there may be no descriptor left
  std::array<std::array<bool, kMaxDevices>, kMaxDevices> peers_{};
  std::array<std::atomic<uint64_t>, kMaxDevices> used_{};
  std::atomic<uint64_t> generation_{1};
  std::atomic<int> num_aliases_{0};  // ranges whose shift is not 0
};

}  // namespace mori_sim
