// Who runs next, and for how long: a turn runs one wave until it yields (s_barrier, s_sleep, s_endpgm) or its slice is
// used up.
#include <algorithm>

#include "exec/hex.hpp"
#include "exec/machine_impl.hpp"

namespace mori_sim {
namespace {

bool runnable(const Wave& w) { return w.status == WaveStatus::runs; }

// VGPR indexing (s_set_gpr_idx_on): the instruction runs with its register numbers moved by M0.
void run_indexed(Wave& w, const Op& plain) {
  Op op = plain;
  const uint32_t m0 = w.s[kM0];
  auto shift = [&](uint16_t* r, unsigned bit) {
    if (*r >= kVgpr && *r < kAgpr && (m0 >> (12 + bit) & 1)) *r = static_cast<uint16_t>(*r + (m0 & 255));
  };
  for (unsigned k = 0; k < plain.num_src; ++k) shift(&op.src[k], k);
  shift(&op.dst, 3);
  for (uint16_t r : {op.dst, op.src[0], op.src[1], op.src[2]})
    if (r >= kAgpr && r < kAgpr + 256 && plain.dst < kAgpr) return w.stop("VGPR index leads past v255");
  op.run(w, op);
}

}  // namespace

const Code* Machine::Impl::code_at(uint64_t pc) const {
  for (const auto& c : codes)
    if (c->holds(pc)) return c.get();
  return nullptr;
}

template <bool strict>
unsigned Machine::Impl::turn_of(Wave& w, unsigned slice) {
  uint64_t by_category[12] = {};
  unsigned n = 0;
  w.yield = false;
  uint64_t pc = w.pc;
  while (n < slice) {
    pc = w.pc;
    if (!w.code || !w.code->holds(pc)) {
      const Code* other = code_at(pc);
      if (!other) {
        w.stop("jump to " + hex(pc) + ", where no code is loaded");
        break;
      }
      w.code = other;
    }
    Op* op = w.code->at(pc);
    if (!op) {
      w.stop("program counter is not aligned");
      break;
    }
    if (!op->run) {
      std::string why = bind(op);
      if (!why.empty()) {
        w.stop(why);
        break;
      }
    }
    if (strict) checker->before(w, *op);
    w.pc = pc + op->nbytes;
    ctx.ticks++;
    by_category[static_cast<int>(op->category)]++;
    ++n;
    if (w.indexes_vgprs && op->category == Category::valu) run_indexed(w, *op);
    else op->run(w, *op);
    if (w.yield) break;
  }
  Counters& c = *w.counters;
  c.instructions += n;
  c.valu += by_category[1];
  c.salu += by_category[2];
  c.mfma += by_category[3];
  c.vmem += by_category[4];
  c.smem += by_category[5];
  c.lds += by_category[6];
  c.flat += by_category[7];
  c.branch += by_category[8];
  c.other += by_category[11];
  if (w.status == WaveStatus::faulted) fail(w, pc);
  return n;
}

void Machine::Impl::after_turn(Wave& w) {
  Workgroup& g = *w.group;
  if (w.status == WaveStatus::barrier) g.arrived++;
  if (w.status == WaveStatus::ended) {
    if (checker) checker->wave_ends(w);
    g.alive--;
    ctx.progress++;
  }
  if (g.alive && g.arrived == g.alive) {
    if (checker) checker->barrier_released(g);
    g.arrived = 0;
    g.barriers++;
    ctx.progress++;
    for (Wave* o : g.waves)
      if (o->status == WaveStatus::barrier) o->status = WaveStatus::runs;
  }
  if (!g.alive) end_workgroup(g);
}

Wave* Machine::Impl::pick(unsigned* slice) {
  *slice = options.slice;
  const size_t n = waves.size();
  if (!n) return nullptr;
  if (options.order == Options::Order::random) {
    *slice = 1 + static_cast<unsigned>(random() % options.slice);
    const size_t first = random() % n;
    for (size_t i = 0; i < n; ++i)
      if (Wave* w = waves[(first + i) % n]; runnable(*w)) return w;
    return nullptr;
  }
  const bool delays = options.order == Options::Order::rank_delayed;
  Wave* asleep = nullptr;
  for (size_t i = 0; i < n; ++i) {
    if (++turn >= n) turn = 0, ++round;
    Wave* w = waves[turn];
    if (!runnable(*w)) continue;
    if (w->sleep_until > ctx.ticks) { if (!asleep) asleep = w; continue; }
    if (delays && w->group->kernel->d.rank == options.delayed_rank && round % options.delay_factor) { asleep = w; continue; }
    return w;
  }
  if (delays && asleep) {  // only the delayed rank could run: let it, but rarely
    *slice = 64;
  }
  return asleep;
}

Machine::State Machine::Impl::run(uint64_t budget) {
  if (!fault_text.empty()) return State::fault;
  uint64_t used = 0;
  fill();
  while (used < budget) {
    unsigned slice;
    Wave* w = pick(&slice);
    if (!w) break;
    const size_t before = groups.size();
    slice = static_cast<unsigned>(std::min<uint64_t>(slice, budget - used));
    used += checker ? turn_of<true>(*w, slice) : turn_of<false>(*w, slice);
    if (w->status == WaveStatus::faulted) break;
    if (w->status != WaveStatus::runs) after_turn(*w);
    if (checker && options.stop_at_first_report && !checker->reports.empty() && fault_text.empty()) fault_text = checker->reports.front().text;
    if (!fault_text.empty()) break;
    if (groups.size() != before) fill();
  }
  if (ctx.progress != seen_progress || waves.empty()) {
    seen_progress = ctx.progress;
    moved = Clock::now();
  }
  if (!fault_text.empty()) return State::fault;
  return waves.empty() && kernels.empty() ? State::idle : State::running;
}

}  // namespace mori_sim
