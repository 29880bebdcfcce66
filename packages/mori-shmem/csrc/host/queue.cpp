#include "host/queue.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "host/waits.h"

namespace mori {

namespace {

constexpr Budget kEverything{UINT64_MAX, UINT64_MAX};
constexpr uint64_t kSliceBytes = 32 << 20;  // of a large copy; between slices the thread looks whether to stop

uint64_t cost_of(const mori_sdma_packet& packet) {
  return packet.op == MORI_SDMA_COPY || packet.op == MORI_SDMA_FILL ? packet.nbytes : 0;
}

}  // namespace

// The windows, as a packet sees them. Signals wake the rank in whose part they were written.
class Queue::Memory {
 public:
  explicit Memory(Node& node) : view(node.space), node_(node) {}

  View view;
  const mori_sdma_memory callbacks{this, &resolve, &written, nullptr, &trap};

 private:
  static Memory& of(void* user) { return *static_cast<Memory*>(user); }
  static void* resolve(void* user, uint64_t address, uint64_t nbytes, uint32_t) {
    const Place place = of(user).view.find(address, nbytes);
    of(user).owner_ = place.rank;  // the last one resolved is the one written
    return place.pointer;
  }
  static void written(void* user, uint64_t, uint64_t, uint32_t op) {
    if (op == MORI_SDMA_COPY || op == MORI_SDMA_FILL) return;  // data; its signal follows
    // A WRITE is plain stores: make them visible before the look at the sleepers.
    if (op == MORI_SDMA_WRITE) of(user).order_.exchange(1);
    of(user).node_.page(of(user).owner_).signal_written();
  }
  static void trap(void* user, uint32_t) { of(user).node_.own().waiters.notify(); }

  Node& node_;
  int owner_ = 0;
  std::atomic<int> order_{0};
};

// ---- Submitting ----------------------------------------------------------------------------------------------------

Queue::Queue(Node& node_, int peer_, int index_)
    : node(node_),
      peer(peer_),
      index(index_),
      dwords_(static_cast<uint32_t*>(std::aligned_alloc(4096, std::max<uint64_t>(4096, node_.settings.ring_bytes)))) {
  if (!dwords_) throw system_error("aligned_alloc", ENOMEM);
  ring_ = {dwords_.get(),    &words_.rptr,      &words_.wptr, &words_.doorbell,
           &words_.reserved, &words_.committed, 0,            node.settings.ring_bytes};
}

void Queue::submit(const Packets& packets) {
  const Use use(node);
  const uint64_t group_dwords = ring_.nbytes / 4 / 4;  // a quarter of the ring: the next group is written meanwhile
  for (size_t first = 0; first < packets.ends.size();) {
    const uint64_t begin = first == 0 ? 0 : packets.ends[first - 1];
    size_t last = first;
    while (last + 1 < packets.ends.size() && packets.ends[last + 1] - begin <= group_dwords) ++last;
    publish(packets.dwords.data() + begin, packets.ends[last] - begin);
    first = last + 1;
  }
}

class RoomInRing : public Condition {
 public:
  RoomInRing(Queue& queue, uint64_t nbytes) : queue_(queue), nbytes_(nbytes) {}

  bool ready() override {
    if (reserved() || queue_.stopped()) return true;
    const int result = mori_sdma_ring_reserve(&queue_.ring_, nbytes_, &begin, &start, &end);
    if (result < 0) throw bad_value("packet bytes", nbytes_, "a multiple of 4, at most half the ring");
    return result > 0;
  }
  Concern concern(int rank) override { return queue_.concern(rank); }
  void serve(Node&) override { queue_.serve(kEverything, false); }
  Facts facts() override {
    return {{"what", std::string("ring_space")},
            {"peer", int64_t{queue_.peer}},
            {"index", int64_t{queue_.index}},
            {"seen", queue_.completed_bytes()},
            {"wanted", queue_.submitted_bytes() + nbytes_ - queue_.ring_.nbytes},
            {"dwords", queue_.head_dwords()}};
  }

  bool reserved() const { return end != 0; }

  uint64_t begin = 0, start = 0, end = 0;

 private:
  Queue& queue_;
  const uint64_t nbytes_;
};

void Queue::publish(const uint32_t* dwords, uint64_t num_dwords) {
  check();
  RoomInRing room(*this, 4 * num_dwords);
  if (!room.ready()) wait_until(node, node.own().waiters, room, node.timeout_ns.load(), kNotified);
  if (!room.reserved()) return check();  // stopped; what is reserved must be committed, or later issuers would wait for ever
  std::memcpy(mori_sdma_ring_at(&ring_, room.start), dwords, 4 * num_dwords);
  mori_sdma_ring_commit(&ring_, room.begin, room.end);
  serve({node.settings.inline_bytes_used, node.settings.inline_bytes_used}, false);
}

// ---- Serving -------------------------------------------------------------------------------------------------------

// A large head is for engines, but not at once, and for whoever has no limit.
bool Queue::left_to_others(Budget budget, bool is_engine, Node::Served* served) const {
  if (!large_.load(std::memory_order_relaxed)) return false;
  if (!is_engine) return budget.first != UINT64_MAX;
  served->reserved = monotonic_ns() - handed_over_ns_.load(std::memory_order_relaxed) < kHandOverNs;
  return served->reserved;
}

Node::Served Queue::serve(Budget budget, bool is_engine) {
  Node::Served served;
  while (!idle()) {
    if (left_to_others(budget, is_engine, &served) || !take()) {
      served.pending = true;
      return served;
    }
    bool progress = false;
    const Stop stop = drain(budget, &progress);
    blocked_.store(stop == Stop::kBlocked, std::memory_order_relaxed);
    if (stop == Stop::kOverBudget) handed_over_ns_.store(monotonic_ns(), std::memory_order_relaxed);
    large_.store(stop == Stop::kOverBudget && !is_engine, std::memory_order_relaxed);
    let_go();
    served.progress |= progress;
    if (progress) node.own().waiters.notify();
    if (stop == Stop::kEmpty) continue;  // a submitter may have found the queue taken just before let_go
    served.pending = stop == Stop::kBlocked || stop == Stop::kOverBudget;
    const bool watched = stop == Stop::kBlocked && node.own().pollers.load() != 0;
    if (served.pending && !is_engine && !watched) node.call_engine();
    return served;
  }
  return served;
}

Queue::Stop Queue::drain(Budget budget, bool* progress) {
  Memory memory(node);
  mori_sdma_fault fault{};
  for (uint64_t allowed = budget.first;;) {
    if (node.closing.load(std::memory_order_relaxed)) return Stop::kClosing;
    const uint32_t* dwords = nullptr;
    uint64_t available = 0;
    mori_sdma_packet packet;
    mori_sdma_reason reason = mori_sdma_ring_next(&ring_, &dwords, &available);
    if (reason == MORI_SDMA_OK && available == 0) return Stop::kEmpty;
    if (reason == MORI_SDMA_OK) reason = mori_sdma_decode(dwords, available, 0, &packet);
    if (reason != MORI_SDMA_OK) {
      fault.reason = reason;
      stop(fault, dwords, available);
      return Stop::kFault;
    }
    const uint64_t cost = cost_of(packet);
    if (cost > allowed) return Stop::kOverBudget;
    budget.total -= std::min(cost, budget.total);
    allowed = budget.total;
    memory.view.refresh();
    const int result = execute(packet, memory, fault);
    if (result == MORI_SDMA_BLOCKED) return Stop::kBlocked;
    if (result == MORI_SDMA_FAULT) {
      stop(fault, dwords, available);
      return Stop::kFault;
    }
    mori_sdma_ring_retire(&ring_, packet.num_dwords);
    *progress = true;
  }
}

int Queue::execute(const mori_sdma_packet& packet, Memory& memory, mori_sdma_fault& fault) {
  if (hooks_.active()) return hooks_.execute(packet, memory.callbacks, fault, node.closing);
  if (packet.op == MORI_SDMA_COPY && packet.nbytes > kSliceBytes) return execute_in_slices(packet, memory, fault);
  return mori_sdma_execute(&packet, &memory.callbacks, &fault);
}

// A communicator that closes must not wait for a gigabyte: the copy is then left as if it had not begun.
int Queue::execute_in_slices(const mori_sdma_packet& packet, Memory& memory, mori_sdma_fault& fault) {
  const uint64_t apart = packet.dst > packet.src ? packet.dst - packet.src : packet.src - packet.dst;
  const bool whole_is_allowed =
      memory.view.find(packet.src, packet.nbytes).pointer && memory.view.find(packet.dst, packet.nbytes).pointer;
  if (!whole_is_allowed || apart < packet.nbytes) return mori_sdma_execute(&packet, &memory.callbacks, &fault);
  mori_sdma_packet slice = packet;
  for (uint64_t done = 0; done < packet.nbytes; done += kSliceBytes) {
    if (node.closing.load(std::memory_order_relaxed)) return MORI_SDMA_BLOCKED;
    slice.src = packet.src + done;
    slice.dst = packet.dst + done;
    slice.nbytes = std::min(kSliceBytes, packet.nbytes - done);
    mori_sdma_execute(&slice, &memory.callbacks, &fault);
  }
  return MORI_SDMA_DONE;
}

// ---- Ends ----------------------------------------------------------------------------------------------------------

void Queue::stop(const mori_sdma_fault& fault, const uint32_t* dwords, uint64_t available) {
  fault_ = fault;
  if (dwords) mori_sdma_fault_dwords(&fault_, dwords, available);
  stopped_.store(true);
  node.own().waiters.notify();
}

void Queue::check() {
  if (!stopped()) return;
  throw Error("queue_fault", {{"peer", int64_t{peer}},
                              {"index", int64_t{index}},
                              {"reason", std::string(mori_sdma_reason_name(fault_.reason))},
                              {"address", fault_.address},
                              {"nbytes", fault_.nbytes},
                              {"offset_bytes", completed_bytes()},
                              {"dwords", std::vector<uint32_t>(fault_.dwords, fault_.dwords + fault_.num_dwords)}});
}

Concern Queue::concern(int rank) const {
  if (!blocked_.load(std::memory_order_relaxed)) return Concern::kNone;
  return rank == peer ? Concern::kDeathOrLeaving : Concern::kDeath;
}

std::vector<uint32_t> Queue::head_dwords() {
  if (!take()) return {};
  const uint32_t* dwords = nullptr;
  uint64_t available = 0;
  mori_sdma_fault head{};
  if (mori_sdma_ring_next(&ring_, &dwords, &available) == MORI_SDMA_OK && available)
    mori_sdma_fault_dwords(&head, dwords, available);
  let_go();
  return std::vector<uint32_t>(head.dwords, head.dwords + head.num_dwords);
}

namespace {

class Completed : public Condition {
 public:
  Completed(Queue& queue, uint64_t target_bytes) : queue_(queue), target_bytes_(target_bytes) {}

  bool ready() override { return queue_.completed_bytes() >= target_bytes_ || queue_.stopped(); }
  Concern concern(int rank) override { return queue_.concern(rank); }
  void serve(Node& node) override {
    queue_.serve(kEverything, false);
    node.serve_small();
  }
  Facts facts() override {
    return {{"what", std::string("quiet")},
            {"peer", int64_t{queue_.peer}},
            {"index", int64_t{queue_.index}},
            {"seen", queue_.completed_bytes()},
            {"wanted", target_bytes_},
            {"dwords", queue_.head_dwords()}};
  }

 private:
  Queue& queue_;
  const uint64_t target_bytes_;
};

}  // namespace

void Queue::quiet(int64_t timeout_ns) {
  const Use use(node);
  check();
  Completed completed(*this, submitted_bytes());
  wait_until(node, node.own().waiters, completed, timeout_ns, kNotified);
  check();
}

void Queue::set_faults(const FaultHooks::Plan& plan) {
  const Use use(node);
  while (!take()) cpu_relax();
  hooks_.set(plan);
  let_go();
  serve({node.settings.inline_bytes_used, node.settings.inline_bytes_used}, false);
}

}  // namespace mori
