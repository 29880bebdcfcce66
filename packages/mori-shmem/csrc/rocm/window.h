// A window in device memory: one reservation of addresses, and each rank's memory mapped at its place in it.
//
//   1. reserve world_size strides; create this rank's memory, map it at its place, zero it        (the constructor)
//   2. export it as a descriptor, which the ranks hand to each other                              (export_fd)
//   3. import the peers' descriptors and map them at theirs                                       (import_peers)
// It goes the same way back: every mapping, every handle, and the reservation last, which cannot be freed before.
// The kind of the memory travels with the descriptor. Cached: fast, for data; what is not written back is seen by nobody
// else. Uncached: for words that ranks signal with.
#pragma once
#include <mutex>
#include <vector>

#include "host/memory.h"

namespace mori::rocm {

class DeviceWindow : public Mapping {
 public:
  DeviceWindow(int ordinal, int rank, int world_size, uint64_t nbytes, bool uncached);
  ~DeviceWindow() override;

  int export_fd() const;  // the caller owns it
  void import_peers(const std::vector<int>& fds);

  const int rank;

 private:
  void map(int of_rank, void* handle);
  void zero() const;
  void give_back();

  const int ordinal_;
  void* reservation_ = nullptr;
  std::vector<void*> handles_;  // by rank; null where nothing is mapped
};

}  // namespace mori::rocm
