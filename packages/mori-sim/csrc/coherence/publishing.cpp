// buffer_wbl2 and buffer_inv, and whether a store has left the L2 that it was made in.
#include <string>
#include <utility>

#include "coherence/strict_checker.hpp"

namespace mori_sim::strict {

void StrictChecker::write_back(Wave& w, StrictWave& s, const Op& op) {
  const uint64_t pc = w.pc;
  Pending p = pending(Pending::wbl2, pc);
  p.clock = ++s.now;
  const Scope scope = op.sc0 && op.sc1 ? Scope::system : op.sc1 ? Scope::agent : Scope::plain;
  if (scope != Scope::plain) {
    WriteBack b{s.actor, p.clock, scope, s.known};
    b.covers.raise(s.actor, s.now - 1);  // the own stores reach L2 in order before it
    auto& list = write_backs_[{actors_[s.actor].device, actors_[s.actor].xcd}];
    if (list.size() >= 4096) list.erase(list.begin(), list.begin() + 2048);  // of kernels long gone
    list.push_back(std::move(b));
  }
  s.vm.push_back(std::move(p));
}

void StrictChecker::invalidate(StrictWave& s, const Op& op) {
  if (!op.sc1) return;
  s.agent_fresh = s.known;
  s.agent_fresh.raise(s.actor, s.complete);
  if (op.sc0) s.system_fresh = s.agent_fresh;
}

// A write-back on the writer's XCD that covers the store and that `by` knows to be done.
bool StrictChecker::published(const Record& r, const Clock& by, Scope need, std::string* why) const {
  auto it = write_backs_.find({r.device, r.xcd});
  bool any = false, scoped = false, covered = false;
  if (it != write_backs_.end())
    for (const WriteBack& b : it->second) {
      any = true;
      if (b.scope < need) continue;
      scoped = true;
      if (!knows(b.covers, r.actor, r.clock)) continue;
      covered = true;
      if (knows(by, b.actor, b.clock)) return true;
    }
  *why = !any ? "no buffer_wbl2 was executed on that XCD"
         : !scoped ? "buffer_wbl2 on that XCD had only agent scope (needs sc0 sc1)"
         : !covered ? "no buffer_wbl2 on that XCD was ordered after the store (s_waitcnt vmcnt(0) by the storing wave, s_barrier, then buffer_wbl2)"
                    : "a buffer_wbl2 covers them, but s_waitcnt vmcnt(0) between it and the signal is missing";
  return false;
}

}  // namespace mori_sim::strict
