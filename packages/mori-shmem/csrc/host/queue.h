// A copy queue of the host target: a ring of SDMA packets, and whichever thread has the time to execute them.
//
// Submitting is: reserve space in the ring, write the packets, publish them in order (sdma/ring.cpp), then serve. A queue is
// served by one thread at a time, the one that takes `serving_` without waiting for it:
//   the submitter   right away, as long as packets are small (put + signal of a few bytes needs no other thread);
//   a waiter        small packets of all its rank's queues before it sleeps; everything of the queue it waits for in quiet;
//   an engine       the rest: large copies, and queues that stand at a POLL. A large copy that was just handed over is left
//                   alone for kHandOverNs: a submitter that goes on to wait for it does it faster, on the core that has
//                   the data in its cache, and one that goes on to compute loses little.
// No packet is forgotten: who lets go of a queue looks at the doorbell once more, so a submitter that found the queue taken
// may leave; who stops at a packet too large for it calls an engine; and an engine never sleeps without a limit while a
// queue of its rank holds packets.
//
// The first packet that is malformed, or reaches outside the registered windows, stops the queue for good. It is kept with
// its dwords; every later call on the queue throws it.
#pragma once
#include <atomic>
#include <memory>

#include "host/faults.h"
#include "host/node.h"
#include "host/program.h"
#include "host/waits.h"

namespace mori {

constexpr uint64_t kMinRingBytes = 256;
constexpr int64_t kHandOverNs = 50'000;

class Queue {
 public:
  Queue(Node& node, int peer, int index);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void submit(const Packets& packets);
  void quiet(int64_t timeout_ns);
  void check();  // throws queue_fault if stopped
  void set_faults(const FaultHooks::Plan& plan);

  Node::Served serve(Budget budget, bool is_engine);
  bool idle() const { return stopped() || completed_bytes() == submitted_bytes(); }
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }
  uint64_t submitted_bytes() const { return __atomic_load_n(&words_.committed, __ATOMIC_ACQUIRE); }
  uint64_t completed_bytes() const { return __atomic_load_n(&words_.rptr, __ATOMIC_SEQ_CST); }
  std::vector<uint32_t> head_dwords();  // of the packet it stands at; empty if another thread is at work
  // A queue that stands at a POLL may wait for a rank that is gone; one that copies will finish by itself.
  Concern concern(int rank) const;

  Node& node;
  const int peer;
  const int index;

 private:
  enum class Stop { kEmpty, kBlocked, kOverBudget, kFault, kClosing };
  class Memory;

  void publish(const uint32_t* dwords, uint64_t num_dwords);
  Stop drain(Budget budget, bool* progress);
  int execute(const mori_sdma_packet& packet, Memory& memory, mori_sdma_fault& fault);
  int execute_in_slices(const mori_sdma_packet& packet, Memory& memory, mori_sdma_fault& fault);
  void stop(const mori_sdma_fault& fault, const uint32_t* dwords, uint64_t available);
  bool left_to_others(Budget budget, bool is_engine, Node::Served* served) const;
  bool take() { return !serving_.exchange(true, std::memory_order_acq_rel); }
  void let_go() { serving_.exchange(false, std::memory_order_acq_rel); }

  struct Words {
    alignas(64) uint64_t rptr = 0;
    alignas(64) uint64_t wptr = 0;
    uint64_t doorbell = 0;
    alignas(64) uint64_t reserved = 0;
    uint64_t committed = 0;
  };
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  Words words_;
  std::unique_ptr<uint32_t, Free> dwords_;
  mori_sdma_ring ring_{};
  alignas(64) std::atomic<bool> serving_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> blocked_{false};  // stands at a POLL
  std::atomic<bool> large_{false};  // its head was too large for a submitter or waiter, and an engine was called
  std::atomic<int64_t> handed_over_ns_{0};  // when that was
  mori_sdma_fault fault_{};  // written once, before stopped_
  FaultHooks hooks_;

  friend class RoomInRing;
};

}  // namespace mori
