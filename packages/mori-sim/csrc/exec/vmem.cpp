// Vector memory: MUBUF, GLOBAL, FLAT, SCRATCH; loads into registers or straight into LDS, stores, atomics, and the
// cache instructions. Data moves at once; what hardware may delay or cache is the checker's business (strict mode).
//
// Memory is shared with other threads and processes: aligned dwords are read and written atomically, system-scope
// accesses carry fences, read-modify-writes are host atomics.
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>

#include "coherence/checker.hpp"
#include "exec/atomics.hpp"
#include "exec/units.hpp"

namespace mori_sim {

uint8_t* resolve(Wave& w, uint64_t addr, uint64_t nbytes, bool write, const Region** region) {
  ExecContext& c = *w.ctx;
  const uint64_t gen = c.memory->generation();
  for (RegionCache& e : w.cache) {
    if (e.generation == gen && addr >= e.region.begin && addr < e.region.end) {
      if (addr + nbytes > e.region.end) break;
      if (write && !e.region.writable) break;
      if (region) *region = &e.region;
      return e.region.host + (addr - e.region.begin);
    }
  }
  Region r;
  char text[160];
  if (!c.memory->resolve(w.group->kernel->d.device, addr, &r)) {
    std::snprintf(text, sizeof text, "%s %llu bytes at 0x%llx: nothing is mapped there", write ? "store of" : "load of",
                  static_cast<unsigned long long>(nbytes), static_cast<unsigned long long>(addr));
    w.stop(text);
    return nullptr;
  }
  if (addr < r.begin || addr + nbytes > r.end) {
    std::snprintf(text, sizeof text, "%s %llu bytes at 0x%llx runs past the end of its allocation [0x%llx, 0x%llx)",
                  write ? "store of" : "load of", static_cast<unsigned long long>(nbytes), static_cast<unsigned long long>(addr),
                  static_cast<unsigned long long>(r.begin), static_cast<unsigned long long>(r.end));
    w.stop(text);
    return nullptr;
  }
  if (write && !r.writable) {
    std::snprintf(text, sizeof text, "store to read-only memory at 0x%llx", static_cast<unsigned long long>(addr));
    w.stop(text);
    return nullptr;
  }
  w.cache[1] = w.cache[0];
  w.cache[0].region = r;
  w.cache[0].generation = gen;
  if (region) *region = &w.cache[0].region;
  return r.host + (addr - r.begin);
}

namespace {

enum class Move : uint8_t { load, store, rmw, cache };
enum class Place : uint8_t { whole, low, high };  // of a sub-dword value in its register

struct MemImpl {  // what bind() found out about the instruction
  Move move;
  uint8_t bytes;    // per lane
  bool sign = false;
  Place place = Place::whole;
  Rmw rmw = Rmw::none;
};

bool has(const char* s, const char* part) { return std::strstr(s, part) != nullptr; }

const MemImpl* describe(const Op& op) {
  static std::vector<std::unique_ptr<MemImpl>> kept;  // one per decoded instruction kind would do; they are tiny
  const char* n = op.info->name;
  auto m = std::make_unique<MemImpl>();
  m->bytes = op.mem_bytes;
  if (has(n, "wbl2") || has(n, "buffer_inv")) {
    m->move = Move::cache;
  } else if (has(n, "atomic")) {
    m->move = Move::rmw;
    m->rmw = rmw_of(n);
    if (m->rmw == Rmw::none) return nullptr;
  } else {
    if (has(n, "format")) return nullptr;
    m->move = has(n, "store") ? Move::store : Move::load;
    m->sign = has(n, "sbyte") || has(n, "sshort");
    m->place = has(n, "d16_hi") ? Place::high : has(n, "d16") ? Place::low : Place::whole;
    if (m->move == Move::store && m->place == Place::low) m->place = Place::whole;
  }
  static std::mutex guard;
  std::lock_guard<std::mutex> lock(guard);
  kept.push_back(std::move(m));
  return kept.back().get();
}

struct Lanes {  // where each lane's data lies
  uint64_t addr[kLanes];
  uint64_t active = 0;             // takes part at all
  unsigned valid[kLanes];          // bytes inside the buffer (MUBUF); m.bytes elsewhere
  bool partial = false;            // some lane has fewer valid bytes than asked
};

bool buffer_addresses(Wave& w, const Op& op, unsigned nbytes, Lanes* l) {
  const uint32_t* d = &w.s[op.srsrc];
  const uint64_t base = (d[0] | static_cast<uint64_t>(d[1]) << 32) & 0xffffffffffffull;
  const unsigned stride = d[1] >> 16 & 0x3fff;
  const bool swizzle = d[1] >> 31, add_tid = d[3] >> 23 & 1;
  const uint32_t records = d[2];
  if (swizzle || add_tid) {
    w.stop("buffer descriptor with swizzle or add_tid_enable is not modelled");
    return false;
  }
  const uint32_t soff = read32(w, op, op.soffset);
  const uint32_t* v0 = w.row(op.src[0]);
  const uint32_t* voff = op.offen ? (op.idxen ? v0 + kLanes : v0) : nullptr;
  const uint32_t* vidx = op.idxen ? v0 : nullptr;
  l->active = w.exec();
  for (unsigned i = 0; i < kLanes; ++i) {
    const uint64_t off = static_cast<uint64_t>(voff ? voff[i] : 0) + static_cast<uint32_t>(op.offset);
    const uint64_t index = vidx ? vidx[i] : 0;
    l->addr[i] = base + soff + off + index * stride;
    unsigned ok = nbytes;
    if (stride == 0 || !op.idxen) {      // raw: bytes, the scalar offset counts
      const uint64_t first = off + soff;
      if (first + nbytes > records) ok = first >= records ? 0 : static_cast<unsigned>((records - first) & ~3ull);
      if (nbytes < 4 && ok < nbytes) ok = 0;
    } else if (index >= records || off + nbytes > stride) {
      ok = 0;
    }
    l->valid[i] = ok;
    l->partial |= ok != nbytes;
  }
  return true;
}

bool flat_addresses(Wave& w, const Op& op, unsigned nbytes, Lanes* l) {
  const uint32_t* v = w.row(op.src[0]);
  l->active = w.exec();
  const Format f = op.info->format;
  const bool saddr = f != Format::flat && op.saddr != 0x7f;
  if (f == Format::scratch) {
    const uint32_t s = saddr ? w.s[op.saddr] : 0;
    for (unsigned i = 0; i < kLanes; ++i)
      l->addr[i] = kPrivateBase + static_cast<uint32_t>(s + (op.sve ? v[i] : 0) + static_cast<uint32_t>(op.offset));
  } else if (saddr) {
    const uint64_t base = w.s[op.saddr] | static_cast<uint64_t>(w.s[op.saddr + 1]) << 32;
    for (unsigned i = 0; i < kLanes; ++i) l->addr[i] = base + v[i] + static_cast<int64_t>(op.offset);
  } else {
    for (unsigned i = 0; i < kLanes; ++i)
      l->addr[i] = (v[i] | static_cast<uint64_t>(v[i + kLanes]) << 32) + static_cast<int64_t>(op.offset);
  }
  for (unsigned i = 0; i < kLanes; ++i) l->valid[i] = nbytes;
  return true;
}

bool addresses(Wave& w, const Op& op, unsigned nbytes, Lanes* l) {
  return op.info->format == Format::mubuf ? buffer_addresses(w, op, nbytes, l) : flat_addresses(w, op, nbytes, l);
}

// Host bytes of one lane; LDS and scratch apertures included.
uint8_t* lane_bytes(Wave& w, unsigned lane, uint64_t addr, unsigned nbytes, bool write, const Region** region) {
  const uint64_t aperture = addr >> 32;
  if (aperture == kSharedBase >> 32) {
    const uint64_t off = addr - kSharedBase;
    if (off + nbytes > w.group->lds.size()) {
      w.stop("flat access to LDS offset " + std::to_string(off) + " of " + std::to_string(w.group->lds.size()));
      return nullptr;
    }
    *region = nullptr;
    if (w.ctx->checker) w.ctx->checker->note_lds(off);
    return w.group->lds.data() + off;
  }
  if (aperture == kPrivateBase >> 32) {
    const uint64_t off = addr - kPrivateBase, per = w.scratch.size() / kLanes;
    if (off + nbytes > per) {
      w.stop("scratch access at offset " + std::to_string(off) + " of " + std::to_string(per) + " bytes per lane");
      return nullptr;
    }
    *region = nullptr;
    return w.scratch.data() + lane * per + off;
  }
  return resolve(w, addr, nbytes, write, region);
}

uint32_t load_dword(const uint8_t* p) {
  if (!(reinterpret_cast<uintptr_t>(p) & 3)) return __atomic_load_n(reinterpret_cast<const uint32_t*>(p), __ATOMIC_RELAXED);
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
void store_dword(uint8_t* p, uint32_t v) {
  if (!(reinterpret_cast<uintptr_t>(p) & 3)) __atomic_store_n(reinterpret_cast<uint32_t*>(p), v, __ATOMIC_RELAXED);
  else std::memcpy(p, &v, 4);
}

void count_bytes(Wave& w, const Region* r, uint64_t n) {
  Counters& c = *w.counters;
  if (!r) { c.lds_bytes += n; return; }
  switch (r->kind) {
    case MemoryKind::local: c.local_bytes += n; break;
    case MemoryKind::peer: c.peer_bytes += n; break;
    case MemoryKind::host: c.host_bytes += n; break;
    case MemoryKind::uncached: c.uncached_bytes += n; break;
  }
}

void note_poll(Wave& w, const Op& op, uint64_t addr, uint64_t value) {
  if (w.polled_addr == addr && w.polled_value == value && w.poll_pc == w.pc) {
    w.polls++;
    return;
  }
  if (w.polled_addr == addr && w.polled_value != value) w.ctx->progress++;
  w.polled_addr = addr;
  w.polled_value = value;
  w.poll_pc = w.pc;
  w.polls = 1;
  (void)op;
}

void check_lds(Wave& w, const Op& op, LdsUse use, unsigned nbytes) {  // of flat accesses that went to LDS
  if (w.ctx->checker && w.ctx->checker->lds.count) w.ctx->checker->lds_access(w, op, use, nbytes);
}

VectorAccess access_of(const Lanes& l, unsigned nbytes) {
  VectorAccess a{};
  a.addr = l.addr;
  a.lanes = l.active;
  if (l.partial)
    for (unsigned i = 0; i < kLanes; ++i) if (l.valid[i] == 0) a.lanes &= ~(1ull << i);
  a.nbytes = nbytes;
  return a;
}

void run_load(Wave& w, const Op& op) {
  const MemImpl& m = *static_cast<const MemImpl*>(op.impl);
  Lanes l;
  if (!addresses(w, op, m.bytes, &l)) return;
  const bool strict = w.ctx->checker;
  VectorAccess a{};
  if (strict) {
    a = access_of(l, m.bytes);
    a.load = true;
    w.ctx->checker->vector_access(w, op, a);
  }
  const Region* r = nullptr;
  uint64_t moved = 0;
  uint32_t* out = w.ctx->out;
  if (m.bytes >= 4) {
    const unsigned n = m.bytes / 4;
    for (unsigned i = 0; i < kLanes; ++i) {
      if (!(l.active >> i & 1)) continue;
      const unsigned ok = l.valid[i] / 4;
      if (ok < n) for (unsigned k = ok; k < n; ++k) out[k * kLanes + i] = 0;
      if (!ok) continue;
      const uint8_t* p = lane_bytes(w, i, l.addr[i], ok * 4, false, &r);
      if (!p) return;
      for (unsigned k = 0; k < ok; ++k) out[k * kLanes + i] = load_dword(p + 4 * k);
      moved += ok * 4;
    }
    write_rows(w, op.dst, out, n, l.active);
  } else {
    const uint32_t* old = w.row(op.dst);
    for (unsigned i = 0; i < kLanes; ++i) {
      if (!(l.active >> i & 1)) continue;
      uint32_t v = 0;
      if (l.valid[i]) {
        const uint8_t* p = lane_bytes(w, i, l.addr[i], m.bytes, false, &r);
        if (!p) return;
        if (m.bytes == 1) v = m.sign ? static_cast<uint32_t>(static_cast<int8_t>(*p)) : *p;
        else { uint16_t h; std::memcpy(&h, p, 2); v = m.sign ? static_cast<uint32_t>(static_cast<int16_t>(h)) : h; }
        moved += m.bytes;
      }
      out[i] = m.place == Place::low ? (old[i] & 0xffff0000u) | (v & 0xffffu) : m.place == Place::high ? (old[i] & 0xffffu) | v << 16 : v;
    }
    write_rows(w, op.dst, out, 1, l.active);
  }
  count_bytes(w, r, moved);
  if ((op.sc0 || op.sc1) && l.active) {
    std::atomic_thread_fence(std::memory_order_acquire);
    const unsigned first = static_cast<unsigned>(__builtin_ctzll(l.active));
    note_poll(w, op, l.addr[first], out[first] | (m.bytes >= 8 ? static_cast<uint64_t>(out[first + kLanes]) << 32 : 0));
  } else if (!l.active || (r && r->kind != MemoryKind::uncached)) {
    // plain loads do not count as polls
  } else if (l.active) {
    const unsigned first = static_cast<unsigned>(__builtin_ctzll(l.active));
    note_poll(w, op, l.addr[first], out[first]);
  }
  if (strict) w.ctx->checker->vector_done(w, op, a, out), check_lds(w, op, LdsUse::read, m.bytes);
}

void run_load_lds(Wave& w, const Op& op) {  // lane i's data goes to M0 + offset + i * bytes
  const MemImpl& m = *static_cast<const MemImpl*>(op.impl);
  Lanes l;
  if (!addresses(w, op, m.bytes, &l)) return;
  const unsigned slot = m.bytes < 4 ? 4 : m.bytes;
  const uint32_t base = w.s[kM0] + static_cast<uint32_t>(op.offset);
  std::vector<uint8_t>& lds = w.group->lds;
  if (!l.active) return;
  const unsigned last = 63 - static_cast<unsigned>(__builtin_clzll(l.active));
  if (static_cast<uint64_t>(base) + (last + 1) * slot > lds.size())
    return w.stop("LDS DMA to offset " + std::to_string(base) + " + " + std::to_string((last + 1) * slot) + " bytes, but the workgroup has " + std::to_string(lds.size()));
  const bool strict = w.ctx->checker;
  VectorAccess a{};
  if (strict) {
    a = access_of(l, m.bytes);
    a.load = a.to_lds = true;
    a.lds_offset = base;
    a.lds_slot = slot;
    w.ctx->checker->vector_access(w, op, a);
  }
  const Region* r = nullptr;
  uint64_t moved = 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(l.active >> i & 1)) continue;
    uint8_t* to = lds.data() + base + i * slot;
    if (l.valid[i] < m.bytes) std::memset(to, 0, slot);
    if (!l.valid[i]) continue;
    const uint8_t* p = lane_bytes(w, i, l.addr[i], l.valid[i], false, &r);
    if (!p) return;
    if (m.bytes >= 4) {
      std::memcpy(to, p, l.valid[i]);
    } else {
      uint32_t v = m.bytes == 1 ? (m.sign ? static_cast<uint32_t>(static_cast<int8_t>(*p)) : *p) : 0;
      if (m.bytes == 2) { uint16_t h; std::memcpy(&h, p, 2); v = m.sign ? static_cast<uint32_t>(static_cast<int16_t>(h)) : h; }
      std::memcpy(to, &v, 4);
    }
    moved += l.valid[i];
  }
  count_bytes(w, r, moved);
  w.counters->lds_bytes += moved;
  if (strict) w.ctx->checker->vector_done(w, op, a, nullptr);
}

void run_store(Wave& w, const Op& op) {
  const MemImpl& m = *static_cast<const MemImpl*>(op.impl);
  Lanes l;
  if (!addresses(w, op, m.bytes, &l)) return;
  const uint32_t* data = w.row(op.src[1]);
  if (w.ctx->checker) {
    VectorAccess a = access_of(l, m.bytes);
    a.store = true;
    a.data = data;
    w.ctx->checker->vector_access(w, op, a);
  }
  const Region* r = nullptr;
  uint64_t moved = 0;
  if (op.sc0 || op.sc1) std::atomic_thread_fence(std::memory_order_release);
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(l.active >> i & 1) || !l.valid[i]) continue;
    uint8_t* p = lane_bytes(w, i, l.addr[i], l.valid[i], true, &r);
    if (!p) return;
    moved += l.valid[i];
    if (m.bytes >= 4) {
      if (m.bytes == 8 && l.valid[i] == 8 && !(reinterpret_cast<uintptr_t>(p) & 7)) {
        __atomic_store_n(reinterpret_cast<uint64_t*>(p), data[i] | static_cast<uint64_t>(data[kLanes + i]) << 32, __ATOMIC_RELAXED);
        continue;
      }
      for (unsigned k = 0; k < l.valid[i] / 4; ++k) store_dword(p + 4 * k, data[k * kLanes + i]);
    } else {
      const uint32_t v = m.place == Place::high ? data[i] >> 16 : data[i];
      if (m.bytes == 1) *p = static_cast<uint8_t>(v);
      else { const uint16_t h = static_cast<uint16_t>(v); std::memcpy(p, &h, 2); }
    }
  }
  count_bytes(w, r, moved);
  w.ctx->progress++;
  check_lds(w, op, LdsUse::write, m.bytes);
}

template <class U, class I, class F>
U host_rmw(uint8_t* p, Rmw op, U data, U data2) {
  U* at = reinterpret_cast<U*>(p);
  U old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, rmw_value<U, I, F>(op, old, data, data2), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
  return old;
}

void run_rmw(Wave& w, const Op& op) {
  const MemImpl& m = *static_cast<const MemImpl*>(op.impl);
  Lanes l;
  if (!addresses(w, op, m.bytes, &l)) return;
  VectorAccess a{};
  if (w.ctx->checker) {
    a = access_of(l, m.bytes);
    a.atomic = true;
    w.ctx->checker->vector_access(w, op, a);
  }
  const uint32_t* data = w.row(op.src[1]);
  const bool wide = m.bytes == 8, cmp = m.rmw == Rmw::cmpswap;
  uint32_t* out = w.ctx->out;
  const Region* r = nullptr;
  uint64_t changed = 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(l.active >> i & 1)) continue;
    out[i] = out[kLanes + i] = 0;
    if (l.valid[i] < m.bytes) continue;
    uint8_t* p = lane_bytes(w, i, l.addr[i], m.bytes, true, &r);
    if (!p) return;
    if (reinterpret_cast<uintptr_t>(p) & (m.bytes - 1u)) return w.stop("atomic on an address that is not aligned to " + std::to_string(m.bytes) + " bytes");
    w.counters->atomics++;
    if (wide) {
      const uint64_t v = data[i] | static_cast<uint64_t>(data[kLanes + i]) << 32;
      const uint64_t v2 = cmp ? data[2 * kLanes + i] | static_cast<uint64_t>(data[3 * kLanes + i]) << 32 : 0;
      const uint64_t old = host_rmw<uint64_t, int64_t, double>(p, m.rmw, v, v2);
      changed |= old ^ __atomic_load_n(reinterpret_cast<uint64_t*>(p), __ATOMIC_RELAXED);
      out[i] = static_cast<uint32_t>(old);
      out[kLanes + i] = static_cast<uint32_t>(old >> 32);
    } else {
      out[i] = host_rmw<uint32_t, int32_t, float>(p, m.rmw, data[i], cmp ? data[kLanes + i] : 0);
      changed |= out[i] ^ __atomic_load_n(reinterpret_cast<uint32_t*>(p), __ATOMIC_RELAXED);
    }
  }
  count_bytes(w, r, static_cast<uint64_t>(__builtin_popcountll(l.active)) * m.bytes);
  if (changed) w.ctx->progress++;
  if (l.active) {
    const unsigned first = static_cast<unsigned>(__builtin_ctzll(l.active));
    note_poll(w, op, l.addr[first], out[first] | (wide ? static_cast<uint64_t>(out[first + kLanes]) << 32 : 0));
  }
  if (op.sc0) write_rows(w, op.dst, out, wide ? 2 : 1, l.active);
  if (w.ctx->checker) w.ctx->checker->vector_done(w, op, a, out);
  check_lds(w, op, op.sc0 ? LdsUse::atomic_return : LdsUse::atomic, m.bytes);
}

void run_cache(Wave&, const Op&) { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace

RunFn vector_memory_unit(Op* op) {
  if (op->info->format == Format::mtbuf) return nullptr;
  const MemImpl* m = describe(*op);
  if (!m) return nullptr;
  op->impl = m;
  switch (m->move) {
    case Move::load: return op->lds ? run_load_lds : run_load;
    case Move::store: return run_store;
    case Move::rmw: return run_rmw;
    case Move::cache: return run_cache;
  }
  return nullptr;
}

}  // namespace mori_sim
