// Engine threads: a few threads that serve all queues of a rank, asleep when there is nothing to do.
//
// An engine goes round the queues, at most kTurnBytes (or one packet) of each at a time, so that a large copy on one queue
// does not keep the others waiting. When a round brings nothing it announces itself as asleep and as a poller, goes round
// once more, and sleeps: for good if all queues were empty (the next submitter that needs it calls), in slices of 1 to 10 ms
// while packets are left, because the word that a POLL looks at may be changed by a plain store that notifies nobody.
#pragma once
#include <memory>
#include <thread>
#include <vector>

#include "host/node.h"

namespace mori {

class Engines {
 public:
  explicit Engines(Node& node);
  ~Engines() { join(); }
  Engines(const Engines&) = delete;
  Engines& operator=(const Engines&) = delete;

  void join();  // node.closing must be set; in a forked child the threads, which are not there, are forgotten

 private:
  void run(int number);
  bool sleep(int number, int64_t* slice_ns);

  Node& node_;
  std::unique_ptr<std::vector<std::thread>> threads_;
};

}  // namespace mori
