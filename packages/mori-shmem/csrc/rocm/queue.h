// A copy queue on hardware, written by the host. One thread at a time writes; the ring is that of sdma/ring.cpp.
//
// Nothing here waits for the GPU, except submit for room in the ring. Whoever wants to know whether the queue has come to a
// point asks for a mark (a FENCE that counts up in host memory, behind all that was submitted) and looks at it later. The
// read pointer is no answer: it moves when a packet was taken, not when its bytes have landed.
//
// A stream and a queue meet in two words. `go`: the stream writes a ticket there, and a POLL in front of a submission waits
// for it, so that the copies come after what the stream held. `joined`: the queue adds 1, and the stream waits for it.
//
// A queue for kernels is probed by the host, once, and then belongs to the kernels (device/queue_words.py).
#pragma once
#include <memory>

#include "host/program.h"
#include "rocm/sdma.h"

namespace mori::rocm {

class Queue {
 public:
  Queue(std::shared_ptr<const Device> device, Way way, uint32_t engine, uint64_t ring_bytes, bool for_kernels);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // A copy to `scratch` (64 bytes, anywhere) and back. Throws "inert_queue" when it does not come back in time or not whole.
  void probe(uint64_t scratch, int64_t timeout_ns);

  // Throws "timeout" (ring_space) when the engine makes no room. ticket 0: at once; else once `go` has reached it.
  void submit(const Packets& packets, uint64_t ticket, int64_t timeout_ns);
  uint64_t mark(int64_t timeout_ns);
  bool reached(uint64_t mark) const;
  uint64_t fetch(uint64_t address, int64_t timeout_ns);  // copy a word to `fetched`; returns a mark
  uint64_t join(int64_t timeout_ns);  // what `joined` will be when all that was submitted is done

  uint64_t next_ticket() { return ++ticket_; }
  uint64_t go() const { return words_.address() + 8 * kGo; }
  uint64_t joined() const { return joined_.address(); }
  uint64_t fetched() const { return *words_.word(kFetched); }
  uint64_t submitted_bytes() const { return committed_; }
  uint64_t completed_bytes() const { return __atomic_load_n(hardware_->read_pointer, __ATOMIC_ACQUIRE); }
  const HardwareQueue& hardware() const { return *hardware_; }

  const uint32_t engine;

 private:
  enum { kDone = 0, kGo = 8, kFetched = 16, kPattern = 24, kLanding = 32, kNumWords = 40 };  // 64 bytes apart
  void add_to_ring(const uint32_t* dwords, uint64_t num_dwords, int64_t deadline_ns);
  Packets mark_packets();
  void wait_for_probe(uint64_t mark, int64_t deadline_ns);

  const std::shared_ptr<const Device> device_;
  const bool for_kernels_;
  Words words_;   // what the engine writes and the host reads; outlives the queue
  Words joined_;
  std::unique_ptr<HardwareQueue> hardware_;
  mori_sdma_ring ring_{};
  uint64_t reserved_ = 0, committed_ = 0;
  uint64_t marks_ = 0, joins_ = 0, ticket_ = 0;
};

}  // namespace mori::rocm
