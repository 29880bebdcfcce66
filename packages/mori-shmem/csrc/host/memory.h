// Anonymous shared memory, and the one place that says which addresses may be touched.
//
// A window of W ranks is one reservation of W * stride bytes. Rank r's memory file is mapped at base + r * stride, so a
// peer's address follows from mine by arithmetic. The files have no names and live as long as a mapping or a descriptor
// does; their size is sealed, so that no peer can make an access fail after the fact.
//
// AddressSpace holds the windows that queues and signals may reach. Readers take a View, an immutable snapshot that keeps
// the mappings alive; closing a window replaces the snapshot, and the memory goes when the last View and Span have gone.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/errors.h"

namespace mori {

int create_memory(uint64_t nbytes, const std::string& name);  // a descriptor; the caller owns it

class Mapping {
 public:
  Mapping(uint64_t nbytes_, int world_size_) : nbytes(nbytes_), world_size(world_size_) {}
  virtual ~Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const uint64_t nbytes;  // of one rank's part
  const int world_size;
  uint64_t base = 0;
  uint64_t stride = 0;
};

class FileMapping : public Mapping {
 public:
  FileMapping(const std::vector<int>& fds, uint64_t nbytes);
  ~FileMapping() override;

 private:
  void* reservation_ = nullptr;
  uint64_t reserved_bytes_ = 0;
};

struct Place {
  char* pointer = nullptr;  // null: outside every window
  int rank = -1;  // whose part it lies in
};

class AddressSpace {
 public:
  using Windows = std::vector<std::shared_ptr<const Mapping>>;  // sorted by base

  void add(std::shared_ptr<const Mapping> window);
  void remove(const Mapping* window);
  void clear();

  std::shared_ptr<const Windows> snapshot(uint64_t* version) const;
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  void replace(Windows windows);

  mutable std::mutex mutex_;
  std::shared_ptr<const Windows> windows_ = std::make_shared<const Windows>();
  std::atomic<uint64_t> version_{0};
};

// One thread's look at the address space.
class View {
 public:
  explicit View(const AddressSpace& space) : space_(space) { refresh(); }

  void refresh();  // notice windows that were added or closed since
  Place find(uint64_t address, uint64_t nbytes) const;
  // The same, or Error out_of_range / misaligned that says what was meant.
  Place require(const char* what, uint64_t address, uint64_t nbytes, uint64_t alignment = 1) const;

 private:
  const Mapping* nearest(uint64_t address) const;

  const AddressSpace& space_;
  uint64_t version_ = UINT64_MAX;
  std::shared_ptr<const AddressSpace::Windows> windows_;
};

}  // namespace mori
