#include "coherence/lds_order.hpp"

#include <algorithm>
#include <new>

namespace mori_sim {
namespace {

constexpr unsigned kSignalLanes = 4;  // atomics of more lanes are sums, not signals

bool writes(LdsUse u) { return u != LdsUse::read; }
bool atomic(LdsUse u) { return u == LdsUse::atomic || u == LdsUse::atomic_return; }
std::string wave_name(unsigned i) { return "wave " + std::to_string(i) + " of the workgroup"; }

}  // namespace

void LdsOrder::make_cells(unsigned shift) {
  const size_t count = (nbytes_ >> shift) + 1;
  std::unique_ptr<Cell[], Free> made(static_cast<Cell*>(std::calloc(count, sizeof(Cell))));
  if (!made) throw std::bad_alloc();
  if (cells_)
    for (size_t i = 0; i < count; ++i) made[i] = cells_[i << shift >> shift_];
  cells_ = std::move(made);
  shift_ = shift;
}

bool LdsOrder::met_write(const LdsWave& w, const LdsAccess& a, const Cell& c, uint32_t at, LdsConflict* found) const {
  const unsigned by = c.who / 2;
  const bool dma = c.who & 1;
  if (a.use == LdsUse::dma && by == w.index) return false;  // DMAs of one wave land in order
  if (c.atomic && atomic(a.use)) return false;
  *found = {"lds", at, base_ + c.write_pc, ""};
  if (by == w.index) {
    found->rule = "wait";
    found->why = "while the DMA is outstanding: no s_waitcnt vmcnt of this wave covers it";
  } else if (c.written <= issued_[c.who]) {
    found->rule = "wait";
    found->why = "by " + wave_name(by) + ", which had not waited for it (" + (dma ? "s_waitcnt vmcnt" : "s_waitcnt lgkmcnt") + ") before the s_barrier";
  } else {
    found->why = "by " + wave_name(by) + ": no s_barrier lies between the two";
  }
  return true;
}

bool LdsOrder::met_reads(const LdsWave& w, const LdsAccess& a, const Cell& c, uint32_t at, LdsConflict* found) const {
  const unsigned others = c.readers & ~(1u << w.index | w.clock.synced);
  (void)a;
  if (c.interval != interval_ || !others) return false;
  *found = {"lds", at, base_ + c.read_pc, "by " + wave_name(static_cast<unsigned>(__builtin_ctz(others))) + ": no s_barrier lies between the two"};
  return true;
}

bool LdsOrder::met_open_read(const LdsWave& w, const LdsAccess& a, LdsConflict* found) const {
  for (const OpenRead& r : open_) {
    if (r.wave == w.index) continue;
    for (unsigned i = 0; i < a.count; ++i)
      for (unsigned k = 0; k < r.access.count; ++k)
        if (a.at[i] < r.access.at[k] + r.access.nbytes && r.access.at[k] < a.at[i] + a.nbytes) {
          *found = {"wait", a.at[i], r.access.pc, "by " + wave_name(r.wave) + ", which had not waited for it (s_waitcnt lgkmcnt) before the s_barrier"};
          return true;
        }
  }
  return false;
}

// Atomics on one cell hand over what their waves have done: each leaves its clock there, one that returns takes it.
void LdsOrder::hand_over(LdsWave& w, const LdsAccess& a, uint32_t cell) {
  LdsClock& there = released_[cell];
  LdsClock mine = w.clock;
  mine.known[2 * w.index] = w.ds_complete;
  mine.known[2 * w.index + 1] = w.dma_complete;
  mine.synced |= static_cast<uint16_t>(1u << w.index);
  if (a.use == LdsUse::atomic_return) w.clock.join(there);
  there.join(mine);
}

bool LdsOrder::access(LdsWave& w, const LdsAccess& a, LdsConflict* found) {
  bool narrow = a.nbytes & 3;
  for (unsigned i = 0; i < a.count; ++i) narrow |= (a.at[i] & 3) != 0;
  if (!cells_ || (narrow && shift_)) make_cells(narrow ? 0 : 2);
  const bool dma = a.use == LdsUse::dma, write = writes(a.use);
  const uint32_t number = dma ? ++w.dma_now : ++w.ds_now;
  const auto who = static_cast<uint8_t>(2 * w.index + dma);
  if (atomic(a.use) && a.count <= kSignalLanes)
    for (unsigned i = 0; i < a.count; ++i) hand_over(w, a, a.at[i] >> shift_);
  w.clock.known[2 * w.index] = ~0u;  // ds instructions of one wave are carried out in order
  w.clock.known[2 * w.index + 1] = w.dma_complete;
  if (!base_) base_ = a.pc - 0x80000000ull;
  const auto pc = static_cast<uint32_t>(a.pc - base_);
  const auto mine = static_cast<uint16_t>(1u << w.index);
  bool met = write && !open_.empty() && met_open_read(w, a, found);
  for (unsigned i = 0; i < a.count; ++i) {
    const uint32_t end = (a.at[i] + a.nbytes - 1) >> shift_;
    for (uint32_t at = a.at[i] >> shift_; at <= end; ++at) {
      Cell& c = cells_[at];
      if (!met && c.written > w.clock.known[c.who]) met = met_write(w, a, c, at << shift_, found);
      if (write) {
        if (!met && c.readers) met = met_reads(w, a, c, at << shift_, found);
        c = {number, pc, 0, 0, 0, who, atomic(a.use)};
        continue;
      }
      if (c.interval != interval_) c.interval = interval_, c.readers = 0;
      c.readers |= mine;
      c.read_pc = pc;
    }
  }
  return !met;
}

void LdsOrder::leave_open(const LdsWave& w, uint32_t number, const LdsAccess& read) {
  if (number > issued_[2 * w.index]) open_.push_back({w.index, number, read});
}

void LdsOrder::barrier() {
  LdsClock all;
  for (unsigned i = 0; i < num_waves_; ++i) {
    const LdsWave& w = waves_[i];
    all.known[2 * i] = w.ended ? ~0u : w.ds_complete;
    all.known[2 * i + 1] = w.ended ? ~0u : w.dma_complete;
    issued_[2 * i] = w.ds_now;
    issued_[2 * i + 1] = w.dma_now;
  }
  for (unsigned i = 0; i < num_waves_; ++i) waves_[i].clock = all;
  open_.erase(std::remove_if(open_.begin(), open_.end(), [&](const OpenRead& r) { return waves_[r.wave].ended || r.number <= waves_[r.wave].ds_complete; }), open_.end());
  released_.clear();
  ++interval_;
}

}  // namespace mori_sim
