// Which lines an access touches, and what is remembered of them: the last store of each byte, and the reads after it.
#include <algorithm>

#include "coherence/strict_checker.hpp"

namespace mori_sim::strict {

void StrictChecker::gather(Wave& w, const VectorAccess& a) {
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

void StrictChecker::touch(Wave& w, uint64_t addr, unsigned nbytes) {
  const uint64_t end = addr + nbytes;
  while (addr < end) {
    const uint64_t line = known_as(w, addr) / kLine;
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

uint64_t StrictChecker::known_as(Wave& w, uint64_t addr) {
  const Region* const r = ctx_.memory->aliased() ? region(w, addr) : nullptr;
  return r ? addr + r->shift : addr;
}

const Region* StrictChecker::region(Wave& w, uint64_t addr) {
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

void StrictChecker::put(uint64_t line, const Record& r) {
  auto& records = lines_.at(line).records;
  Line::drop(records, r.bytes);
  records.push_back(r);
}

void StrictChecker::note_readers(Wave& w, StrictWave& s, uint64_t pc, uint32_t clock) {
  for (const Touched& t : touched_)
    if (t.kind != MemoryKind::uncached && t.kind != MemoryKind::host) note_reader(t.line, {s.actor, clock, t.bytes, w.code, pc});
}

// Of a wave, the newest read counts for all bytes of the line that it has read. An engine fetches the packets of a line
// one by one, and the place of the first may be given back while the last is being read: each keeps its own time.
void StrictChecker::note_reader(uint64_t line, const Reader& reader) {
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

// What an engine has read must not be overwritten before its signal was seen.
void StrictChecker::note_engine_read(uint32_t id, uint64_t addr, uint64_t nbytes) {
  const uint32_t clock = ++actors_[id].now;
  each_part(addr, nbytes, [&](uint64_t line, const ByteMask& bytes) { note_reader(line, {id, clock, bytes, nullptr, 0}); });
}

}  // namespace mori_sim::strict
