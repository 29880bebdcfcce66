// LDS: reads, writes, atomics with and without return, and the lane permutes that go through its crossbar.
// Every access is checked against the workgroup's allocation.
#include <memory>
#include <mutex>

#include "coherence/checker.hpp"
#include "exec/atomics.hpp"
#include "exec/units.hpp"

namespace mori_sim {
namespace {

enum class Ds : uint8_t { read, write, read2, write2, rmw, rmw2, swizzle, permute, bpermute, transpose, read_tid, write_tid };

struct DsImpl {
  Ds what;
  uint8_t bytes = 4;      // per access
  bool sign = false, low = false, high = false, returns = false;
  uint16_t step = 0;      // read2/write2: bytes per offset count
  Rmw rmw = Rmw::none;
  uint8_t element_bits = 0;
};

bool has(const char* s, const char* part) { return std::strstr(s, part) != nullptr; }

uint8_t* at(Wave& w, const Op&, uint64_t off, unsigned n, bool write) {
  std::vector<uint8_t>& lds = w.group->lds;
  if (off + n > lds.size()) {
    w.stop(std::string(write ? "LDS write" : "LDS read") + " of " + std::to_string(n) + " bytes at offset " + std::to_string(off) +
           ", but the workgroup has " + std::to_string(lds.size()) + " bytes");
    return nullptr;
  }
  if (w.ctx->checker) w.ctx->checker->note_lds(off);
  return lds.data() + off;
}
void check(Wave& w, const Op& op, LdsUse use, unsigned nbytes) {
  if (w.ctx->checker) w.ctx->checker->lds_access(w, op, use, nbytes);
}

void read(Wave& w, const Op& op) {
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t* addr = w.row(op.src[0]);
  const uint32_t* old = w.row(op.dst);
  const uint64_t exec = w.exec();
  uint32_t* out = w.ctx->out;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    const uint8_t* p = at(w, op, static_cast<uint64_t>(addr[i]) + static_cast<uint32_t>(op.offset), m.bytes, false);
    if (!p) return;
    if (m.bytes >= 4) {
      for (unsigned k = 0; k < m.bytes / 4u; ++k) std::memcpy(&out[k * kLanes + i], p + 4 * k, 4);
      continue;
    }
    uint32_t v;
    if (m.bytes == 1) v = m.sign ? static_cast<uint32_t>(static_cast<int8_t>(*p)) : *p;
    else { uint16_t h; std::memcpy(&h, p, 2); v = m.sign ? static_cast<uint32_t>(static_cast<int16_t>(h)) : h; }
    out[i] = m.low ? (old[i] & 0xffff0000u) | (v & 0xffffu) : m.high ? (old[i] & 0xffffu) | v << 16 : v;
  }
  check(w, op, LdsUse::read, m.bytes);
  w.counters->lds_bytes += static_cast<uint64_t>(__builtin_popcountll(exec)) * m.bytes;
  write_rows(w, op.dst, out, m.bytes < 4 ? 1 : m.bytes / 4u, exec);
}

void write(Wave& w, const Op& op) {
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t* addr = w.row(op.src[0]);
  const uint32_t* data = w.row(op.src[1]);
  const uint64_t exec = w.exec();
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    uint8_t* p = at(w, op, static_cast<uint64_t>(addr[i]) + static_cast<uint32_t>(op.offset), m.bytes, true);
    if (!p) return;
    if (m.bytes >= 4) {
      for (unsigned k = 0; k < m.bytes / 4u; ++k) std::memcpy(p + 4 * k, &data[k * kLanes + i], 4);
    } else {
      const uint32_t v = m.high ? data[i] >> 16 : data[i];
      std::memcpy(p, &v, m.bytes);
    }
  }
  check(w, op, LdsUse::write, m.bytes);
  w.counters->lds_bytes += static_cast<uint64_t>(__builtin_popcountll(exec)) * m.bytes;
  w.ctx->progress++;
}

void read2(Wave& w, const Op& op) {
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t* addr = w.row(op.src[0]);
  const uint64_t exec = w.exec();
  uint32_t* out = w.ctx->out;
  const unsigned n = m.bytes / 4u;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    for (unsigned t = 0; t < 2; ++t) {
      const uint8_t* p = at(w, op, static_cast<uint64_t>(addr[i]) + (t ? op.offset1 : op.offset0) * m.step, m.bytes, false);
      if (!p) return;
      for (unsigned k = 0; k < n; ++k) std::memcpy(&out[(t * n + k) * kLanes + i], p + 4 * k, 4);
    }
  }
  check(w, op, LdsUse::read, m.bytes);
  w.counters->lds_bytes += static_cast<uint64_t>(__builtin_popcountll(exec)) * m.bytes * 2;
  write_rows(w, op.dst, out, 2 * n, exec);
}

void write2(Wave& w, const Op& op) {
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t* addr = w.row(op.src[0]);
  const uint64_t exec = w.exec();
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    for (unsigned t = 0; t < 2; ++t) {
      const uint32_t* data = w.row(op.src[1 + t]);
      uint8_t* p = at(w, op, static_cast<uint64_t>(addr[i]) + (t ? op.offset1 : op.offset0) * m.step, m.bytes, true);
      if (!p) return;
      for (unsigned k = 0; k < m.bytes / 4u; ++k) std::memcpy(p + 4 * k, &data[k * kLanes + i], 4);
    }
  }
  check(w, op, LdsUse::write, m.bytes);
  w.counters->lds_bytes += static_cast<uint64_t>(__builtin_popcountll(exec)) * m.bytes * 2;
  w.ctx->progress++;
}

bool rmw_lane(Wave& w, const Op& op, const DsImpl& m, unsigned i, uint64_t off, const uint32_t* d0, const uint32_t* d1, uint32_t* out) {
  uint8_t* p = at(w, op, off, m.bytes, true);
  if (!p) return false;
  // compare-and-swap: data0 is the comparand, data1 the new value
  const bool cmp = m.rmw == Rmw::cmpswap || m.rmw == Rmw::fcmpswap;
  if (m.bytes == 8) {
    uint64_t a = d0[i] | static_cast<uint64_t>(d0[kLanes + i]) << 32, b = d1 ? d1[i] | static_cast<uint64_t>(d1[kLanes + i]) << 32 : 0, old;
    std::memcpy(&old, p, 8);
    const uint64_t v = rmw_value<uint64_t, int64_t, double>(m.rmw, old, cmp ? b : a, cmp ? a : b);
    std::memcpy(p, &v, 8);
    out[i] = static_cast<uint32_t>(old);
    out[kLanes + i] = static_cast<uint32_t>(old >> 32);
  } else {
    uint32_t a = d0[i], b = d1 ? d1[i] : 0, old;
    std::memcpy(&old, p, 4);
    const uint32_t v = rmw_value<uint32_t, int32_t, float>(m.rmw, old, cmp ? b : a, cmp ? a : b);
    std::memcpy(p, &v, 4);
    out[i] = old;
  }
  return true;
}

void rmw(Wave& w, const Op& op) {
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t *addr = w.row(op.src[0]), *d0 = w.row(op.src[1]), *d1 = op.info->src2.bits ? w.row(op.src[2]) : nullptr;
  const uint64_t exec = w.exec();
  for (unsigned i = 0; i < kLanes; ++i)
    if (exec >> i & 1)
      if (!rmw_lane(w, op, m, i, static_cast<uint64_t>(addr[i]) + static_cast<uint32_t>(op.offset), d0, d1, w.ctx->out)) return;
  check(w, op, m.returns ? LdsUse::atomic_return : LdsUse::atomic, m.bytes);
  w.counters->lds_bytes += static_cast<uint64_t>(__builtin_popcountll(exec)) * m.bytes;
  w.ctx->progress++;
  if (m.returns) write_rows(w, op.dst, w.ctx->out, m.bytes / 4u, exec);
}

void rmw2(Wave& w, const Op& op) {  // ds_wrxchg2
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t* addr = w.row(op.src[0]);
  const uint64_t exec = w.exec();
  const unsigned n = m.bytes / 4u;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    for (unsigned t = 0; t < 2; ++t)
      if (!rmw_lane(w, op, m, i, static_cast<uint64_t>(addr[i]) + (t ? op.offset1 : op.offset0) * m.step, w.row(op.src[1 + t]), nullptr, w.ctx->out + t * n * kLanes)) return;
  }
  check(w, op, LdsUse::atomic_return, m.bytes);
  write_rows(w, op.dst, w.ctx->out, 2 * n, exec);
}

void swizzle(Wave& w, const Op& op) {
  const unsigned off = static_cast<unsigned>(op.offset);
  const uint32_t* src = w.row(op.src[0]);
  const uint64_t exec = w.exec();
  uint32_t* out = w.ctx->out;
  for (unsigned i = 0; i < kLanes; ++i) {
    unsigned from;
    if (off >= 0xe000) {  // FFT: reverse the low bits, unless 0x1f
      unsigned mask = off & 31, in = i & 31, rev = 0;
      for (unsigned b = 0; b < 5; ++b) rev |= (in >> b & 1) << (4 - b);
      from = mask == 31 ? i : (i & 32) | (((rev ^ 0) & ~mask & 31) | (in & mask));
      if (mask != 0 && mask != 31) return w.stop("ds_swizzle_b32 in FFT mode is only modelled for masks 0 and 31");
    } else if (off >= 0xc000) {  // rotate within 32 lanes
      unsigned n = off >> 5 & 31, keep = off & 31, in = i & 31;
      unsigned to = off & 0x400 ? in - n : in + n;
      from = (i & 32) | (in & keep) | (to & ~keep & 31);
    } else if (off & 0x8000) {   // quad permute
      from = (i & ~3u) | (off >> (2 * (i & 3)) & 3);
    } else {
      from = (i & 32) | ((((i & 31) & off) | (off >> 5)) ^ (off >> 10)) % 32;
      from = (i & 32) | (((((i & 31) & (off & 31)) | (off >> 5 & 31)) ^ (off >> 10 & 31)) & 31);
    }
    out[i] = exec >> from & 1 ? src[from] : 0;
  }
  write_rows(w, op.dst, out, 1, exec);
}

void permute(Wave& w, const Op& op) {
  const uint32_t *addr = w.row(op.src[0]), *src = w.row(op.src[1]);
  const uint64_t exec = w.exec();
  uint32_t* out = w.ctx->out;
  std::memset(out, 0, kLanes * 4);
  for (unsigned i = 0; i < kLanes; ++i)
    if (exec >> i & 1) out[(addr[i] + static_cast<uint32_t>(op.offset)) / 4 % kLanes] = src[i];
  write_rows(w, op.dst, out, 1, exec);
}

void bpermute(Wave& w, const Op& op) {
  const uint32_t *addr = w.row(op.src[0]), *src = w.row(op.src[1]);
  const uint64_t exec = w.exec();
  uint32_t* out = w.ctx->out;
  for (unsigned i = 0; i < kLanes; ++i) {
    const unsigned from = (addr[i] + static_cast<uint32_t>(op.offset)) / 4 % kLanes;
    out[i] = exec >> from & 1 ? src[from] : 0;
  }
  write_rows(w, op.dst, out, 1, exec);
}

// ds_read_*_tr_*: 16 lanes read a tile, lane c of them ends up with column c. Row r of the tile is what lanes
// r * 16 / rows ... hold together, in lane order.
void transpose(Wave& w, const Op& op) {
  const DsImpl& m = *static_cast<const DsImpl*>(op.impl);
  const uint32_t* addr = w.row(op.src[0]);
  const uint64_t exec = w.exec();
  if (exec != ~0ull) return w.stop("transposing LDS reads are only modelled with all lanes active");
  const unsigned bits = m.element_bits, per = m.bytes * 8u / bits, lanes_per_row = 16 / per ? 16 / per : 1;
  uint32_t* out = w.ctx->out;
  std::memset(out, 0, m.bytes / 4u * kLanes * 4);
  std::vector<uint32_t> in(3 * kLanes);
  for (unsigned i = 0; i < kLanes; ++i) {
    const uint8_t* p = at(w, op, static_cast<uint64_t>(addr[i]) + static_cast<uint32_t>(op.offset), m.bytes, false);
    if (!p) return;
    for (unsigned k = 0; k < m.bytes / 4u; ++k) std::memcpy(&in[k * kLanes + i], p + 4 * k, 4);
  }
  auto get = [&](unsigned lane, unsigned e) {
    const unsigned b = e * bits, k = b / 32, s = b % 32;
    uint64_t v = in[k * kLanes + lane];
    if (k + 1 < m.bytes / 4u) v |= static_cast<uint64_t>(in[(k + 1) * kLanes + lane]) << 32;
    return static_cast<uint32_t>(v >> s & ((1ull << bits) - 1));
  };
  for (unsigned g = 0; g < kLanes; g += 16)
    for (unsigned c = 0; c < 16; ++c)
      for (unsigned r = 0; r < per; ++r) {
        const uint32_t v = get(g + r * lanes_per_row + c / per, c % per);
        const unsigned b = r * bits, k = b / 32, s = b % 32;
        out[k * kLanes + g + c] |= v << s;
        if (s + bits > 32) out[(k + 1) * kLanes + g + c] |= v >> (32 - s);
      }
  check(w, op, LdsUse::read, m.bytes);
  w.counters->lds_bytes += kLanes * m.bytes;
  write_rows(w, op.dst, out, m.bytes / 4u, exec);
}

void read_tid(Wave& w, const Op& op) {
  const uint64_t exec = w.exec();
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    const uint8_t* p = at(w, op, (w.s[kM0] & 0xffff) + static_cast<uint32_t>(op.offset) + 4ull * i, 4, false);
    if (!p) return;
    std::memcpy(&w.ctx->out[i], p, 4);
  }
  check(w, op, LdsUse::read, 4);
  write_rows(w, op.dst, w.ctx->out, 1, exec);
}
void write_tid(Wave& w, const Op& op) {
  const uint64_t exec = w.exec();
  const uint32_t* data = w.row(op.src[1]);
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(exec >> i & 1)) continue;
    uint8_t* p = at(w, op, (w.s[kM0] & 0xffff) + static_cast<uint32_t>(op.offset) + 4ull * i, 4, true);
    if (!p) return;
    std::memcpy(p, &data[i], 4);
  }
  check(w, op, LdsUse::write, 4);
}
void nop(Wave&, const Op&) {}

}  // namespace

RunFn lds_unit(Op* op) {
  static std::vector<std::unique_ptr<DsImpl>> kept;
  const char* n = op->info->name;
  if (op->gds || has(n, "gws") || has(n, "append") || has(n, "consume") || has(n, "condxchg")) return nullptr;
  if (!std::strcmp(n, "ds_nop")) return nop;
  auto m = std::make_unique<DsImpl>();
  m->bytes = op->mem_bytes;
  m->returns = has(n, "_rtn");
  RunFn fn = nullptr;
  if (has(n, "swizzle")) fn = swizzle;
  else if (has(n, "bpermute")) fn = bpermute;
  else if (has(n, "permute")) fn = permute;
  else if (has(n, "_tr_b")) {
    m->bytes = has(n, "b96") ? 12 : 8;
    m->element_bits = has(n, "tr_b16") ? 16 : has(n, "tr_b8") ? 8 : has(n, "tr_b6") ? 6 : 4;
    fn = transpose;
  } else if (has(n, "read_addtid")) fn = read_tid;
  else if (has(n, "write_addtid")) fn = write_tid;
  else if (has(n, "read2") || has(n, "write2") || has(n, "wrxchg2")) {
    m->bytes = has(n, "b64") ? 8 : 4;
    m->step = static_cast<uint16_t>(m->bytes * (has(n, "st64") ? 64 : 1));
    m->rmw = Rmw::swap;
    fn = has(n, "read2") ? read2 : has(n, "write2") ? write2 : rmw2;
  } else if (has(n, "ds_read") || has(n, "ds_write")) {
    m->bytes = has(n, "b128") ? 16 : has(n, "b96") ? 12 : has(n, "b64") ? 8 : has(n, "b32") ? 4 : has(n, "b16") || has(n, "u16") || has(n, "i16") ? 2 : 1;
    m->sign = has(n, "_i8") || has(n, "_i16");
    m->high = has(n, "d16_hi");
    m->low = has(n, "d16") && !m->high;
    fn = has(n, "read") ? read : write;
  } else {
    m->rmw = rmw_of(n);
    m->bytes = has(n, "64") ? 8 : 4;
    if (m->rmw == Rmw::none) return nullptr;
    fn = rmw;
  }
  static std::mutex guard;
  std::lock_guard<std::mutex> lock(guard);
  kept.push_back(std::move(m));
  op->impl = kept.back().get();
  return fn;
}

}  // namespace mori_sim
