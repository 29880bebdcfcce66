// What the queues, engines and waits of one communicator share in this process.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "host/clock.h"
#include "host/control.h"
#include "host/forks.h"
#include "host/liveness.h"
#include "host/memory.h"

namespace mori {

class Queue;

struct Settings {
  int rank = 0;
  int world_size = 1;
  int64_t timeout_ns = 30'000'000'000;
  int num_engines = 1;
  int queues_per_peer = 8;
  int max_queues = 64;
  uint64_t ring_bytes = 256 << 10;
  int64_t spin_ns = -1;  // how long a wait spins before it sleeps; -1: by ranks and cores
  int64_t inline_bytes = -1;  // what a submitter copies itself; -1: by ranks and cores
};

// How much a thread that serves a queue takes on: the first packet may move `first` bytes, all together `total`.
struct Budget {
  uint64_t first;
  uint64_t total;
};

class Node {
 public:
  Node(const Settings& settings, const std::vector<int>& control_fds, const std::vector<int>& pidfds);

  ControlPage& page(int rank) { return control_.of(rank); }
  ControlPage& own() { return control_.of(settings.rank); }
  void wake_all_ranks();
  // One engine, if one sleeps, looks at the queues.
  void call_engine() { own().engines.notify(1); }

  void add_queue(Queue* queue);
  int num_queues() const { return num_queues_.load(std::memory_order_acquire); }
  Queue& queue(int i) const { return *queues_[static_cast<size_t>(i)].load(std::memory_order_relaxed); }
  // Serve every queue once, starting with number `from`; what came of it, over all of them.
  struct Served {
    bool progress = false;  // something was executed
    bool pending = false;  // something is left: at a POLL, over budget, or in another thread's hands
    bool reserved = false;  // something is left for its submitter, but only for kHandOverNs
  };
  Served serve(Budget budget, bool is_engine, int from = 0);
  Served serve_small() { return serve({settings.inline_bytes_used, settings.inline_bytes_used}, false); }

  struct Resolved : Settings {
    explicit Resolved(const Settings& given);
    uint64_t inline_bytes_used;
  };
  const Resolved settings;
  const ForkGuard fork;
  std::atomic<int64_t> timeout_ns;
  std::atomic<bool> closing{false};
  std::atomic<int> users{0};
  Liveness liveness;
  AddressSpace space;

 private:
  ControlPages control_;
  std::unique_ptr<std::atomic<Queue*>[]> queues_;
  std::atomic<int> num_queues_{0};
};

// Held by every call from outside: close() waits until nobody is inside any more.
class Use {
 public:
  explicit Use(Node& node) : node_(node) {
    node.fork.check();
    node.users.fetch_add(1);
    if (node.closing.load()) {
      node.users.fetch_sub(1);
      throw Error("closed", {{"what", std::string("communicator")}});
    }
  }
  ~Use() { node_.users.fetch_sub(1); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Node& node_;
};

}  // namespace mori
