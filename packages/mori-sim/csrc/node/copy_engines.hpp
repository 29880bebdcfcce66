// The copy engines of this process's devices: user-mode queues, and the one thread that serves them.
//
// A queue is a ring of packets plus three words: doorbell (written last by the producer, polled here), write pointer
// (must have got as far by then) and read pointer (moved here). On hardware a queue that is mapped in anew looks at its write
// pointer, without a doorbell; so in strict mode the packets have to be there when the write pointer is. The thread goes round its queues and takes one packet of each.
//
// Two packets of one queue may overlap on hardware unless a FENCE or ATOMIC stands between them. With lazy copies the
// engine makes use of that: COPY packets are noted, the read pointer moves on, and the bytes land later and in any
// order; what must come after them (FENCE, ATOMIC, POLL, TRAP, TIMESTAMP) first lets all of them land.
#pragma once
#include <mori_sdma.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace mori_sim {

class Node;

struct CopyQueue {
  uint64_t id = 0;
  int device = 0, engine = 0;
  std::string name;
  std::string ahead;                      // the same queue where it looks at the write pointer without a doorbell
  mori_sdma_ring ring{};
  uint64_t words = 0;                     // the page with read and write pointer
  int64_t* error = nullptr;               // the queue's error word
  std::vector<mori_sdma_packet> landing;  // copies that the read pointer has passed
  uint64_t seen_doorbell = 0;
  uint64_t not_before_ns = 0;             // the random delay of the packet at the head
  bool delay_drawn = false;
};

class QueueLimit : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class CopyEngines {
 public:
  explicit CopyEngines(Node& node) : node_(node) {}

  // engine < 0: any that has room, of the xGMI engines or the ordinary ones. Throws QueueLimit when none has, and
  // std::invalid_argument for a ring or engine that cannot be.
  CopyQueue* create(int device, int engine, bool xgmi, uint64_t ring, uint64_t nbytes);
  void destroy(CopyQueue* queue);  // what is published and not yet done is dropped
  void stop();                     // no packet is touched after this returns

  // Engines that the driver recommends for copies from one device to another, one bit for each engine.
  static uint32_t recommended_engines(int num_devices, int from, int to);

 private:
  void serve_all();
  bool serve(CopyQueue& queue);
  bool look_at_pointers(CopyQueue& queue);
  uint64_t* free_doorbell(int device, uint64_t id);
  bool drawn_delay_has_passed(CopyQueue& queue);
  void land(CopyQueue& queue, size_t leave);
  bool run(CopyQueue& queue, const mori_sdma_packet& packet, const uint32_t* dwords, uint64_t available);
  void fault(CopyQueue& queue, const mori_sdma_fault& fault);
  uint64_t random();

  Node& node_;
  std::mutex mutex_;  // the list of queues; also held while one is served, so that destroy() cannot interrupt a packet
  std::condition_variable wake_;
  std::vector<std::unique_ptr<CopyQueue>> queues_;
  std::thread thread_;
  bool stopping_ = false;
  uint64_t next_id_ = 1, random_state_ = 1;
  std::vector<uint64_t> doorbell_pages_ = std::vector<uint64_t>(8, 0);
};

}  // namespace mori_sim
