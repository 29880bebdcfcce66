// Memory that somebody else has allocated and mapped (torch, in pieces of some MiB), as a window of all ranks.
//
//   1. find the pieces that hold the range, and retain their handles                                (Pieces)
//   2. export each as a descriptor, which the ranks hand to each other                              (export_fds)
//   3. reserve world_size strides and map everybody's pieces, my own included, one after the other  (ImportedWindow)
// The range begins somewhere inside of its first piece, and not on every rank at the same place (`lead`): the pieces of a
// rank are moved up so that all ranges begin at base + rank * stride. Mappings are as coarse as the granularity, and so
// leads have to be equal modulo that. My own memory is mapped a second time: its owner's address stays as good as it was.
#pragma once
#include <vector>

#include "host/memory.h"

namespace mori::rocm {

class Pieces {
 public:
  // Error "not_importable" (why) for memory that was not mapped by hipMemMap, or that another device owns.
  Pieces(int ordinal, uint64_t address, uint64_t nbytes);
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  std::vector<int> export_fds() const;  // the caller owns them
  const std::vector<void*>& handles() const { return handles_; }

  const uint64_t nbytes;
  uint64_t lead = 0;            // bytes of the first piece in front of the range
  std::vector<uint64_t> sizes;  // of the pieces

 private:
  std::vector<void*> handles_;
};

struct PeerPieces {  // of one rank
  uint64_t lead = 0;
  std::vector<uint64_t> sizes;
  std::vector<int> fds;  // not looked at for this rank itself
};

class ImportedWindow : public Mapping {
 public:
  ImportedWindow(int ordinal, int rank, const Pieces& mine, const std::vector<PeerPieces>& ranks);
  ~ImportedWindow() override;

  const int rank;

 private:
  struct Mapped {
    void *address, *handle;
    uint64_t nbytes;
    bool imported;  // the handle is ours to release
  };
  void map(uint64_t address, void* handle, uint64_t nbytes, bool imported);
  void give_back();

  const int ordinal_;
  void* reservation_ = nullptr;
  uint64_t reserved_bytes_ = 0;
  std::vector<Mapped> mapped_;
};

}  // namespace mori::rocm
