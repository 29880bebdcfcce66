#include "host/node.h"

#include <algorithm>
#include <thread>

#include "host/queue.h"

namespace mori {

namespace {

// Waking an engine costs the submitter 9 to 30 us, a copy of 1 MiB out of the cache 23 us (2-core virtual machine, EPYC); the
// copy itself also runs four times slower on a core that has not got the data. Where the ranks leave no core free for
// engines there is nothing to overlap with, and submitters do more themselves.
constexpr uint64_t kInlineBytes = 1 << 20;
constexpr uint64_t kInlineBytesNoFreeCore = 4 << 20;
constexpr int64_t kSpinNs = 50'000;
constexpr int64_t kCrowdedSpinNs = 5'000;  // more ranks than cores: 8 on 2 cores were fastest with 2 to 5 us

int num_cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

void check(const Settings& s, size_t num_pages, size_t num_pidfds) {
  if (s.world_size < 1) throw bad_value("world_size", int64_t{s.world_size}, "1 or more");
  if (s.rank < 0 || s.rank >= s.world_size) throw bad_value("rank", int64_t{s.rank}, "0 .. world_size - 1");
  if (num_pages != static_cast<size_t>(s.world_size)) throw bad_value("control_fds", uint64_t{num_pages}, "world_size of them");
  if (num_pidfds != static_cast<size_t>(s.world_size)) throw bad_value("pidfds", uint64_t{num_pidfds}, "world_size of them");
  if (s.num_engines < 1 || s.num_engines > 64) throw bad_value("num_engines", int64_t{s.num_engines}, "1 .. 64");
  if (s.queues_per_peer < 1) throw bad_value("queues_per_peer", int64_t{s.queues_per_peer}, "1 or more");
  if (s.max_queues < 1 || s.max_queues > 4096) throw bad_value("max_queues", int64_t{s.max_queues}, "1 .. 4096");
  if (s.ring_bytes < kMinRingBytes || s.ring_bytes > 1u << 30 || (s.ring_bytes & (s.ring_bytes - 1)))
    throw bad_value("ring_bytes", s.ring_bytes, "a power of two, 256 .. 2**30");
}

const Settings& checked(const Settings& settings, size_t num_pages, size_t num_pidfds) {
  check(settings, num_pages, num_pidfds);
  return settings;
}

}  // namespace

Node::Resolved::Resolved(const Settings& given)
    : Settings(given),
      inline_bytes_used(given.inline_bytes >= 0                ? static_cast<uint64_t>(given.inline_bytes)
                        : given.world_size >= num_cores() ? kInlineBytesNoFreeCore
                                                          : kInlineBytes) {
  if (spin_ns < 0) spin_ns = given.world_size > num_cores() ? kCrowdedSpinNs : kSpinNs;
}

Node::Node(const Settings& given, const std::vector<int>& control_fds, const std::vector<int>& pidfds)
    : settings(checked(given, control_fds.size(), pidfds.size())),
      timeout_ns(given.timeout_ns),
      liveness(pidfds),
      control_(control_fds),
      queues_(new std::atomic<Queue*>[static_cast<size_t>(given.max_queues)]()) {
  own().state.store(kAlive);
}

void Node::wake_all_ranks() {
  for (int rank = 0; rank < settings.world_size; ++rank) page(rank).waiters.notify();
}

void Node::add_queue(Queue* queue) {
  const int number = num_queues_.load(std::memory_order_relaxed);
  queues_[static_cast<size_t>(number)].store(queue, std::memory_order_relaxed);
  num_queues_.store(number + 1, std::memory_order_release);
}

Node::Served Node::serve(Budget budget, bool is_engine, int from) {
  Served all;
  const int count = num_queues();
  for (int i = 0; i < count; ++i) {
    Queue& queue = this->queue((from + i) % count);
    if (queue.idle()) continue;
    const Served one = queue.serve(budget, is_engine);
    all.progress |= one.progress;
    all.pending |= one.pending;
    all.reserved |= one.reserved;
  }
  return all;
}

}  // namespace mori
