#include "host/waits.h"

#include <sched.h>

#include <algorithm>

namespace mori {

std::function<void()> between_slices = [] {};

namespace {

constexpr int64_t kFirstSlice = 1'000'000;
constexpr int64_t kLivenessAge = 40'000'000;

class Counted {  // a thread counted in as a sleeper
 public:
  explicit Counted(Event& event) : event_(event), seen(event.prepare()) {}
  ~Counted() { event_.leave(); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  Event& event_;

 public:
  const uint32_t seen;
};

bool spin(Node& node, Condition& condition, int64_t begin_ns) {
  if (condition.ready()) return true;
  const int64_t end_ns = begin_ns + node.settings.spin_ns;
  do {
    condition.serve(node);
    for (int i = 0; i < 16; ++i) {
      if (condition.ready()) return true;
      cpu_relax();
    }
    sched_yield();
  } while (monotonic_ns() < end_ns && !node.closing.load(std::memory_order_relaxed));
  return condition.ready();
}

[[noreturn]] void fail(const char* kind, Condition& condition, int64_t begin_ns, Facts more) {
  Facts facts = condition.facts();
  facts.insert(facts.end(), more.begin(), more.end());
  facts.emplace_back("waited_s", static_cast<double>(monotonic_ns() - begin_ns) * 1e-9);
  throw Error(kind, std::move(facts));
}

// Throws if a rank that matters is gone and the condition still does not hold; true if it does hold after all.
bool check_peers(Node& node, Condition& condition, int64_t begin_ns, int64_t now_ns) {
  node.liveness.refresh(now_ns, kLivenessAge);
  std::vector<int> died, left;
  for (int rank = 0; rank < node.settings.world_size; ++rank) {
    const Concern concern = condition.concern(rank);
    if (concern == Concern::kNone || rank == node.settings.rank) continue;
    if (node.page(rank).state.load() == kLeft) {
      if (concern == Concern::kDeathOrLeaving) left.push_back(rank);
    } else if (node.liveness.ended(rank)) {
      died.push_back(rank);
    }
  }
  if (died.empty() && left.empty()) return false;
  if (condition.ready()) return true;
  if (!died.empty()) fail("peer_died", condition, begin_ns, {{"ranks", died}});
  fail("peer_left", condition, begin_ns, {{"ranks", left}});
}

// One slice of sleep; true if the condition holds.
bool sleep_slice(Node& node, Event& event, Condition& condition, int64_t begin_ns, int64_t deadline_ns, int64_t slice_ns) {
  Counted counted(event);
  if (condition.ready()) return true;
  if (node.closing.load()) fail("closed", condition, begin_ns, {});
  const int64_t now_ns = monotonic_ns();
  if (check_peers(node, condition, begin_ns, now_ns)) return true;
  if (now_ns >= deadline_ns) {
    if (condition.ready()) return true;
    fail("timeout", condition, begin_ns, {});
  }
  event.sleep(counted.seen, std::min(slice_ns, deadline_ns - now_ns));
  return condition.ready();
}

}  // namespace

void wait_until(Node& node, Event& event, Condition& condition, int64_t timeout_ns, int64_t longest_slice_ns) {
  const int64_t begin_ns = monotonic_ns();
  const int64_t deadline_ns = timeout_ns > INT64_MAX - begin_ns ? INT64_MAX : begin_ns + timeout_ns;
  if (spin(node, condition, begin_ns)) return;
  int64_t slice_ns = kFirstSlice;
  int64_t signals_seen_ns = begin_ns;
  while (!sleep_slice(node, event, condition, begin_ns, deadline_ns, slice_ns)) {
    slice_ns = std::min(2 * slice_ns, longest_slice_ns);
    if (monotonic_ns() - signals_seen_ns >= kFirstSlice) {
      between_slices();
      signals_seen_ns = monotonic_ns();
    }
    condition.serve(node);
  }
}

}  // namespace mori
