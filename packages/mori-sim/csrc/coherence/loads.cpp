// Loads: what a load must know of each store that it meets (rules b, c and d; the three steps at the top of checker.cpp).
#include <string>

#include "coherence/strict_checker.hpp"
#include "exec/hex.hpp"

namespace mori_sim::strict {

void StrictChecker::read_line(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, Scope scope, bool atomic) {
  Line* line = lines_.find(t.line);
  const bool uncached = t.kind == MemoryKind::uncached || t.kind == MemoryKind::host;
  const bool coherent = scope != Scope::plain || atomic;
  if (t.shared && !coherent && !uncached && (!line || line->records.empty())) from_outside(w, s, pc, t);
  if (!line) return;
  for (const Record& r : line->records) {
    if (!r.bytes.meets(t.bytes)) continue;
    if (r.actor == s.actor) continue;
    if (r.released && (coherent || uncached)) acquired_.push_back(r.released);
    // Written before this wave's kernel started, or by a kernel whose end it knows of: clean caches, clean memory.
    const bool ended = knows_ended(s.known, r.actor) && end_publishes(r);
    if (ended && knows_ended(s.system_fresh, r.actor)) continue;
    if (uncached && !coherent && !ended && !knows(s.known, r.actor, r.clock))
      finding(actors_[r.actor].wave ? "d" : "b", w, pc, t.line * kLine, r,
              "a plain load of uncached memory, and nothing orders the store before it: the flag was not waited for, or was sent before the "
              "store was complete (a flag itself needs an atomic load)");
    else if (coherent || uncached) check_memory_read(w, s, pc, t, r, ended, scope, atomic);
    else check_cached_read(w, s, pc, t, r, ended);
  }
}

// A copy engine, or another device's memory or wave, is the partner: only system scope reaches it.
bool StrictChecker::far(const Actor& reader, const Record& r) const {
  return !actors_[r.actor].wave || r.device != reader.device || r.home != reader.device || r.home != r.device;
}

// A read that goes to memory itself. It may meet a store that has not got there.
void StrictChecker::check_memory_read(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, const Record& r, bool ended, Scope scope, bool atomic) {
  const Actor &me = actors_[s.actor], &writer = actors_[r.actor];
  const uint64_t addr = t.line * kLine;
  const bool coherent = scope != Scope::plain || atomic;
  if (r.in_memory || ended || (r.device == me.device && r.xcd == me.xcd && writer.wave)) {
    if (atomic || !coherent || t.kind != MemoryKind::peer || scope == Scope::system) return;
    finding("d", w, pc, addr, r, "reads another device's memory with agent scope: the own L2 may hold an old copy (needs sc0 sc1)");
    return;
  }
  std::string why;
  if (published(r, s.known, far(me, r) ? Scope::system : Scope::agent, &why)) return;
  finding("c", w, pc, addr, r, "reads bytes still dirty in the L2 of XCD " + std::to_string(r.xcd) + " of device " + std::to_string(r.device) + ": " + why);
}

// A read through the caches.
void StrictChecker::check_cached_read(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, const Record& r, bool ended) {
  const Actor &me = actors_[s.actor], &writer = actors_[r.actor];
  const uint64_t addr = t.line * kLine;
  const bool engine = !writer.wave;
  const Scope need = far(me, r) ? Scope::system : Scope::agent;
  const bool same_group = writer.wave && writer.group == me.group && writer.device == me.device && !writer.end_seq;
  if (!knows(s.known, r.actor, r.clock)) {
    auto seen = s.issued.find(r.actor);
    const bool before_barrier = seen != s.issued.end() && seen->second >= r.clock;
    const char* rule = engine ? "b" : same_group ? "c" : "d";
    finding(rule, w, pc, addr, r,
            before_barrier ? "the store was issued before the s_barrier but its wave did not wait for it (s_waitcnt vmcnt(0))"
            : same_group   ? "no s_barrier, or no s_waitcnt vmcnt(0) before it, orders the store of the other wave before this read"
            : r.atomic || r.released ? "a plain load of what another agent writes as a signal: needs scope bits, and s_waitcnt vmcnt(0) before what follows is relied on"
                           : "nothing orders the store before this read: the flag was read without scope bits or not waited for, or was sent before the store was complete");
    return;
  }
  if (same_group) return;
  const bool same_l2 = writer.wave && r.device == me.device && r.xcd == me.xcd;
  std::string why;
  if (!same_l2 && !r.in_memory && !ended && !published(r, s.known, need, &why)) {
    finding("c", w, pc, addr, r, "the bytes need not have left the L2 of XCD " + std::to_string(r.xcd) + " of device " + std::to_string(r.device) + ": " + why);
    return;
  }
  const Clock& fresh = need == Scope::system ? s.system_fresh : s.agent_fresh;
  bool clean = knows(fresh, r.actor, r.clock);
  if (clean && !same_l2 && !r.in_memory && !knows_ended(fresh, r.actor)) clean = published(r, fresh, need, &why);
  if (!clean)
    finding(engine ? "b" : "d", w, pc, addr, r,
            std::string("a cached load after the signal may return an old copy: no buffer_inv ") + (need == Scope::system ? "sc0 sc1" : "sc1") +
                " by this workgroup lies between reading the signal (and waiting for it) and this load");
}

void StrictChecker::from_outside(Wave& w, StrictWave& s, uint64_t pc, const Touched& t) {
  auto it = agents_.find("another process");
  if (it == agents_.end()) return;
  if (s.known.get(it->second) <= s.system_fresh.get(it->second)) return;
  report("d", w, pc, t.line * kLine, "at line " + hex(t.line * kLine) + ": a cached load of memory that other processes write, after a signal from outside was read: no buffer_inv sc0 sc1 "
         "by this workgroup lies between the two", 0);
}

}  // namespace mori_sim::strict
