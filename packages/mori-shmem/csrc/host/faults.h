// Test hooks that make a queue a bad transport: copies that never land, land late, or land after their signal. They exist
// so that tests can show that such a transport is noticed. Used only by the thread that holds the queue.
#pragma once
#include <mori_sdma.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace mori {

class FaultHooks {
 public:
  struct Plan {
    uint64_t drop_every = 0;  // leave out every n-th copy; 0: none
    int64_t delay_us = 0;  // before each copy
    bool reorder = false;  // copies wait until the next signal has been written
  };

  bool active() const { return active_; }
  void set(const Plan& plan);
  // As mori_sdma_execute. Copies that were held back are executed here too, after a signal.
  int execute(const mori_sdma_packet& packet, const mori_sdma_memory& memory, mori_sdma_fault& fault,
              const std::atomic<bool>& closing);

 private:
  int execute_held(const mori_sdma_memory& memory, mori_sdma_fault& fault);

  Plan plan_;
  bool active_ = false;
  uint64_t num_copies_ = 0;
  std::vector<mori_sdma_packet> held_;
};

}  // namespace mori
