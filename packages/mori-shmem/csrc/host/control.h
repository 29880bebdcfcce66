// One page of shared memory per rank, through which ranks wake each other, meet, and learn who has left.
//
// waiters   threads of this rank that wait for a signal, a barrier or a queue. Whoever writes a signal into this rank's
//           windows notifies it; so do the rank's own queues when they make progress.
// engines   this rank's engine threads. A submitter notifies one of them; whoever writes a signal here wakes them only if
//           `pollers` is not 0, that is if one of them sleeps on a queue that stands at a POLL.
// state     0 until the rank has mapped its page, then kAlive, then kLeft for good. A rank that died keeps kAlive.
// epoch     how many barriers the rank has entered. A barrier is over for a rank when all epochs have reached its own.
// arrived   on rank 0's page only: entries of all ranks so far. The last of a round sees a multiple of world_size, and
//           wakes everybody; it decides nothing else, so a rank that dies between the two stores harms no one.
// Nothing is ever reset.
#pragma once
#include "host/event.h"
#include "host/memory.h"

namespace mori {

enum RankState : uint32_t { kStarting = 0, kAlive = 1, kLeft = 2 };

struct ControlPage {
  alignas(64) Event waiters;
  Event engines;
  std::atomic<uint32_t> pollers;
  alignas(64) std::atomic<uint32_t> state;
  alignas(64) std::atomic<uint64_t> epoch;
  alignas(64) std::atomic<uint64_t> arrived;

  void signal_written() {
    waiters.notify();
    if (pollers.load() != 0) engines.wake();
  }
};

constexpr uint64_t kControlBytes = 4096;
static_assert(sizeof(ControlPage) <= kControlBytes, "the page is what ranks exchange");

class ControlPages {
 public:
  explicit ControlPages(const std::vector<int>& fds) : mapping_(fds, kControlBytes) {}
  ControlPage& of(int rank) const {
    return *reinterpret_cast<ControlPage*>(mapping_.base + static_cast<uint64_t>(rank) * mapping_.stride);
  }

 private:
  FileMapping mapping_;
};

}  // namespace mori
