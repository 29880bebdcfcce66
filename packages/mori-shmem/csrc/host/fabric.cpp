#include "host/fabric.h"

#include <algorithm>

#include "host/waits.h"

namespace mori {

namespace {

constexpr int64_t kPatienceOfClose = 2'000'000'000;

uint64_t load(const void* word) { return __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_SEQ_CST); }

bool compare(uint64_t seen, uint64_t wanted, uint32_t comparison) {
  switch (comparison) {
    case MORI_SDMA_LESS: return seen < wanted;
    case MORI_SDMA_LESS_EQUAL: return seen <= wanted;
    case MORI_SDMA_EQUAL: return seen == wanted;
    case MORI_SDMA_NOT_EQUAL: return seen != wanted;
    case MORI_SDMA_GREATER_EQUAL: return seen >= wanted;
    default: return seen > wanted;
  }
}

const char* comparison_name(uint32_t comparison) {
  static const char* const names[] = {"always", "<", "<=", "==", "!=", ">=", ">"};
  return names[comparison];
}

class WordCompares : public Condition {
 public:
  WordCompares(const void* word, uint64_t wanted, uint32_t comparison, int peer)
      : word_(word), wanted_(wanted), comparison_(comparison), peer_(peer) {}

  bool ready() override { return compare(seen = load(word_), wanted_, comparison_); }
  Concern concern(int rank) override {
    if (peer_ < 0) return Concern::kDeath;
    return rank == peer_ ? Concern::kDeathOrLeaving : Concern::kNone;
  }
  Facts facts() override {
    return {{"what", std::string("signal")},
            {"address", reinterpret_cast<uint64_t>(word_)},
            {"seen", seen},
            {"wanted", wanted_},
            {"cmp", std::string(comparison_name(comparison_))},
            {"peer", int64_t{peer_}}};
  }

  uint64_t seen = 0;

 private:
  const void* word_;
  const uint64_t wanted_;
  const uint32_t comparison_;
  const int peer_;
};

class AllEntered : public Condition {
 public:
  AllEntered(Node& node, uint64_t epoch) : node_(node), epoch_(epoch) {}

  bool ready() override {
    for (; num_seen_ < node_.settings.world_size; ++num_seen_)
      if (!entered(num_seen_)) return false;
    return true;
  }
  Concern concern(int rank) override { return entered(rank) ? Concern::kNone : Concern::kDeathOrLeaving; }
  Facts facts() override {
    std::vector<int> missing;
    for (int rank = 0; rank < node_.settings.world_size; ++rank)
      if (!entered(rank)) missing.push_back(rank);
    return {{"what", std::string("barrier")}, {"wanted", epoch_}, {"missing", missing}};
  }

 private:
  bool entered(int rank) const { return node_.page(rank).epoch.load() >= epoch_; }

  Node& node_;
  const uint64_t epoch_;
  int num_seen_ = 0;  // epochs only grow: who has been seen need not be looked at again
};

}  // namespace

// ---- Windows -------------------------------------------------------------------------------------------------------

Window::Window(std::shared_ptr<Fabric> fabric, std::shared_ptr<const Mapping> mapping, int rank_)
    : base(mapping->base),
      stride(mapping->stride),
      nbytes(mapping->nbytes),
      rank(rank_),
      world_size(mapping->world_size),
      fabric_(std::move(fabric)),
      mapping_(std::move(mapping)) {}

Window::~Window() { close(); }

void Window::close() {
  const auto mapping = std::atomic_exchange(&mapping_, std::shared_ptr<const Mapping>());
  if (mapping) fabric_->unmap_window(mapping.get());
}

std::shared_ptr<const Mapping> Window::span(int of_rank, uint64_t offset_bytes, uint64_t span_bytes) const {
  auto mapping = std::atomic_load(&mapping_);
  if (!mapping) throw Error("closed", {{"what", std::string("window")}});
  if (of_rank < 0 || of_rank >= world_size) throw bad_value("rank", int64_t{of_rank}, "0 .. world_size - 1");
  if (span_bytes > nbytes || offset_bytes > nbytes - span_bytes)
    throw Error("out_of_range", {{"what", std::string("span")},
                                 {"address", offset_bytes},
                                 {"nbytes", span_bytes},
                                 {"base", uint64_t{0}},
                                 {"stride", stride},
                                 {"size", nbytes}});
  return mapping;
}

void Fabric::unmap_window(const Mapping* mapping) {
  if (!node_.fork.crossed()) node_.space.remove(mapping);  // a lock may have been held at the fork
}

std::shared_ptr<const Mapping> Fabric::map_window(const std::vector<int>& fds, uint64_t nbytes) {
  const Use use(node_);
  if (fds.size() != static_cast<size_t>(node_.settings.world_size))
    throw bad_value("fds", uint64_t{fds.size()}, "world_size of them");
  auto mapping = std::make_shared<const FileMapping>(fds, nbytes);
  node_.space.add(mapping);
  return mapping;
}

// ---- Queues --------------------------------------------------------------------------------------------------------

Fabric::Fabric(const Settings& settings, const std::vector<int>& control_fds, const std::vector<int>& pidfds)
    : node_(settings, control_fds, pidfds), engines_(new Engines(node_)) {}

void Fabric::check_rank(int rank) {
  if (rank < 0 || rank >= node_.settings.world_size) throw bad_value("rank", int64_t{rank}, "0 .. world_size - 1");
}

Queue* Fabric::find_queue(int peer, int index) {
  for (const auto& queue : queues_)
    if (queue->peer == peer && queue->index == index) return queue.get();
  return nullptr;
}

std::vector<Queue*> Fabric::open_queues(int peer, const std::vector<int>& indices) {
  const Use use(node_);
  const Settings& limits = node_.settings;
  for (const int index : indices)
    if (peer < 0 || peer >= limits.world_size || index < 0 || index >= limits.queues_per_peer)
      throw Error("bad_queue", {{"peer", int64_t{peer}},
                                {"index", int64_t{index}},
                                {"world_size", int64_t{limits.world_size}},
                                {"queues_per_peer", int64_t{limits.queues_per_peer}}});
  const std::lock_guard<std::mutex> lock(queues_mutex_);
  std::vector<int> fresh;
  for (const int index : indices)
    if (!find_queue(peer, index) && std::find(fresh.begin(), fresh.end(), index) == fresh.end()) fresh.push_back(index);
  if (queues_.size() + fresh.size() > static_cast<size_t>(limits.max_queues))
    throw Error("queue_limit", {{"requested", uint64_t{fresh.size()}},
                                {"open", uint64_t{queues_.size()}},
                                {"limit", int64_t{limits.max_queues}}});
  std::vector<std::unique_ptr<Queue>> made;
  for (const int index : fresh) made.push_back(std::make_unique<Queue>(node_, peer, index));
  for (auto& queue : made) {
    queues_.push_back(std::move(queue));
    node_.add_queue(queues_.back().get());
  }
  std::vector<Queue*> opened;
  for (const int index : indices) opened.push_back(find_queue(peer, index));
  return opened;
}

bool Fabric::serve() {
  const Use use(node_);
  return node_.serve({UINT64_MAX, UINT64_MAX}, false).progress;
}

// ---- Signals -------------------------------------------------------------------------------------------------------

void Fabric::signal(uint64_t where, uint64_t value, SignalOp op) {
  const Use use(node_);
  const View view(node_.space);
  const Place place = view.require("signal", where, 8, 8);
  auto* const word = reinterpret_cast<uint64_t*>(place.pointer);
  if (op == SignalOp::kAdd)
    __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
  else
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
  node_.page(place.rank).signal_written();
}

void Fabric::signal_all(const std::vector<uint64_t>& where, uint64_t value) {
  for (const uint64_t word : where) signal(word, value, SignalOp::kSet);
}

uint64_t Fabric::read(uint64_t where) {
  const Use use(node_);
  const View view(node_.space);
  return load(view.require("read", where, 8, 8).pointer);
}

uint64_t Fabric::wait(uint64_t where, uint64_t value, uint32_t comparison, int peer, int64_t timeout_ns) {
  const Use use(node_);
  if (peer != -1) check_rank(peer);
  const View view(node_.space);
  const Place place = view.require("wait", where, 8, 8);
  WordCompares condition(place.pointer, value, comparison, peer);
  // Writers notify the rank that owns the word, so that is where to sleep.
  wait_until(node_, node_.page(place.rank).waiters, condition, timeout_ns, kPlainStores);
  return condition.seen;
}

std::vector<uint64_t> Fabric::wait_all(const std::vector<uint64_t>& where, uint64_t value, const std::vector<int>& peers,
                                       int64_t timeout_ns) {
  if (where.size() != peers.size()) throw bad_value("peers", uint64_t{peers.size()}, "one for each word");
  const int64_t begin_ns = monotonic_ns();
  std::vector<uint64_t> seen;
  for (size_t i = 0; i < where.size(); ++i) {
    const int64_t left_ns = timeout_ns == INT64_MAX ? INT64_MAX : std::max<int64_t>(0, timeout_ns - (monotonic_ns() - begin_ns));
    seen.push_back(wait(where[i], value, MORI_SDMA_GREATER_EQUAL, peers[i], left_ns));
  }
  return seen;
}

void Fabric::wake(int rank) {
  const Use use(node_);
  check_rank(rank);
  static std::atomic<int> order{0};
  order.exchange(1);  // the caller's plain stores come before the look at the sleepers
  node_.page(rank).signal_written();
}

void Fabric::barrier(int64_t timeout_ns) {
  const Use use(node_);
  const std::lock_guard<std::mutex> lock(barrier_mutex_);
  ControlPage& own = node_.own();
  if (!in_barrier_) {
    in_barrier_ = true;
    own.epoch.fetch_add(1);
    const uint64_t arrived = node_.page(0).arrived.fetch_add(1) + 1;
    if (arrived % static_cast<uint64_t>(node_.settings.world_size) == 0) node_.wake_all_ranks();
  }
  AllEntered condition(node_, own.epoch.load());
  wait_until(node_, own.waiters, condition, timeout_ns, kNotified);
  in_barrier_ = false;
}

// ---- Ends ----------------------------------------------------------------------------------------------------------

std::vector<std::string> Fabric::peer_states() {
  const Use use(node_);
  node_.liveness.refresh(monotonic_ns(), 0);
  static const char* const names[] = {"starting", "alive", "left"};
  std::vector<std::string> states;
  for (int rank = 0; rank < node_.settings.world_size; ++rank) {
    const uint32_t state = node_.page(rank).state.load();
    states.emplace_back(state != kLeft && node_.liveness.ended(rank) ? "dead" : names[std::min<uint32_t>(state, kLeft)]);
  }
  return states;
}

void Fabric::close() {
  if (node_.fork.crossed()) {  // the parent's threads and the peers' view of the parent are not ours to touch
    if (engines_) engines_->join();
    return;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (!engines_) return;
  node_.closing.store(true);
  node_.own().state.store(kLeft);
  node_.wake_all_ranks();
  engines_.reset();
  // Calls that are inside see `closing` within a moment. A signal handler that closes from inside a wait is one of them.
  const int64_t end_ns = monotonic_ns() + kPatienceOfClose;
  while (node_.users.load() != 0 && monotonic_ns() < end_ns) {
    node_.wake_all_ranks();
    sleep_ns(100'000);
  }
  node_.space.clear();
  if (node_.users.load() == 0) node_.liveness.close();
}

}  // namespace mori
