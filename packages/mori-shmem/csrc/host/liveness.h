// Which ranks' processes have ended. A pidfd becomes readable when its process does, whatever the reason, and cannot be
// mistaken for another process that was given the same number.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace mori {

class Liveness {
 public:
  explicit Liveness(const std::vector<int>& pidfds);  // duplicates them; -1: not known
  ~Liveness() { close(); }
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  void close();  // nobody asks any more
  void refresh(int64_t now_ns, int64_t max_age_ns);  // ask the kernel, unless it was asked so recently
  bool ended(int rank) const { return ended_[static_cast<size_t>(rank)].load(std::memory_order_acquire); }

 private:
  std::vector<int> pidfds_;
  std::unique_ptr<std::atomic<bool>[]> ended_;
  std::atomic<int64_t> asked_ns_{INT64_MIN / 2};
};

}  // namespace mori
