// The one loop in which threads wait.
//
//   1. Spin for a moment: look at the condition, run small packets of this rank's own queues, offer the core to others. Two
//      ranks on two cores meet here in a microsecond, two that share one core in four (57 us without the offer: both spin).
//   2. Sleep on an Event in slices. Before each slice: serve own queues, look again, look whether the communicator is
//      closing, whether a rank that matters has left or died, and at the deadline. Slices start at 1 ms and double up to
//      what the condition allows: 10 ms if plain stores, which notify nobody, may make it true, else 50 ms.
// The condition is looked at once more before any error is raised, so a value that arrived in time always wins.
#pragma once
#include <functional>

#include "host/node.h"

namespace mori {

enum class Concern { kNone, kDeath, kDeathOrLeaving };

class Condition {
 public:
  virtual ~Condition() = default;
  virtual bool ready() = 0;  // once true, it stays true
  virtual Concern concern(int rank) = 0;  // what of this rank ends the wait
  virtual void serve(Node& node) { node.serve_small(); }
  virtual Facts facts() = 0;  // for the error: what was waited for, seen, wanted
};

constexpr int64_t kNotified = 50'000'000;  // longest slice where every change notifies
constexpr int64_t kPlainStores = 10'000'000;  // longest slice where plain stores count

// Returns when the condition holds; else Error timeout, peer_died, peer_left or closed.
void wait_until(Node& node, Event& event, Condition& condition, int64_t timeout_ns, int64_t longest_slice_ns);

// Called between slices without any lock held; may throw. Python's signals come in here.
extern std::function<void()> between_slices;

}  // namespace mori
