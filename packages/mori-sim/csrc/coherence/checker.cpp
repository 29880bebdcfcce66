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
// Rules in reports: a  CU stores, copy engine reads        b  copy engine writes, CU reads
//                   c  CU stores, another CU reads: the writer's side      d  ... the reader's side
//                   e  ring, pointers and doorbell: what an engine is told and fetches  wait  a result used before s_waitcnt
//                   order  a store overwrites what another wave or a copy engine reads, unordered
//                   scope  an access whose scope cannot reach where it is needed
//                   lds  waves of a workgroup race in LDS (lds_order.hpp)
#include "coherence/checker.hpp"

#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "coherence/clock.hpp"
#include "coherence/hazards.hpp"
#include "coherence/lines.hpp"

namespace mori_sim {
namespace {

constexpr unsigned kLine = 128;

struct Site {  // an instruction in a report
  const Code* code = nullptr;
  uint64_t pc = 0;
  std::string agent;  // copy engines and the host: what they were doing
};

enum class Scope : uint8_t { plain, agent, system };
Scope scope_of(const Op& op, bool atomic) {
  if (atomic) return op.sc1 ? Scope::system : Scope::agent;
  return op.sc0 && op.sc1 ? Scope::system : op.sc1 ? Scope::agent : Scope::plain;
}

struct ByteMask {
  uint64_t w[2] = {0, 0};
  void set(unsigned first, unsigned n) {  // n >= 1, first + n <= 128
    const auto half = [](unsigned from, unsigned to) { return from >= to ? 0 : (to - from == 64 ? ~0ull : ((1ull << (to - from)) - 1) << from); };
    w[0] |= half(std::min(first, 64u), std::min(first + n, 64u));
    w[1] |= half(std::max(first, 64u) - 64, std::max(first + n, 64u) - 64);
  }
  bool meets(const ByteMask& o) const { return (w[0] & o.w[0]) | (w[1] & o.w[1]); }
  bool empty() const { return !(w[0] | w[1]); }
  void add(const ByteMask& o) { w[0] |= o.w[0]; w[1] |= o.w[1]; }
  void drop(const ByteMask& o) { w[0] &= ~o.w[0]; w[1] &= ~o.w[1]; }
};

struct Record {
  uint32_t actor;
  uint32_t clock;
  ByteMask bytes;
  Scope scope;           // how the store was made
  bool in_memory;        // reached memory by itself (scope bits that suffice, uncached, engine, atomic)
  bool atomic;
  int16_t device, home;  // who stored, whose memory
  uint16_t xcd;
  const Code* code;
  uint64_t pc;
  ClockPtr released;     // what a reader with scope bits learns; null for plain stores
};
struct Reader {  // a cached read, or an engine's: a later store must be ordered after it
  uint32_t actor;
  uint32_t clock;
  ByteMask bytes;
  const Code* code;
  uint64_t pc;
};
struct Line {
  std::vector<Record> records;
  std::vector<Reader> readers;
};
constexpr size_t kReaders = 8;  // remembered per line

struct Actor {
  std::string name;      // for reports
  bool wave = false;
  uint64_t end_seq = 0;  // of its kernel; 0 while it runs
  int device = 0;
  unsigned xcd = 0, cu = 0;
  const void* group = nullptr;
  Clock clock;           // agents only
  uint32_t now = 0;
};

struct WriteBack {  // one buffer_wbl2
  uint32_t actor;
  uint32_t clock;
  Scope scope;
  Clock covers;  // the stores known to be in L2 when it was issued
};

struct Pending {  // something vmcnt or lgkmcnt counts
  enum Kind : uint8_t { load, store, wbl2, lds_dma, ds, smem } kind = load;
  uint64_t pc = 0;
  const std::vector<RegisterRange>* writes = nullptr;
  uint32_t clock = 0;
  uint32_t lds_number = 0;            // of a ds access or a DMA, as LdsOrder counts
  std::unique_ptr<LdsAccess> lds_read;
  std::vector<ClockPtr> acquires;
};

struct WaveState_ {
  uint32_t actor = 0;
  Clock known;                    // of others; the own part is `now` / `complete`
  Clock agent_fresh, system_fresh;  // what was known when L1/L2 were last emptied (buffer_inv, kernel start)
  uint32_t now = 0, complete = 0;
  std::deque<Pending> vm, lgkm;
  uint64_t busy[12] = {};         // registers with an outstanding write, operand numbering
  bool any_busy = false;
  LdsOrder* lds = nullptr;        // of the workgroup
  unsigned index = 0;
  // stores of sibling waves that were issued before the last barrier (complete or not)
  std::map<uint32_t, uint32_t> issued;
};

std::string hex(uint64_t v) {
  char b[32];
  std::snprintf(b, sizeof b, "0x%llx", static_cast<unsigned long long>(v));
  return b;
}

// As long as the process, like what bind() makes of an instruction: code may be used by several machines.
const RegisterUse* keep(RegisterUse use) {
  static std::mutex guard;
  static std::deque<RegisterUse> kept;
  std::lock_guard<std::mutex> lock(guard);
  kept.push_back(std::move(use));
  return &kept.back();
}

class StrictChecker final : public Checker {
 public:
  explicit StrictChecker(ExecContext& ctx) : ctx_(ctx) { actors_.emplace_back(); }

  // ------------------------------------------------------------------ life of waves and kernels
  void kernel_starts(KernelRun& k) override {
    // Caches hold nothing older: everything done by then is known and fresh.
    Clock c;
    c.ended = seq_;
    for (const auto& [name, id] : agents_) c.raise(id, actors_[id].now);
    starts_[k.id] = c;
  }
  void kernel_ends(KernelRun& k) override {
    ++seq_;
    for (uint32_t a : waves_of_[k.id]) actors_[a].end_seq = seq_;
    ended_at_[k.id] = seq_;
    waves_of_.erase(k.id);
    starts_.erase(k.id);
  }
  void wave_starts(Wave& w) override {
    auto s = std::make_unique<WaveState_>();
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
  void wave_ends(Wave& w) override {
    WaveState_& s = state(w);
    s.lds->wave(s.index).ended = true;
    if (w.group->alive == 1) groups_.erase(w.group);
    states_.erase(&w);
    w.strict = nullptr;
  }
  void barrier_released(Workgroup& g) override {
    Clock all, agent, system;
    std::map<uint32_t, uint32_t> issued;
    for (Wave* w : g.waves) {
      if (!w->strict) continue;
      const WaveState_& s = state(*w);
      all.join(s.known);
      all.raise(s.actor, s.complete);
      agent.join(s.agent_fresh);
      system.join(s.system_fresh);
      issued[s.actor] = s.now;
    }
    for (Wave* w : g.waves) {
      if (!w->strict) continue;
      WaveState_& s = state(*w);
      s.known = all;
      s.agent_fresh = agent;
      s.system_fresh = system;
      s.issued = issued;
    }
    auto it = groups_.find(&g);
    if (it == groups_.end()) return;
    for (Wave* w : g.waves) {
      if (!w->strict) continue;
      const WaveState_& s = state(*w);
      for (const Pending& p : s.lgkm)
        if (p.lds_read) it->second->leave_open(it->second->wave(s.index), p.lds_number, *p.lds_read);
    }
    it->second->barrier();
  }

  // ------------------------------------------------------------------ registers, waits, cache instructions
  void before(Wave& w, const Op& op) override {
    WaveState_& s = state(w);
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

  // ------------------------------------------------------------------ vector memory
  void vector_access(Wave& w, const Op& op, const VectorAccess& a) override {
    WaveState_& s = state(w);
    gather(w, a);
    const uint64_t pc = w.pc - op.nbytes;
    const Scope scope = scope_of(op, a.atomic);
    acquired_.clear();
    if (a.load || a.atomic)
      for (Touched& t : touched_) read_line(w, s, op, pc, t, scope, a.atomic);
    Pending p = pending(a.store ? Pending::store : a.to_lds ? Pending::lds_dma : Pending::load, pc);
    p.clock = ++s.now;
    if (a.load && scope == Scope::plain) note_readers(w, s, pc, p.clock);
    if (a.store || a.atomic) {
      write_lines(w, s, op, pc, scope, a.atomic, p.clock, a);
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
  void vector_done(Wave& w, const Op& op, const VectorAccess& a, const uint32_t* loaded) override {
    if (!loaded || a.nbytes < 4 || a.nbytes > 8) return;
    if (scope_of(op, a.atomic) == Scope::plain && !uncached_seen_) return;
    bool shared = false;
    for (const Touched& t : touched_) shared |= t.shared;
    if (!shared) return;
    WaveState_& s = state(w);
    for (unsigned i = 0; i < kLanes; ++i) {
      if (!(a.lanes >> i & 1)) continue;
      bool ours = false;
      each_record(a.addr[i], a.nbytes, [&](Record&) { ours = true; });
      if (ours) continue;
      const uint64_t value = loaded[i] | (a.nbytes == 8 ? static_cast<uint64_t>(loaded[kLanes + i]) << 32 : 0);
      auto [it, fresh] = signals_.emplace(a.addr[i], value);
      if (!fresh && it->second == value) continue;
      it->second = value;
      const uint32_t outside = agent("another process", -1);
      auto c = std::make_shared<Clock>();
      c->raise(outside, ++actors_[outside].now);
      s.vm.back().acquires.push_back(c);
    }
  }

  void scalar_access(Wave& w, const Op& op, uint64_t addr, unsigned nbytes) override {
    WaveState_& s = state(w);
    touched_.clear();
    touch(w, addr, nbytes);
    for (Touched& t : touched_) read_line(w, s, op, w.pc - op.nbytes, t, Scope::plain, false);
  }

  void lds_access(Wave& w, const Op& op, LdsUse use, unsigned nbytes) override {
    WaveState_& s = state(w);
    const uint32_t number = order_lds(w, s, op, use, nbytes);
    if (s.lgkm.empty()) return;
    s.lgkm.back().lds_number = number;
    if (use == LdsUse::read) s.lgkm.back().lds_read = std::make_unique<LdsAccess>(lds);
  }

  // ------------------------------------------------------------------ copy engines and the host
  void agent_observed(const std::string& name, int device, uint64_t addr, uint64_t nbytes) override {
    const uint32_t id = agent(name, device);
    bool any = false;
    each_record(addr, nbytes, [&](Record& r) {
      any = true;
      if (r.released) actors_[id].clock.join(*r.released);
    });
    if (!any) actors_[id].clock.join(actors_[agent("host", device)].clock);  // the host must have written it
  }
  void agent_polled(const std::string& name, int device, uint64_t addr, uint64_t nbytes) override {
    const uint32_t id = agent(name, device);
    each_record(addr, nbytes, [&](Record& r) {
      if (r.released) actors_[id].clock.join(*r.released);
    });
  }
  void engine_pointer(uint64_t addr) override { engine_pointers_.insert(addr); }
  void agent_reads(const std::string& name, int device, uint64_t addr, uint64_t nbytes, const std::string& what) override {
    const uint32_t id = agent(name, device);
    const bool host = name.compare(0, 4, "host") == 0;
    const bool ring = what.find("ring") != std::string::npos || what.find("packet") != std::string::npos;
    each_record(addr, nbytes, [&](Record& r) {
      const Clock& c = actors_[id].clock;
      const Actor& writer = actors_[r.actor];
      if (r.actor == id || !writer.wave) return;
      if (host && writer.end_seq) return;
      if (knows_ended(c, r.actor) && end_publishes(r)) return;
      std::string why;
      if (!knows(c, r.actor, r.clock)) why = "nothing orders the store before it: the signal was sent without waiting for the store (s_waitcnt vmcnt(0), s_barrier), or not sent at all";
      else if (!r.in_memory && !published(r, c, r.home == r.device ? Scope::agent : Scope::system, &why)) why = "the bytes are still dirty in the L2 of XCD " + std::to_string(r.xcd) + ": " + why;
      if (why.empty()) return;
      report_agent(ring ? "e" : "a", name, device, what, addr, r, why);
    });
    if (!host && what != kPossibleFetch) note_engine_read(id, addr, nbytes);
  }
  // What an engine has read must not be overwritten before its signal was seen.
  void note_engine_read(uint32_t id, uint64_t addr, uint64_t nbytes) {
    const uint32_t clock = ++actors_[id].now;
    each_part(addr, nbytes, [&](uint64_t line, const ByteMask& bytes) { note_reader(line, {id, clock, bytes, nullptr, 0}); });
  }
  void agent_writes(const std::string& name, int device, uint64_t addr, uint64_t nbytes, const std::string& what) override {
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
    r.released = std::make_shared<Clock>(a.clock);
    each_part(addr, nbytes, [&](uint64_t line, const ByteMask& bytes) {
      r.bytes = bytes;
      put(line, r);
    });
    (void)what;
  }
  void agent_joined(const std::string& name, DispatchId finished) override {
    const uint32_t id = agent(name, 0);
    auto it = ended_at_.find(finished);
    actors_[id].clock.ended = std::max(actors_[id].clock.ended, it == ended_at_.end() ? seq_ : it->second);
  }
  void memory_released(uint64_t addr, uint64_t nbytes) override {
    if (nbytes) lines_.erase(addr / kLine, (addr + nbytes - 1) / kLine);
  }

 private:
  struct Touched {
    uint64_t line;
    ByteMask bytes;
    MemoryKind kind;
    int home;
    bool shared;
  };

  WaveState_& state(Wave& w) { return *static_cast<WaveState_*>(w.strict); }

  uint32_t agent(const std::string& name, int device) {
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

  // ---- registers
  static void set_bits(uint64_t* b, const RegisterRange& r, bool on) {
    for (unsigned i = r.first; i < r.first + r.count && i < 768u; ++i) {
      if (on) b[i / 64] |= 1ull << (i % 64);
      else b[i / 64] &= ~(1ull << (i % 64));
    }
  }
  void mark(WaveState_& s, const Pending& p) {
    if (!p.writes) return;
    for (const RegisterRange& r : *p.writes) set_bits(s.busy, r, true), s.any_busy = true;
  }
  void recount(WaveState_& s) {
    std::memset(s.busy, 0, sizeof s.busy);
    s.any_busy = false;
    for (const Pending& p : s.vm) mark(s, p);
    for (const Pending& p : s.lgkm) mark(s, p);
  }
  static const RegisterUse& use_of(const Op& op) {
    if (!op.registers) op.registers = keep(registers_of(op));
    return *static_cast<const RegisterUse*>(op.registers);
  }
  static Pending pending(Pending::Kind kind, uint64_t pc) {
    Pending p;
    p.kind = kind;
    p.pc = pc;
    return p;
  }
  void check_registers(Wave& w, WaveState_& s, const Op& op) {
    const RegisterUse& use = use_of(op);
    for (int writes = 0; writes < 2; ++writes)
      for (const RegisterRange& r : writes ? use.writes : use.reads)
        for (unsigned i = r.first; i < r.first + r.count && i < 768u; ++i) {
          if (!(s.busy[i / 64] >> (i % 64) & 1)) continue;
          busy_register(w, s, op, i, writes);
          return;
        }
  }
  void busy_register(Wave& w, WaveState_& s, const Op& op, unsigned reg, bool writes) {
    for (auto* q : {&s.vm, &s.lgkm})
      for (size_t n = 0; n < q->size(); ++n) {
        if (!(*q)[n].writes) continue;
        for (const RegisterRange& r : *(*q)[n].writes) {
          if (reg < r.first || reg >= r.first + r.count) continue;
          // Loads return in order: a second load into the same register is fine.
          if (writes && q == &s.vm && (op.category == Category::vmem || op.category == Category::flat)) continue;
          if (writes && q == &s.lgkm && op.category == Category::lds && (*q)[n].kind == Pending::ds) continue;
          const std::string name = reg < 128 ? "s" + std::to_string(reg) : reg < 512 ? "v" + std::to_string(reg - 256) : "a" + std::to_string(reg - 512);
          const char* count = q == &s.vm ? "vmcnt" : "lgkmcnt";
          const size_t left = q->size() - 1 - n;
          report("wait", w, op, w.pc, 0,
                 std::string(writes ? "overwrites " : "uses ") + name + " while the load " + instruction(w.code, (*q)[n].pc) + " into it is outstanding: needs s_waitcnt " +
                     count + "(" + std::to_string((*q)[n].kind == Pending::smem ? 0 : left) + ") before", w.code, (*q)[n].pc);
          return;
        }
      }
  }
  void wait(WaveState_& s, unsigned imm) {
    const unsigned vm = (imm & 15) | (imm >> 10 & 0x30), lgkm = imm >> 8 & 15;
    bool changed = false;
    if (vm != 63)
      while (s.vm.size() > vm) {
        arrive(s, s.vm.front());
        s.vm.pop_front();
        changed = true;
      }
    if (lgkm != 15) {
      bool scalar = false;
      for (const Pending& p : s.lgkm) scalar |= p.kind == Pending::smem;
      if (!scalar || lgkm == 0)
        while (s.lgkm.size() > lgkm) {
          LdsWave& l = s.lds->wave(s.index);
          l.ds_complete = std::max(l.ds_complete, s.lgkm.front().lds_number);
          s.lgkm.pop_front();
          changed = true;
        }
    }
    if (changed) recount(s);
  }
  void arrive(WaveState_& s, Pending& p) {
    s.complete = std::max(s.complete, p.clock);
    for (const ClockPtr& c : p.acquires) s.known.join(*c);
    if (p.kind == Pending::lds_dma) s.lds->wave(s.index).dma_complete = p.lds_number;
  }

  // ---- LDS
  uint32_t order_lds(Wave& w, WaveState_& s, const Op& op, LdsUse use, unsigned nbytes) {
    lds.use = use;
    lds.nbytes = nbytes;
    lds.pc = w.pc - op.nbytes;
    LdsWave& l = s.lds->wave(s.index);
    if (LdsConflict c; !s.lds->access(l, lds, &c))
      report(c.rule, w, op, lds.pc, c.offset, std::string(use == LdsUse::read ? "reads" : "writes") + " LDS at " + std::to_string(c.offset) + ", used with " +
             instruction(w.code, c.other_pc) + " " + c.why, w.code, c.other_pc);
    return use == LdsUse::dma ? l.dma_now : l.ds_now;
  }

  // ---- cache instructions
  void write_back(Wave& w, WaveState_& s, const Op& op) {
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
  void invalidate(WaveState_& s, const Op& op) {
    if (!op.sc1) return;
    s.agent_fresh = s.known;
    s.agent_fresh.raise(s.actor, s.complete);
    if (op.sc0) s.system_fresh = s.agent_fresh;
  }

  // ---- lines
  void touch(Wave& w, uint64_t addr, unsigned nbytes) {
    const uint64_t end = addr + nbytes;
    while (addr < end) {
      const uint64_t line = addr / kLine;
      const unsigned first = static_cast<unsigned>(addr % kLine), n = static_cast<unsigned>(std::min<uint64_t>(kLine - first, end - addr));
      Touched* t = nullptr;
      if (touched_.empty() || line <= highest_)  // lanes mostly go upwards
        for (size_t i = touched_.size(); i-- > 0;)
          if (touched_[i].line == line) { t = &touched_[i]; break; }
      if (!t) {
        const Region* r = region(w, addr);
        if (!r) return;
        touched_.push_back({line, {}, r->kind, r->home_device, r->shared});
        t = &touched_.back();
        highest_ = touched_.size() == 1 ? line : std::max(highest_, line);
      }
      t->bytes.set(first, n);
      addr += n;
    }
  }
  void gather(Wave& w, const VectorAccess& a) {
    touched_.clear();
    uncached_seen_ = false;
    for (unsigned i = 0; i < kLanes; ++i) {
      if (!(a.lanes >> i & 1)) continue;
      const uint64_t top = a.addr[i] >> 32;
      if (top == kSharedBase >> 32 || top == kPrivateBase >> 32) continue;
      touch(w, a.addr[i], a.nbytes);
    }
    for (const Touched& t : touched_) uncached_seen_ |= t.kind == MemoryKind::uncached || t.kind == MemoryKind::host;
  }
  const Region* region(Wave& w, uint64_t addr) {
    const int device = w.group->kernel->d.device;
    const uint64_t gen = ctx_.memory->generation();
    if (gen == region_generation_ && device == region_device_ && addr >= region_.begin && addr < region_.end) return &region_;
    if (!ctx_.memory->resolve(device, addr, &region_)) {
      region_generation_ = ~0ull;
      return nullptr;  // the access itself will fault
    }
    region_generation_ = gen;
    region_device_ = device;
    return &region_;
  }
  template <class F>
  static void each_part(uint64_t addr, uint64_t nbytes, F f) {
    for (uint64_t at = addr; at < addr + nbytes;) {
      const uint64_t line = at / kLine, first = at % kLine, n = std::min<uint64_t>(kLine - first, addr + nbytes - at);
      ByteMask m;
      m.set(static_cast<unsigned>(first), static_cast<unsigned>(n));
      f(line, m);
      at += n;
    }
  }
  template <class F>
  void each_record(uint64_t addr, uint64_t nbytes, F f) {
    if (lines_.empty()) return;
    each_part(addr, nbytes, [&](uint64_t line, const ByteMask& bytes) {
      Line* found = lines_.find(line);
      if (!found) return;
      for (Record& r : found->records)
        if (r.bytes.meets(bytes)) f(r);
    });
  }
  void note_readers(Wave& w, WaveState_& s, uint64_t pc, uint32_t clock) {
    for (const Touched& t : touched_)
      if (t.kind != MemoryKind::uncached && t.kind != MemoryKind::host) note_reader(t.line, {s.actor, clock, t.bytes, w.code, pc});
  }
  // Of a wave, the newest read counts for all bytes of the line that it has read. An engine fetches the packets of a line
  // one by one, and the place of the first may be given back while the last is being read: each keeps its own time.
  void note_reader(uint64_t line, const Reader& reader) {
    auto& v = lines_.at(line).readers;
    Reader newest = reader;
    for (size_t i = 0; i < v.size();) {
      if (v[i].actor == reader.actor) {
        if (reader.code) newest.bytes.add(v[i].bytes), v[i].bytes = {};
        else v[i].bytes.drop(reader.bytes);
      }
      if (v[i].bytes.empty()) v.erase(v.begin() + static_cast<long>(i));
      else ++i;
    }
    if (v.size() >= kReaders) v.erase(v.begin());
    v.push_back(newest);
  }
  // The store overwrites what another wave has read (or is reading) with nothing in between to order them.
  void check_readers(Wave& w, WaveState_& s, const Op& op, uint64_t pc, const Touched& t) {
    Line* line = lines_.find(t.line);
    if (!line) return;
    auto& v = line->readers;
    for (size_t i = 0; i < v.size();) {
      Reader& r = v[i];
      if (!r.bytes.meets(t.bytes)) { ++i; continue; }
      if (r.actor != s.actor && !knows(s.known, r.actor, r.clock))
        report("order", w, op, pc, t.line * kLine, "overwrites bytes of line " + hex(t.line * kLine) + " that " + actors_[r.actor].name + " read" +
               (r.code ? " with " + instruction(r.code, r.pc) + ": nothing orders the two, so that load may see either"
                       : ": nothing told this wave that the copy was over (its signal was not read, or not waited for)"), r.code, r.pc);
      r.bytes.drop(t.bytes);
      if (r.bytes.empty()) v.erase(v.begin() + static_cast<long>(i));
      else ++i;
    }
  }

  void put(uint64_t line, const Record& r) {
    auto& v = lines_.at(line).records;
    for (size_t i = 0; i < v.size();) {
      v[i].bytes.drop(r.bytes);
      if (v[i].bytes.empty()) v[i] = std::move(v.back()), v.pop_back();
      else ++i;
    }
    v.push_back(r);
  }

  // ---- knowledge
  bool knows_ended(const Clock& c, uint32_t actor) const { return actors_[actor].end_seq && actors_[actor].end_seq <= c.ended; }
  bool knows(const Clock& c, uint32_t actor, uint32_t clock) const { return knows_ended(c, actor) || c.get(actor) >= clock; }

  // With agent scope, the end of a kernel leaves other devices' lines dirty in the L2.
  bool end_publishes(const Record& r) const { return ctx_.options->end_of_kernel_publishes || r.home == r.device; }

  // A write-back on the writer's XCD that covers the store and that `by` knows to be done.
  bool published(const Record& r, const Clock& by, Scope need, std::string* why) const {
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

  void read_line(Wave& w, WaveState_& s, const Op& op, uint64_t pc, const Touched& t, Scope scope, bool atomic) {
    Line* line = lines_.find(t.line);
    if (t.shared && scope == Scope::plain && !atomic && t.kind != MemoryKind::uncached && t.kind != MemoryKind::host && (!line || line->records.empty()))
      from_outside(w, s, op, pc, t);
    if (!line) return;
    const Actor& me = actors_[s.actor];
    for (Record& r : line->records) {
      if (!r.bytes.meets(t.bytes)) continue;
      if (r.actor == s.actor) continue;
      const bool uncached = t.kind == MemoryKind::uncached || t.kind == MemoryKind::host;
      const bool coherent = scope != Scope::plain || atomic;
      if (r.released && (coherent || uncached)) acquired_.push_back(r.released);
      const Actor& writer = actors_[r.actor];
      // Written before this wave's kernel started, or by a kernel whose end it knows of: clean caches, clean memory.
      const bool ended = knows_ended(s.known, r.actor) && end_publishes(r);
      if (ended && knows_ended(s.system_fresh, r.actor)) continue;
      const bool engine = !writer.wave, far = engine || r.device != me.device || r.home != me.device || r.home != r.device;
      const uint64_t addr = t.line * kLine;
      if (uncached && !coherent && !ended && !knows(s.known, r.actor, r.clock)) {
        finding(engine ? "b" : "d", w, op, pc, addr, r,
                "a plain load of uncached memory, and nothing orders the store before it: the flag was not waited for, or was sent before the "
                "store was complete (a flag itself needs an atomic load)");
        continue;
      }
      if (coherent || uncached) {
        // A read that goes to memory itself. It may meet a store that has not got there.
        if (r.in_memory || ended || (r.device == me.device && r.xcd == me.xcd && writer.wave)) {
          if (atomic || !coherent || t.kind != MemoryKind::peer || scope == Scope::system) continue;
          reports_scope(w, op, pc, addr, r, "reads another device's memory with agent scope: the own L2 may hold an old copy (needs sc0 sc1)", "d");
          continue;
        }
        std::string why;
        if (published(r, s.known, far ? Scope::system : Scope::agent, &why)) continue;
        finding("c", w, op, pc, addr, r, "reads bytes still dirty in the L2 of XCD " + std::to_string(r.xcd) + " of device " + std::to_string(r.device) + ": " + why);
        continue;
      }
      // A read through the caches.
      const bool same_group = writer.wave && writer.group == me.group && writer.device == me.device && !writer.end_seq;
      if (!knows(s.known, r.actor, r.clock)) {
        auto seen = s.issued.find(r.actor);
        const bool before_barrier = seen != s.issued.end() && seen->second >= r.clock;
        const char* rule = engine ? "b" : same_group ? "c" : "d";
        finding(rule, w, op, pc, addr, r,
                before_barrier ? "the store was issued before the s_barrier but its wave did not wait for it (s_waitcnt vmcnt(0))"
                : same_group   ? "no s_barrier, or no s_waitcnt vmcnt(0) before it, orders the store of the other wave before this read"
                : r.atomic || r.released ? "a plain load of what another agent writes as a signal: needs scope bits, and s_waitcnt vmcnt(0) before what follows is relied on"
                               : "nothing orders the store before this read: the flag was read without scope bits or not waited for, or was sent before the store was complete");
        continue;
      }
      if (same_group) continue;
      const bool same_l2 = writer.wave && r.device == me.device && r.xcd == me.xcd;
      std::string why;
      if (!same_l2 && !r.in_memory && !ended && !published(r, s.known, far ? Scope::system : Scope::agent, &why)) {
        finding("c", w, op, pc, addr, r, "the bytes need not have left the L2 of XCD " + std::to_string(r.xcd) + " of device " + std::to_string(r.device) + ": " + why);
        continue;
      }
      const Clock& fresh = far ? s.system_fresh : s.agent_fresh;
      bool clean = knows(fresh, r.actor, r.clock);
      if (clean && !same_l2 && !r.in_memory && !knows_ended(fresh, r.actor)) clean = published(r, fresh, far ? Scope::system : Scope::agent, &why);
      if (!clean)
        finding(engine ? "b" : "d", w, op, pc, addr, r,
                std::string("a cached load after the signal may return an old copy: no buffer_inv ") + (far ? "sc0 sc1" : "sc1") +
                    " by this workgroup lies between reading the signal (and waiting for it) and this load");
    }
  }

  void from_outside(Wave& w, WaveState_& s, const Op& op, uint64_t pc, const Touched& t) {
    auto it = agents_.find("another process");
    if (it == agents_.end()) return;
    if (s.known.get(it->second) <= s.system_fresh.get(it->second)) return;
    report("d", w, op, pc, t.line * kLine, "at line " + hex(t.line * kLine) + ": a cached load of memory that other processes write, after a signal from outside was read: no buffer_inv sc0 sc1 "
           "by this workgroup lies between the two", nullptr, 0);
  }

  void write_lines(Wave& w, WaveState_& s, const Op& op, uint64_t pc, Scope scope, bool atomic, uint32_t clock, const VectorAccess& a) {
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
      check_readers(w, s, op, pc, t);
      check_engine_pointer(w, s, op, pc, t);
      r.home = static_cast<int16_t>(t.kind == MemoryKind::local ? me.device : t.home);
      r.bytes = t.bytes;
      r.in_memory = atomic || uncached || scope == Scope::system || (scope == Scope::agent && t.kind == MemoryKind::local);
      r.released = nullptr;
      if (atomic && t.kind == MemoryKind::peer && scope != Scope::system)
        report("scope", w, op, pc, t.line * kLine, "agent-scope read-modify-write on memory of device " + std::to_string(t.home) + " (needs sc1)", nullptr, 0);
      if (!atomic && t.kind == MemoryKind::peer && scope == Scope::system && a.nbytes < 4)
        report("scope", w, op, pc, t.line * kLine, "store of less than 4 bytes with sc0 sc1 to another device: partial lines lost updates on hardware", nullptr, 0);
      if (atomic || scope != Scope::plain || uncached) {
        if (!released) {
          auto c = std::make_shared<Clock>(s.known);
          c->raise(s.actor, s.complete);
          released = c;
        }
        r.released = released;
        // A signal is small; bulk data stored with system scope next to plain stores is none.
        if (a.nbytes <= 8 && __builtin_popcountll(t.bytes.w[0]) + __builtin_popcountll(t.bytes.w[1]) <= 8 && (atomic || scope == Scope::system)) flag_to_peer(w, s, op, pc, t);
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

  // A doorbell or write pointer that one wave after the other stores to: had the last one's store not arrived yet, it would
  // land on top of this one, and the engine would be told of less than it had been told before.
  void check_engine_pointer(Wave& w, WaveState_& s, const Op& op, uint64_t pc, const Touched& t) {
    const auto first = engine_pointers_.lower_bound(t.line * kLine);
    if (first == engine_pointers_.end() || *first >= (t.line + 1) * kLine) return;
    const Line* line = lines_.find(t.line);
    if (!line) return;
    for (const Record& r : line->records)
      if (r.bytes.meets(t.bytes) && r.actor != s.actor && actors_[r.actor].wave && !knows(s.known, r.actor, r.clock))
        finding("e", w, op, pc, t.line * kLine, r,
                "tells an engine how far its ring is filled, as the other wave did before, and nothing says that its store has "
                "arrived (s_waitcnt vmcnt(0) before it passed the turn on): the pointer may go back");
  }

  // Another process's device cannot be asked what it read: a signal to a peer is checked where it is sent.
  void flag_to_peer(Wave& w, WaveState_& s, const Op& op, uint64_t pc, const Touched& t) {
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
          finding("c", w, op, pc, t.line * kLine, r, "signals device " + std::to_string(t.home) + " although stores to its memory need not have arrived: " + why);
        }
      l = open ? std::next(l) : it->second.erase(l);
    }
  }

  // ---- reports
  std::string instruction(const Code* code, uint64_t pc) const {
    if (!code) return "?";
    std::string t = "'" + code->text(pc) + "' at pc " + hex(pc), l = code->line_of(pc);
    return l.empty() ? t : t + " (" + l + ")";
  }
  bool once(const std::string& rule, uint64_t pc, uint64_t other) { return seen_.insert({rule, {pc, other}}).second; }

  void report(const std::string& rule, Wave& w, const Op& op, uint64_t pc, uint64_t addr, const std::string& text, const Code*, uint64_t other) {
    if (!once(rule, pc, other) || reports.size() >= ctx_.options->max_reports) return;
    (void)op;
    Report r;
    r.rule = rule;
    r.kernel = w.group->kernel->d.name;
    r.device = w.group->kernel->d.device;
    r.pc = pc;
    r.addr = addr;
    r.text = "rule " + rule + ": " + actors_[state(w).actor].name + ": " + instruction(w.code, pc) + " " + text;
    reports.push_back(r);
  }
  void finding(const std::string& rule, Wave& w, const Op& op, uint64_t pc, uint64_t addr, const Record& r, const std::string& why) {
    const std::string by = actors_[r.actor].wave ? "stored by " + actors_[r.actor].name + ": " + instruction(r.code, r.pc) : "written by " + actors_[r.actor].name;
    report(rule, w, op, pc, addr, "at line " + hex(addr) + ", " + by + ". " + why, r.code, r.pc);
  }
  void reports_scope(Wave& w, const Op& op, uint64_t pc, uint64_t addr, const Record& r, const std::string& why, const char* rule) {
    finding(rule, w, op, pc, addr, r, why);
  }
  void report_agent(const std::string& rule, const std::string& name, int device, const std::string& what, uint64_t addr, const Record& r, const std::string& why) {
    if (!once(rule + name, r.pc, 0) || reports.size() >= ctx_.options->max_reports) return;
    Report p;
    p.rule = rule;
    p.device = device;
    p.kernel = actors_[r.actor].name;
    p.pc = r.pc;
    p.addr = addr;
    p.text = "rule " + rule + ": " + name + " (" + what + ") reads memory at " + hex(addr) + " stored by " + actors_[r.actor].name + ": " + instruction(r.code, r.pc) + ". " + why;
    reports.push_back(p);
  }

  ExecContext& ctx_;
  std::vector<Actor> actors_;
  std::map<std::string, uint32_t> agents_;
  std::unordered_map<const Wave*, std::unique_ptr<WaveState_>> states_;
  std::unordered_map<const Workgroup*, std::unique_ptr<LdsOrder>> groups_;
  std::unordered_map<DispatchId, std::vector<uint32_t>> waves_of_;
  std::unordered_map<DispatchId, Clock> starts_;
  std::unordered_map<DispatchId, uint64_t> ended_at_;
  std::map<std::pair<int, unsigned>, std::vector<WriteBack>> write_backs_;
  LineTable<Line> lines_;
  std::set<uint64_t> engine_pointers_;
  std::unordered_map<int, std::set<uint64_t>> to_peer_;  // lines with plain stores to that device
  std::unordered_map<uint64_t, uint64_t> signals_;  // last value seen of words that other processes write
  std::set<std::pair<std::string, std::pair<uint64_t, uint64_t>>> seen_;
  std::vector<Touched> touched_;  // by the instruction that is being carried out
  uint64_t highest_ = 0;           // line of them
  std::vector<ClockPtr> acquired_;
  bool uncached_seen_ = false;
  Region region_;
  uint64_t region_generation_ = ~0ull;
  int region_device_ = -1;
  uint64_t seq_ = 1;
};

}  // namespace

std::unique_ptr<Checker> make_checker(ExecContext& ctx) { return std::make_unique<StrictChecker>(ctx); }

}  // namespace mori_sim
