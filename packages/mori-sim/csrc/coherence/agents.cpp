// Copy engines, the host and other processes: each an actor with a name, one ordered stream of actions.
#include <algorithm>
#include <memory>
#include <string>

#include "coherence/strict_checker.hpp"

namespace mori_sim::strict {

uint32_t StrictChecker::agent(const std::string& name, int device) {
  auto it = agents_.find(name);
  if (it != agents_.end()) return it->second;
  Actor a;
  a.name = name;
  a.device = device;
  const uint32_t id = static_cast<uint32_t>(actors_.size());
  actors_.push_back(std::move(a));
  agents_[name] = id;
  return id;
}

// What these bytes tell who reads them; false when nobody is known to have written them.
bool StrictChecker::learn(uint32_t id, uint64_t addr, uint64_t nbytes) {
  bool any = false;
  each_record(addr, nbytes, [&](Record& r) {
    any = true;
    if (r.released) actors_[id].clock.join(*r.released);
  });
  return any;
}

// Stores of the host are not seen: it must have been him, after all that he has waited for.
void StrictChecker::learn_from_host(uint32_t id, int device) {
  const uint32_t host = agent("host", device);
  actors_[id].clock.join(actors_[host].clock);
}

void StrictChecker::agent_observed(const std::string& name, int device, uint64_t addr, uint64_t value) {
  const uint32_t id = agent(name, device);
  const bool any = learn(id, addr, 8);
  const auto pointer = engine_pointers_.find(addr);
  const bool other = pointer != engine_pointers_.end() && pointer->second && *pointer->second != value;
  if (!any || other) learn_from_host(id, device);
}

void StrictChecker::agent_polled(const std::string& name, int device, uint64_t addr, uint64_t nbytes) {
  const uint32_t id = agent(name, device);
  if (!learn(id, addr, nbytes)) learn_from_host(id, device);
}

void StrictChecker::agent_reads(const std::string& name, int device, uint64_t addr, uint64_t nbytes, const std::string& what) {
  const uint32_t id = agent(name, device);
  const bool host = name.compare(0, 4, "host") == 0;
  const bool ring = what.find("ring") != std::string::npos || what.find("packet") != std::string::npos;
  const bool atomic = what == kAtomicPacket;
  each_record(addr, nbytes, [&](Record& r) {
    const Clock& c = actors_[id].clock;
    const Actor& writer = actors_[r.actor];
    if (r.actor == id || !writer.wave) return;
    if (host && writer.end_seq) return;
    if (atomic && r.atomic) return;  // both at memory, in whichever order
    if (knows_ended(c, r.actor) && end_publishes(r)) return;
    std::string why;
    if (!knows(c, r.actor, r.clock)) why = "nothing orders the store before it: the signal was sent without waiting for the store (s_waitcnt vmcnt(0), s_barrier), or not sent at all";
    else if (!r.in_memory && !published(r, c, r.home == r.device ? Scope::agent : Scope::system, &why)) why = "the bytes are still dirty in the L2 of XCD " + std::to_string(r.xcd) + ": " + why;
    if (why.empty()) return;
    report_agent(ring ? "e" : "a", name, device, what, addr, r, why);
  });
  if (!host && !atomic && what != kPossibleFetch) note_engine_read(id, addr, nbytes);
}

void StrictChecker::agent_writes(const std::string& name, int device, uint64_t addr, uint64_t nbytes, const std::string& what) {
  const uint32_t id = agent(name, device);
  Actor& a = actors_[id];
  Record r{};
  r.actor = id;
  r.clock = ++a.now;
  r.scope = Scope::system;
  r.in_memory = true;
  r.device = static_cast<int16_t>(device);
  r.home = static_cast<int16_t>(device);
  a.clock.raise(id, a.now);
  const auto released = std::make_shared<Clock>(a.clock);
  r.atomic = what == kAtomicPacket;
  if (r.atomic)
    each_record(addr, nbytes, [&](Record& old) {  // a chain of read-modify-writes carries on
      if (old.released) released->join(*old.released);
    });
  r.released = released;
  each_part(addr, nbytes, [&](uint64_t line, const ByteMask& bytes) {
    r.bytes = bytes;
    put(line, r);
  });
}

void StrictChecker::agent_joined(const std::string& name, DispatchId finished) {
  const uint32_t id = agent(name, 0);
  auto it = ended_at_.find(finished);
  actors_[id].clock.ended = std::max(actors_[id].clock.ended, it == ended_at_.end() ? seq_ : it->second);
}

}  // namespace mori_sim::strict
