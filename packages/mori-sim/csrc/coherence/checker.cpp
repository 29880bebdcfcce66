// Strict mode. Memory itself stays coherent; what is checked is whether the program ordered its accesses so that real
// caches could not get in the way. That does not depend on the schedule: a missing fence is reported even in a run
// where it did no harm.
//
// For each 128-byte line the checker remembers who wrote which bytes last (Record). A reader must then be able to show
//   1. that it knows the store, and the store to be complete  (vmcnt wait, barrier, flag)          else "wait"/"order"
//   2. that the bytes had left the writer's L2                (scope bits, buffer_wbl2, kernel end)  else "publish"
//   3. that its own caches were emptied after that            (scope bits, buffer_inv, kernel start) else "acquire"
// L1 is private to a CU, L2 to an XCD; copy engines and the host see memory only. Memory of another device needs system
// scope (sc0 sc1) throughout; memory of the own device needs agent scope (sc1), or system scope when an engine or
// another device is the partner. Uncached memory needs step 1 only.
//
// Other processes are not seen here. What they write into shared memory shows only by the signals they send: after a
// coherent load met a new value that nobody here stored, cached loads of shared memory that nobody here wrote need an
// acquire like any other.
//
// What is remembered changes together with memory (Node::hold_waves), and goes when memory is given back. Stores of the host
// itself are not seen either: a doorbell with a value that no wave has stored, and a polled word that nobody is known to
// have written, are the host's, who knows of every kernel that has ended.
//
// Rules in reports: a  CU stores, copy engine reads        b  copy engine writes, CU reads
//                   c  CU stores, another CU reads: the writer's side      d  ... the reader's side
//                   e  ring, pointers and doorbell: what an engine is told and fetches  wait  a result used before s_waitcnt
//                   order  a store overwrites what another wave or a copy engine reads, unordered
//                   scope  an access whose scope cannot reach where it is needed
//                   lds  waves of a workgroup race in LDS (lds_order.hpp)
#include "coherence/checker.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "coherence/strict_checker.hpp"

namespace mori_sim::strict {

void StrictChecker::kernel_starts(KernelRun& k) {
  // Caches hold nothing older: everything done by then is known and fresh.
  Clock c;
  c.ended = seq_;
  for (const auto& [name, id] : agents_) c.raise(id, actors_[id].now);
  starts_[k.id] = c;
}

void StrictChecker::kernel_ends(KernelRun& k) {
  ++seq_;
  for (uint32_t a : waves_of_[k.id]) actors_[a].end_seq = seq_;
  ended_at_[k.id] = seq_;
  waves_of_.erase(k.id);
  starts_.erase(k.id);
}

void StrictChecker::wave_starts(Wave& w) {
  auto s = std::make_unique<StrictWave>();
  const KernelRun& k = *w.group->kernel;
  Actor a;
  a.wave = true;
  a.device = k.d.device;
  a.xcd = w.group->xcd;
  a.cu = w.group->cu;
  a.group = w.group;
  a.name = k.d.name + " workgroup (" + std::to_string(w.group->id[0]) + ", " + std::to_string(w.group->id[1]) + ", " + std::to_string(w.group->id[2]) +
           ") wave " + std::to_string(w.index) + " on device " + std::to_string(k.d.device) + " XCD " + std::to_string(a.xcd);
  s->actor = static_cast<uint32_t>(actors_.size());
  actors_.push_back(std::move(a));
  waves_of_[k.id].push_back(s->actor);
  s->known = s->agent_fresh = s->system_fresh = starts_[k.id];
  auto& g = groups_[w.group];
  if (!g) g = std::make_unique<LdsOrder>(w.group->lds.size());
  s->lds = g.get();
  s->index = w.index;
  g->wave(w.index);
  w.strict = s.get();
  states_[&w] = std::move(s);
}

void StrictChecker::wave_ends(Wave& w) {
  StrictWave& s = state(w);
  s.lds->wave(s.index).ended = true;
  if (w.group->alive == 1) groups_.erase(w.group);
  states_.erase(&w);
  w.strict = nullptr;
}

void StrictChecker::barrier_released(Workgroup& g) {
  Clock all, agent, system;
  std::map<uint32_t, uint32_t> issued;
  for (Wave* w : g.waves) {
    if (!w->strict) continue;
    const StrictWave& s = state(*w);
    all.join(s.known);
    all.raise(s.actor, s.complete);
    agent.join(s.agent_fresh);
    system.join(s.system_fresh);
    issued[s.actor] = s.now;
  }
  for (Wave* w : g.waves) {
    if (!w->strict) continue;
    StrictWave& s = state(*w);
    s.known = all;
    s.agent_fresh = agent;
    s.system_fresh = system;
    s.issued = issued;
  }
  auto it = groups_.find(&g);
  if (it == groups_.end()) return;
  for (Wave* w : g.waves) {
    if (!w->strict) continue;
    const StrictWave& s = state(*w);
    for (const Pending& p : s.lgkm)
      if (p.lds_read) it->second->leave_open(it->second->wave(s.index), p.lds_number, *p.lds_read);
  }
  it->second->barrier();
}

void StrictChecker::before(Wave& w, const Op& op) {
  StrictWave& s = state(w);
  lds.count = 0;
  if (s.any_busy) check_registers(w, s, op);
  switch (op.category) {
    case Category::wait:
      if (!std::strcmp(op.info->name, "s_waitcnt")) wait(s, static_cast<uint16_t>(op.simm16));
      break;
    case Category::vmem:
      if (!std::strcmp(op.info->name, "buffer_wbl2")) write_back(w, s, op);
      else if (!std::strcmp(op.info->name, "buffer_inv")) invalidate(s, op);
      break;
    case Category::smem: {
      if (!op.info->dst.bits) break;  // cache instructions
      Pending p = pending(Pending::smem, w.pc);
      p.writes = &use_of(op).writes;
      mark(s, p);
      s.lgkm.push_back(std::move(p));
      break;
    }
    case Category::lds:
      if (op.info->dst.bits || op.info->src1.bits) {
        Pending p = pending(Pending::ds, w.pc);
        if (op.info->dst.bits) p.writes = &use_of(op).writes;
        mark(s, p);
        s.lgkm.push_back(std::move(p));
      }
      break;
    default: break;
  }
}

void StrictChecker::vector_access(Wave& w, const Op& op, const VectorAccess& a) {
  StrictWave& s = state(w);
  gather(w, a);
  const uint64_t pc = w.pc - op.nbytes;
  const Scope scope = scope_of(op, a.atomic);
  acquired_.clear();
  if (a.load || a.atomic)
    for (Touched& t : touched_) read_line(w, s, pc, t, scope, a.atomic);
  Pending p = pending(a.store ? Pending::store : a.to_lds ? Pending::lds_dma : Pending::load, pc);
  p.clock = ++s.now;
  if (a.load && scope == Scope::plain) note_readers(w, s, pc, p.clock);
  if (a.store || a.atomic) {
    write_lines(w, s, pc, scope, a.atomic, p.clock, a);
  }
  if (a.atomic && !op.sc0) p.kind = Pending::store;
  if (a.load || (a.atomic && op.sc0)) {
    if (!a.to_lds) p.writes = &use_of(op).writes;
    if (scope != Scope::plain || a.atomic || uncached_seen_) p.acquires = acquired_;
  }
  if (a.to_lds) {
    for (unsigned i = 0; i < kLanes; ++i)
      if (w.exec() >> i & 1) note_lds(a.lds_offset + i * a.lds_slot);
    p.lds_number = order_lds(w, s, op, LdsUse::dma, a.lds_slot);
  }
  mark(s, p);
  if (op.info->format == Format::flat) {
    s.lgkm.push_back(pending(Pending::ds, pc));
  }
  s.vm.push_back(std::move(p));
}

void StrictChecker::vector_done(Wave& w, const Op& op, const VectorAccess& a, const uint32_t* loaded) {
  if (!loaded || a.nbytes < 4 || a.nbytes > 8) return;
  if (scope_of(op, a.atomic) == Scope::plain && !uncached_seen_) return;
  bool shared = false;
  for (const Touched& t : touched_) shared |= t.shared;
  if (!shared) return;
  StrictWave& s = state(w);
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(a.lanes >> i & 1)) continue;
    bool ours = false;
    const uint64_t at = known_as(w, a.addr[i]);
    each_record(at, a.nbytes, [&](Record&) { ours = true; });
    if (ours) continue;
    const uint64_t value = loaded[i] | (a.nbytes == 8 ? static_cast<uint64_t>(loaded[kLanes + i]) << 32 : 0);
    auto [it, fresh] = signals_.emplace(at, value);
    if (!fresh && it->second == value) continue;
    it->second = value;
    const uint32_t outside = agent("another process", -1);
    auto c = std::make_shared<Clock>();
    c->raise(outside, ++actors_[outside].now);
    s.vm.back().acquires.push_back(c);
  }
}

void StrictChecker::scalar_access(Wave& w, const Op& op, uint64_t addr, unsigned nbytes) {
  StrictWave& s = state(w);
  touched_.clear();
  touch(w, addr, nbytes);
  for (Touched& t : touched_) read_line(w, s, w.pc - op.nbytes, t, Scope::plain, false);
}

void StrictChecker::lds_access(Wave& w, const Op& op, LdsUse use, unsigned nbytes) {
  StrictWave& s = state(w);
  const uint32_t number = order_lds(w, s, op, use, nbytes);
  if (s.lgkm.empty()) return;
  s.lgkm.back().lds_number = number;
  if (use == LdsUse::read) s.lgkm.back().lds_read = std::make_unique<LdsAccess>(lds);
}

uint32_t StrictChecker::order_lds(Wave& w, StrictWave& s, const Op& op, LdsUse use, unsigned nbytes) {
  lds.use = use;
  lds.nbytes = nbytes;
  lds.pc = w.pc - op.nbytes;
  LdsWave& l = s.lds->wave(s.index);
  if (LdsConflict c; !s.lds->access(l, lds, &c))
    report(c.rule, w, lds.pc, c.offset, std::string(use == LdsUse::read ? "reads" : "writes") + " LDS at " + std::to_string(c.offset) + ", used with " +
           instruction(w.code, c.other_pc) + " " + c.why, c.other_pc);
  return use == LdsUse::dma ? l.dma_now : l.ds_now;
}

// Its addresses may come back as something else, of which none of this is true. What lies beside it on a line stays.
void StrictChecker::memory_released(uint64_t addr, uint64_t nbytes) {
  if (nbytes == 0) return;
  const uint64_t end = addr + nbytes, whole = (addr + kLine - 1) / kLine, whole_end = std::max(whole, end / kLine);
  if (whole < whole_end) lines_.erase(whole, whole_end - 1);
  const auto forget = [&](uint64_t line, const ByteMask& bytes) {
    Line* const found = lines_.find(line);
    if (!found) return;
    Line::drop(found->records, bytes);
    Line::drop(found->readers, bytes);
  };
  const uint64_t head_end = std::min(end, whole * kLine), tail = std::max(head_end, whole_end * kLine);
  each_part(addr, head_end - addr, forget);
  if (tail < end) each_part(tail, end - tail, forget);
  const auto erase = [&](auto& table, uint64_t from, uint64_t to) { table.erase(table.lower_bound(from), table.lower_bound(to)); };
  erase(engine_pointers_, addr, end);
  erase(signals_, addr, end);
  for (auto& [device, lines] : to_peer_) erase(lines, whole, whole_end);
}

}  // namespace mori_sim::strict

namespace mori_sim {

std::unique_ptr<Checker> make_checker(ExecContext& ctx) { return std::make_unique<strict::StrictChecker>(ctx); }

}  // namespace mori_sim
