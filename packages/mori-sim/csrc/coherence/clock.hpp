// Vector clocks of the strict mode.
//
// Every actor (a wave, a copy queue, the host) numbers its stores. A Clock says, per actor, up to which of its stores
// its owner knows to be complete. `ended` covers whole kernels: everything done by actors that ended before that
// moment is known. Knowledge only travels the ways hardware orders things: s_barrier inside a workgroup, a store or
// read-modify-write with scope bits that a load with scope bits reads, the start and the end of a kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mori_sim {

struct Clock {
  uint64_t ended = 0;
  std::vector<std::pair<uint32_t, uint32_t>> at;  // sorted by actor

  uint32_t get(uint32_t actor) const {
    auto it = std::lower_bound(at.begin(), at.end(), std::make_pair(actor, 0u));
    return it != at.end() && it->first == actor ? it->second : 0;
  }
  void raise(uint32_t actor, uint32_t to) {
    auto it = std::lower_bound(at.begin(), at.end(), std::make_pair(actor, 0u));
    if (it != at.end() && it->first == actor) it->second = std::max(it->second, to);
    else at.insert(it, {actor, to});
  }
  void join(const Clock& o) {
    ended = std::max(ended, o.ended);
    if (o.at.empty()) return;
    if (at.empty()) {
      at = o.at;
      return;
    }
    std::vector<std::pair<uint32_t, uint32_t>> r;
    r.reserve(at.size() + o.at.size());
    auto a = at.begin();
    auto b = o.at.begin();
    while (a != at.end() || b != o.at.end()) {
      if (b == o.at.end() || (a != at.end() && a->first < b->first)) r.push_back(*a++);
      else if (a == at.end() || b->first < a->first) r.push_back(*b++);
      else r.emplace_back(a->first, std::max(a->second, b->second)), ++a, ++b;
    }
    at.swap(r);
  }
};
using ClockPtr = std::shared_ptr<const Clock>;

}  // namespace mori_sim
