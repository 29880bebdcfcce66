// What a wave has issued and not waited for. A register that an outstanding load writes is busy: reading or overwriting it
// before a sufficient s_waitcnt is reported.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "coherence/strict_checker.hpp"

namespace mori_sim::strict {
namespace {

// As long as the process, like what bind() makes of an instruction: code may be used by several machines.
const RegisterUse* keep(RegisterUse use) {
  static std::mutex guard;
  static std::deque<RegisterUse> kept;
  std::lock_guard<std::mutex> lock(guard);
  kept.push_back(std::move(use));
  return &kept.back();
}

void set_bits(uint64_t* b, const RegisterRange& r, bool on) {
  for (unsigned i = r.first; i < r.first + r.count && i < 768u; ++i) {
    if (on) b[i / 64] |= 1ull << (i % 64);
    else b[i / 64] &= ~(1ull << (i % 64));
  }
}

}  // namespace

const RegisterUse& StrictChecker::use_of(const Op& op) {
  if (!op.registers) op.registers = keep(registers_of(op));
  return *static_cast<const RegisterUse*>(op.registers);
}

Pending StrictChecker::pending(Pending::Kind kind, uint64_t pc) {
  Pending p;
  p.kind = kind;
  p.pc = pc;
  return p;
}

void StrictChecker::mark(StrictWave& s, const Pending& p) {
  if (!p.writes) return;
  for (const RegisterRange& r : *p.writes) set_bits(s.busy, r, true), s.any_busy = true;
}

void StrictChecker::recount(StrictWave& s) {
  std::memset(s.busy, 0, sizeof s.busy);
  s.any_busy = false;
  for (const Pending& p : s.vm) mark(s, p);
  for (const Pending& p : s.lgkm) mark(s, p);
}

void StrictChecker::check_registers(Wave& w, StrictWave& s, const Op& op) {
  const RegisterUse& use = use_of(op);
  for (int writes = 0; writes < 2; ++writes)
    for (const RegisterRange& r : writes ? use.writes : use.reads)
      for (unsigned i = r.first; i < r.first + r.count && i < 768u; ++i) {
        if (!(s.busy[i / 64] >> (i % 64) & 1)) continue;
        busy_register(w, s, op, i, writes);
        return;
      }
}

void StrictChecker::busy_register(Wave& w, StrictWave& s, const Op& op, unsigned reg, bool writes) {
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
        report("wait", w, w.pc, 0,
               std::string(writes ? "overwrites " : "uses ") + name + " while the load " + instruction(w.code, (*q)[n].pc) + " into it is outstanding: needs s_waitcnt " +
                   count + "(" + std::to_string((*q)[n].kind == Pending::smem ? 0 : left) + ") before", (*q)[n].pc);
        return;
      }
    }
}

void StrictChecker::wait(StrictWave& s, unsigned imm) {
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

void StrictChecker::arrive(StrictWave& s, Pending& p) {
  s.complete = std::max(s.complete, p.clock);
  for (const ClockPtr& c : p.acquires) s.known.join(*c);
  if (p.kind == Pending::lds_dma) s.lds->wave(s.index).dma_complete = p.lds_number;
}

}  // namespace mori_sim::strict
