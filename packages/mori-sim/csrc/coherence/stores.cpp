// Stores: what must have been read before (rule order), which scope they need, what is remembered of them; and signals to a
// peer, which are checked where they are sent.
#include <memory>
#include <string>

#include "coherence/strict_checker.hpp"
#include "exec/hex.hpp"

namespace mori_sim::strict {

void StrictChecker::write_lines(Wave& w, StrictWave& s, uint64_t pc, Scope scope, bool atomic, uint32_t clock, const VectorAccess& a) {
  ClockPtr released;
  const Actor& me = actors_[s.actor];
  Record r{};
  r.actor = s.actor;
  r.clock = clock;
  r.scope = scope;
  r.atomic = atomic;
  r.device = static_cast<int16_t>(me.device);
  r.xcd = static_cast<uint16_t>(me.xcd);
  r.code = w.code;
  r.pc = pc;
  for (const Touched& t : touched_) {
    const bool uncached = t.kind == MemoryKind::uncached || t.kind == MemoryKind::host;
    check_readers(w, s, pc, t);
    check_engine_pointer(w, s, pc, t, a);
    r.home = static_cast<int16_t>(t.kind == MemoryKind::local ? me.device : t.home);
    r.bytes = t.bytes;
    r.in_memory = atomic || uncached || scope == Scope::system || (scope == Scope::agent && t.kind == MemoryKind::local);
    r.released = nullptr;
    if (atomic && t.kind == MemoryKind::peer && scope != Scope::system)
      report("scope", w, pc, t.line * kLine, "agent-scope read-modify-write on memory of device " + std::to_string(t.home) + " (needs sc1)", 0);
    if (!atomic && t.kind == MemoryKind::peer && scope == Scope::system && a.nbytes < 4)
      report("scope", w, pc, t.line * kLine, "store of less than 4 bytes with sc0 sc1 to another device: partial lines lost updates on hardware", 0);
    if (atomic || scope != Scope::plain || uncached) {
      if (!released) {
        auto c = std::make_shared<Clock>(s.known);
        c->raise(s.actor, s.complete);
        released = c;
      }
      r.released = released;
      // A signal is small; bulk data stored with system scope next to plain stores is none.
      if (a.nbytes <= 8 && __builtin_popcountll(t.bytes.w[0]) + __builtin_popcountll(t.bytes.w[1]) <= 8 && (atomic || scope == Scope::system)) flag_to_peer(w, s, pc, t);
      Line* line = lines_.find(t.line);
      if (atomic && line)
        for (const Record& old : line->records)
          if (old.released && old.bytes.meets(t.bytes) && old.actor != s.actor) {  // a chain of RMWs carries on
            auto c = std::make_shared<Clock>(*r.released);
            c->join(*old.released);
            r.released = c;
          }
    } else if (t.kind == MemoryKind::peer) {
      to_peer_[t.home].insert(t.line);
    }
    put(t.line, r);
  }
}

// Another process's device cannot be asked what it read: a signal to a peer is checked where it is sent.
void StrictChecker::flag_to_peer(Wave& w, StrictWave& s, uint64_t pc, const Touched& t) {
  if (t.kind != MemoryKind::peer) return;
  auto it = to_peer_.find(t.home);
  if (it == to_peer_.end()) return;
  Clock mine = s.known;
  mine.raise(s.actor, s.complete);
  for (auto l = it->second.begin(); l != it->second.end();) {
    const Line* line = lines_.find(*l);
    bool open = false;
    if (line)
      for (const Record& r : line->records) {
        const Actor& writer = actors_[r.actor];
        const bool ended = knows_ended(mine, r.actor);
        if (r.in_memory || (writer.end_seq && end_publishes(r)) || r.device != actors_[s.actor].device) continue;
        std::string why;
        if (published(r, mine, Scope::system, &why)) continue;
        open = true;
        uint32_t issued = 0;
        if (r.actor == s.actor) issued = s.now;
        else if (auto i = s.issued.find(r.actor); i != s.issued.end()) issued = i->second;
        if (!ended && (writer.group != actors_[s.actor].group || issued < r.clock)) continue;
        if (r.actor != s.actor && !knows(mine, r.actor, r.clock)) why = "the storing wave did not wait (s_waitcnt vmcnt(0)) before the s_barrier";
        finding("c", w, pc, t.line * kLine, r, "signals device " + std::to_string(t.home) + " although stores to its memory need not have arrived: " + why);
      }
    l = open ? std::next(l) : it->second.erase(l);
  }
}

// The store overwrites what another wave has read (or is reading) with nothing in between to order them.
void StrictChecker::check_readers(Wave& w, StrictWave& s, uint64_t pc, const Touched& t) {
  Line* line = lines_.find(t.line);
  if (!line) return;
  auto& v = line->readers;
  for (size_t i = 0; i < v.size();) {
    Reader& r = v[i];
    if (!r.bytes.meets(t.bytes)) { ++i; continue; }
    if (r.actor != s.actor && !knows(s.known, r.actor, r.clock))
      report("order", w, pc, t.line * kLine, "overwrites bytes of line " + hex(t.line * kLine) + " that " + actors_[r.actor].name + " read" +
             (r.code ? " with " + instruction(r.code, r.pc) + ": nothing orders the two, so that load may see either"
                     : ": nothing told this wave that the copy was over (its signal was not read, or not waited for)"), r.pc);
    r.bytes.drop(t.bytes);
    if (r.bytes.empty()) v.erase(v.begin() + static_cast<long>(i));
    else ++i;
  }
}

// A doorbell or write pointer that one wave after the other stores to: had the last one's store not arrived yet, it would
// land on top of this one, and the engine would be told of less than it had been told before.
void StrictChecker::check_engine_pointer(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, const VectorAccess& a) {
  const auto first = engine_pointers_.lower_bound(t.line * kLine);
  if (first == engine_pointers_.end() || first->first >= (t.line + 1) * kLine) return;
  for (auto pointer = first; pointer != engine_pointers_.end() && pointer->first < (t.line + 1) * kLine; ++pointer)
    for (unsigned i = 0; i < kLanes; ++i) {
      if (!(a.lanes >> i & 1) || a.addr[i] >= pointer->first + 8 || a.addr[i] + a.nbytes <= pointer->first) continue;
      if (a.data && a.nbytes == 8 && a.addr[i] == pointer->first) pointer->second = a.data[i] | static_cast<uint64_t>(a.data[kLanes + i]) << 32;
      else pointer->second.reset();  // in part, or by an atomic: what the word holds then is not known here
    }
  const Line* line = lines_.find(t.line);
  if (!line) return;
  for (const Record& r : line->records)
    if (r.bytes.meets(t.bytes) && r.actor != s.actor && actors_[r.actor].wave && !knows(s.known, r.actor, r.clock))
      finding("e", w, pc, t.line * kLine, r,
              "tells an engine how far its ring is filled, as the other wave did before, and nothing says that its store has "
              "arrived (s_waitcnt vmcnt(0) before it passed the turn on): the pointer may go back");
}

}  // namespace mori_sim::strict
