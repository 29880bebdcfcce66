// Vector ALU: fetches sources (splats, abs/neg, halves, SDWA, DPP), calls the lane kernel, applies clamp and omod,
// and merges the result under EXEC. The arithmetic itself is in lanes.inc.
#include <cfenv>
#include <cmath>

#include "exec/units.hpp"

namespace mori_sim {
namespace {

const OperandInfo& info_of(const Op& op, int k) { return k == 0 ? op.info->src0 : k == 1 ? op.info->src1 : op.info->src2; }
unsigned rows_of(unsigned bits) { return (bits + 31) / 32; }

// Lane that DPP reads for `lane`; -1: none.
int dpp_source(unsigned ctrl, unsigned lane) {
  const unsigned row = lane & ~15u, in = lane & 15u;
  if (ctrl < 0x100) return static_cast<int>((lane & ~3u) | (ctrl >> (2 * (lane & 3)) & 3));
  const unsigned n = ctrl & 15;
  if (ctrl < 0x110) return in + n < 16 ? static_cast<int>(lane + n) : -1;   // row_shl
  if (ctrl < 0x120) return in >= n ? static_cast<int>(lane - n) : -1;       // row_shr
  if (ctrl < 0x130) return static_cast<int>(row | ((in - n) & 15));         // row_ror
  switch (ctrl) {
    case 0x130: return lane < 63 ? static_cast<int>(lane + 1) : -1;         // wave_shl
    case 0x134: return static_cast<int>((lane + 1) & 63);                   // wave_rol
    case 0x138: return lane > 0 ? static_cast<int>(lane - 1) : -1;          // wave_shr
    case 0x13c: return static_cast<int>((lane - 1) & 63);                   // wave_ror
    case 0x140: return static_cast<int>(row | (15 - in));                   // row_mirror
    case 0x141: return static_cast<int>((lane & ~7u) | (7 - (lane & 7)));   // row_half_mirror
    case 0x142: return lane >= 16 ? static_cast<int>((row - 16) | 15) : -1; // row_bcast15
    case 0x143: return lane >= 32 ? 31 : -1;                                // row_bcast31
    default: break;
  }
  if (ctrl >= 0x150 && ctrl < 0x160) return static_cast<int>(row | n);      // row_newbcast
  return -2;
}

// Lanes a DPP instruction may write, and the shuffled source.
uint64_t dpp_fetch(Wave& w, const Op& op, const uint32_t* from, unsigned rows, uint32_t* to) {
  const unsigned ctrl = op.ext >> 8 & 0x1ff, row_mask = op.ext >> 28, bank_mask = op.ext >> 24 & 15;
  const bool zero = op.ext >> 19 & 1;
  const uint64_t exec = w.exec();
  uint64_t write = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    bool on = (row_mask >> (lane / 16) & 1) && (bank_mask >> (lane / 4 % 4) & 1);
    int s = dpp_source(ctrl, lane);
    if (s == -2) {
      w.stop("DPP control " + std::to_string(ctrl) + " does not exist on gfx950");
      return 0;
    }
    bool valid = s >= 0 && (exec >> s & 1);
    for (unsigned r = 0; r < rows; ++r) to[r * kLanes + lane] = valid ? from[r * kLanes + static_cast<unsigned>(s)] : 0;
    if (on && (valid || zero)) write |= 1ull << lane;
  }
  return write;
}

uint32_t sdwa_select(uint32_t v, unsigned sel, bool sext) {
  switch (sel) {
    case 0: case 1: case 2: case 3: {
      uint32_t b = v >> (8 * sel) & 255;
      return sext ? static_cast<uint32_t>(static_cast<int8_t>(b)) : b;
    }
    case 4: case 5: {
      uint32_t h = v >> (16 * (sel - 4)) & 0xffff;
      return sext ? static_cast<uint32_t>(static_cast<int16_t>(h)) : h;
    }
    default: return v;
  }
}

void modify(uint32_t* r, char type, bool abs, bool neg) {
  const unsigned at = type == 'd' ? kLanes : 0;
  const uint32_t sign = type == 'h' || type == 'b' ? 0x8000u : 0x80000000u;
  for (unsigned i = 0; i < kLanes; ++i) {
    uint32_t v = r[at + i];
    if (abs) v &= ~sign;
    if (neg) v ^= sign;
    r[at + i] = v;
  }
}

bool flushes_inputs(const Wave& w, char type) {
  unsigned den = type == 'f' || type == 'q' ? w.mode >> 4 & 3 : w.mode >> 6 & 3;
  return (type == 'f' || type == 'd' || type == 'h' || type == 'p' || type == 'q') && !(den & 1);
}
bool flushes_outputs(const Wave& w, char type) {
  unsigned den = type == 'f' || type == 'q' ? w.mode >> 4 & 3 : w.mode >> 6 & 3;
  return (type == 'f' || type == 'd' || type == 'h' || type == 'p' || type == 'q') && !(den & 2);
}
void flush_rows(uint32_t* r, char type) {
  for (unsigned i = 0; i < kLanes; ++i) {
    if (type == 'f') { if (!(r[i] & 0x7f800000u)) r[i] &= 0x80000000u; }
    else if (type == 'q') { for (unsigned k : {i, i + kLanes}) if (!(r[k] & 0x7f800000u)) r[k] &= 0x80000000u; }
    else if (type == 'd') { if (!(r[i + kLanes] & 0x7ff00000u)) r[i] = 0, r[i + kLanes] &= 0x80000000u; }
    else { if (!(r[i] & 0x7c00u)) r[i] &= ~0x3ffu; if (type == 'p' && !(r[i] & 0x7c000000u)) r[i] &= ~0x3ff0000u; }
  }
}

const uint32_t* splat(Wave& w, const Op& op, int k, char type, unsigned rows) {
  uint32_t* t = w.ctx->fetch[k];
  if (rows >= 2) {
    uint64_t v = read64(w, op, op.src[k], type);
    const uint32_t lo = static_cast<uint32_t>(v), hi = static_cast<uint32_t>(v >> 32);
    for (unsigned i = 0; i < kLanes; ++i) t[i] = lo;
    for (unsigned i = 0; i < kLanes; ++i) t[kLanes + i] = hi;
  } else {
    const uint32_t v = read32(w, op, op.src[k], type);
    for (unsigned i = 0; i < kLanes; ++i) t[i] = v;
  }
  return t;
}

// Packed operands: halves (or f32 halves of a pair) chosen by opsel/opsel_hi and signed by neg/neg_hi.
const uint32_t* packed_source(Wave& w, const Op& op, int k) {
  const OperandInfo& oi = info_of(op, k);
  const bool pairs = oi.bits == 64;
  const uint32_t* r = op.src[k] >= kVgpr ? w.row(op.src[k]) : splat(w, op, k, oi.type, pairs ? 2 : 1);
  if (oi.type == 'f') {  // the fp32 addend of a dot product
    if (!(op.neg >> k & 1)) return r;
    uint32_t* t = w.ctx->fetch[k];
    for (unsigned i = 0; i < kLanes; ++i) t[i] = r[i] ^ 0x80000000u;
    return t;
  }
  const bool lo = op.opsel >> k & 1, hi = op.opsel_hi >> k & 1, nl = op.neg >> k & 1, nh = op.neg_hi >> k & 1;
  uint32_t* t = w.ctx->fetch[k];
  if (pairs) {
    if (!lo && hi && !nl && !nh) return r;
    alignas(64) uint32_t c[2 * kLanes];
    std::memcpy(c, r, sizeof c);
    const uint32_t sl = nl ? 0x80000000u : 0, sh = nh ? 0x80000000u : 0;
    for (unsigned i = 0; i < kLanes; ++i) t[i] = c[(lo ? kLanes : 0) + i] ^ sl;
    for (unsigned i = 0; i < kLanes; ++i) t[kLanes + i] = c[(hi ? kLanes : 0) + i] ^ sh;
    return t;
  }
  if (!lo && hi && !nl && !nh) return r;
  const uint32_t sl = nl ? 0x8000u : 0, sh = nh ? 0x8000u : 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    uint32_t v = r[i];
    t[i] = (((lo ? v >> 16 : v) & 0xffff) ^ sl) | (((hi ? v >> 16 : v) & 0xffff) ^ sh) << 16;
  }
  return t;
}

struct RoundingScope {  // the host rounds as the wave's MODE says
  int old = -1;
  RoundingScope(const Wave& w, char type) {
    unsigned r = type == 'f' || type == 'q' ? w.mode & 3 : w.mode >> 2 & 3;
    if (r == 0 || type == 'i' || type == '-' || type == 'h' || type == 'p') return;
    static const int kHost[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    old = std::fegetround();
    std::fesetround(kHost[r]);
  }
  ~RoundingScope() {
    if (old >= 0) std::fesetround(old);
  }
};

float scaled(float v, unsigned omod) { return omod == 1 ? v * 2 : omod == 2 ? v * 4 : omod == 3 ? v / 2 : v; }

void clamp_and_scale(Wave& w, const Op& op, uint32_t* d, char type) {
  const bool dx10 = w.mode >> 8 & 1;
  // Output modifiers are ignored while the mode keeps output denormals.
  const unsigned omod = flushes_outputs(w, type) ? op.omod : 0;
  auto fix = [&](double v) { return v != v ? (dx10 ? 0.0 : v) : v < 0 ? 0.0 : v > 1 ? 1.0 : v; };
  for (unsigned i = 0; i < kLanes; ++i) {
    if (type == 'f' || type == 'q') {
      for (unsigned k = i; k < (type == 'q' ? 2 * kLanes : kLanes); k += kLanes) {
        float f;
        std::memcpy(&f, &d[k], 4);
        f = scaled(f, omod);
        if (op.clamp) f = static_cast<float>(fix(f)), f = f == 0 ? 0.f : f;
        std::memcpy(&d[k], &f, 4);
      }
    } else if (type == 'd') {
      double f;
      uint64_t u = d[i] | static_cast<uint64_t>(d[i + kLanes]) << 32;
      std::memcpy(&f, &u, 8);
      f = omod == 1 ? f * 2 : omod == 2 ? f * 4 : omod == 3 ? f / 2 : f;
      if (op.clamp) f = fix(f), f = f == 0 ? 0. : f;
      std::memcpy(&u, &f, 8);
      d[i] = static_cast<uint32_t>(u);
      d[i + kLanes] = static_cast<uint32_t>(u >> 32);
    } else if (op.clamp) {  // f16, one or two
      auto half = [&](uint32_t h) -> uint32_t {
        h &= 0xffff;
        if ((h & 0x7fff) > 0x7c00) return dx10 ? 0 : h;
        return h & 0x8000 ? 0 : h > 0x3c00 ? 0x3c00 : h;
      };
      d[i] = type == 'p' ? half(d[i]) | half(d[i] >> 16) << 16 : half(d[i]);
    }
  }
}

void set_mask(Wave& w, const Op& op, const LaneImpl& k, uint64_t m) {
  write64(w, op.sdst, m);
  if (k.flags & kCmpx) w.set_exec(m);
}

// The whole path; every instruction can take it.
void run_general(Wave& w, const Op& op) {
  const LaneImpl& k = *static_cast<const LaneImpl*>(op.impl);
  const OpInfo& info = *op.info;
  const bool packed = info.format == Format::vop3p && !(k.flags & kOwnModifiers);
  const bool own = k.flags & kOwnModifiers;
  uint64_t exec = w.exec(), write = exec;
  LaneCall c;
  const uint32_t* rows[3] = {nullptr, nullptr, nullptr};
  int n = op.num_src;
  if ((k.flags & kReadsMask) && n == 3) {
    c.mask_in = read64(w, op, op.src[2]);
    n = 2;
  }
  if (k.flags & kReadsVcc) c.mask_in = w.vcc();
  for (int s = 0; s < n; ++s) {
    const OperandInfo& oi = info_of(op, s);
    unsigned nr = rows_of(oi.bits ? oi.bits : 32);
    char type = oi.type == '-' ? info.src0.type : oi.type;
    if (packed) {
      rows[s] = packed_source(w, op, s);
    } else {
      const uint32_t* r = op.src[s] >= kVgpr ? w.row(op.src[s]) : splat(w, op, s, type, nr);
      const bool abs = !own && (op.abs >> s & 1), neg = !own && (op.neg >> s & 1);
      const bool high = !own && op.explicit_vop3 && oi.bits == 16 && (op.opsel >> s & 1);
      const bool sub = op.sdwa && s < 2, shuffled = op.dpp && s == 0;
      if (abs || neg || high || sub || shuffled) {
        uint32_t* t = w.ctx->fetch[s];
        if (shuffled) write &= dpp_fetch(w, op, r, nr, t);
        else if (t != r) std::memcpy(t, r, nr * kLanes * 4);
        if (w.status == WaveStatus::faulted) return;
        if (sub) {
          unsigned sel = op.ext >> (s ? 24 : 16) & 7;
          bool sext = op.ext >> (s ? 27 : 19) & 1;
          for (unsigned i = 0; i < kLanes; ++i) t[i] = sdwa_select(t[i], sel, sext);
        }
        if (high) for (unsigned i = 0; i < kLanes; ++i) t[i] >>= 16;
        if (abs || neg) modify(t, type == 'i' ? (oi.bits == 64 ? 'd' : 'f') : type, abs, neg);
        r = t;
      }
      // own-modifier conversions with f32 sources take abs/neg too (VOP3 fields)
      if (own && info.format == Format::vop3 && type == 'f' && ((op.abs | op.neg) >> s & 1) && std::strncmp(info.name, "v_bitop3", 8)) {
        uint32_t* t = w.ctx->fetch[s];
        if (t != r) std::memcpy(t, r, nr * kLanes * 4);
        modify(t, 'f', op.abs >> s & 1, op.neg >> s & 1);
        r = t;
      }
      rows[s] = r;
    }
    if (flushes_inputs(w, type) && type != 'i' && nr <= 2 && info.dst.type != 'i') {
      uint32_t* t = w.ctx->fetch[s];
      if (t != rows[s]) std::memcpy(t, rows[s], nr * kLanes * 4);
      flush_rows(t, type);
      rows[s] = t;
    }
  }
  const unsigned dst_rows = (k.flags & kNoResult) ? 0 : rows_of(info.dst.bits ? info.dst.bits : 32);
  c.a = rows[0];
  c.b = rows[1];
  c.c = rows[2];
  uint32_t* dst = dst_rows ? w.row(op.dst) : nullptr;
  c.old = dst;
  if (k.flags & kAccumulates) c.c = dst;
  c.op = &op;
  c.options = w.ctx->options;
  c.mode = w.mode;
  c.d = w.ctx->out;
  {
    RoundingScope scope(w, info.dst.type == '-' ? info.src0.type : info.dst.type);
    if (info.dst.type == 'q' && info.format == Format::vop3p) {  // v_pk_{fma,mul,add}_f32: the f32 kernel on each half
      k.fn(c);
      LaneCall h = c;
      h.a = c.a + kLanes;
      h.b = c.b + kLanes;
      h.c = c.c ? c.c + kLanes : nullptr;
      h.d = c.d + kLanes;
      k.fn(h);
    } else {
      k.fn(c);
    }
  }
  if (k.flags & (kWritesMask)) set_mask(w, op, k, c.mask_out & write);
  if (!dst_rows) return;
  const char dt = info.dst.type;
  if ((op.clamp || op.omod) && !own && (dt == 'f' || dt == 'd' || dt == 'h' || dt == 'p' || dt == 'q')) clamp_and_scale(w, op, c.d, dt);
  if (own && op.clamp && !std::strcmp(info.name, "v_mad_mix_f32")) clamp_and_scale(w, op, c.d, 'f');
  if (flushes_outputs(w, dt) && info.src0.type != 'i' && dst_rows <= 2) flush_rows(c.d, dt);
  if (op.sdwa) {
    const unsigned sel = op.ext >> 8 & 7, unused = op.ext >> 11 & 3;
    if (sel != 6)
      for (unsigned i = 0; i < kLanes; ++i) {
        const unsigned bits = sel < 4 ? 8 : 16, at = sel < 4 ? 8 * sel : 16 * (sel - 4);
        const uint32_t field = ((1u << bits) - 1) << at;
        uint32_t v = c.d[i] << at & field;
        if (unused == 2) v |= dst[i] & ~field;
        else if (unused == 1 && (v >> (at + bits - 1) & 1) && at + bits < 32) v |= ~0u << (at + bits);
        c.d[i] = v;
      }
  } else if (!own && op.explicit_vop3 && info.dst.bits == 16 && info.format == Format::vop3) {
    const bool high = op.opsel >> 3 & 1, keep = high || (k.flags & kPreserves);
    if (keep)
      for (unsigned i = 0; i < kLanes; ++i)
        c.d[i] = high ? (dst[i] & 0xffffu) | c.d[i] << 16 : (dst[i] & 0xffff0000u) | (c.d[i] & 0xffffu);
  }
  write_rows(w, op.dst, c.d, dst_rows, write);
}

// No modifiers, VGPR or scalar sources, float modes at their defaults: straight through.
void run_plain(Wave& w, const Op& op) {
  if ((w.mode & 0xff) != 0xf0) return run_general(w, op);  // round to nearest, denormals kept
  const LaneImpl& k = *static_cast<const LaneImpl*>(op.impl);
  const OpInfo& info = *op.info;
  LaneCall c;
  const int n = (k.flags & kReadsMask) && op.num_src == 3 ? 2 : op.num_src;
  if (n != op.num_src) c.mask_in = read64(w, op, op.src[2]);
  if (n > 0) c.a = op.src[0] >= kVgpr ? w.row(op.src[0]) : splat(w, op, 0, info.src0.type, rows_of(info.src0.bits));
  else c.a = nullptr;
  if (n > 1) c.b = op.src[1] >= kVgpr ? w.row(op.src[1]) : splat(w, op, 1, info.src1.type, rows_of(info.src1.bits));
  else c.b = nullptr;
  c.c = nullptr;
  if (n > 2) c.c = op.src[2] >= kVgpr ? w.row(op.src[2]) : splat(w, op, 2, info.src2.type == '-' ? info.src0.type : info.src2.type, rows_of(info.src2.bits ? info.src2.bits : info.src0.bits));
  c.op = &op;
  c.options = w.ctx->options;
  c.mode = w.mode;
  const uint64_t exec = w.exec();
  if (k.flags & kNoResult) {
    c.old = c.d = nullptr;
    k.fn(c);
    set_mask(w, op, k, c.mask_out & exec);
    return;
  }
  uint32_t* dst = w.row(op.dst);
  c.old = dst;
  if (k.flags & kAccumulates) c.c = dst;
  const unsigned rows = rows_of(info.dst.bits);
  const bool direct = exec == ~0ull && rows <= 2;
  c.d = direct ? dst : w.ctx->out;
  k.fn(c);
  if (k.flags & kWritesMask) set_mask(w, op, k, c.mask_out & exec);
  if (!direct) write_rows(w, op.dst, c.d, rows, exec);
}

bool is_plain(const Op& op, const LaneImpl& k) {
  if (op.sdwa || op.dpp || op.clamp || op.omod || (k.flags & (kOwnModifiers | kReadsVcc))) return false;
  if (op.info->format == Format::vop3p) return false;
  if (op.abs || op.neg) return false;
  if (op.opsel) return false;
  if (op.explicit_vop3 && (k.flags & kPreserves)) return false;
  // a wide result over a source that starts elsewhere would be read after it was written
  if (op.info->dst.bits > 32)
    for (int s = 0; s < op.num_src; ++s)
      if (op.src[s] >= kVgpr && op.src[s] != op.dst && op.src[s] + 1u >= op.dst && op.src[s] <= op.dst + 1u) return false;
  return true;
}

void run_nop(Wave&, const Op&) {}

}  // namespace

void write_rows(Wave& w, unsigned dst, const uint32_t* rows, unsigned n, uint64_t mask) {
  uint32_t* d = w.row(dst);
  if (mask == ~0ull) {
    std::memcpy(d, rows, n * kLanes * 4);
    return;
  }
  if (mask == w.exec()) {
    const uint32_t* m = w.mask();
    for (unsigned r = 0; r < n; ++r, d += kLanes, rows += kLanes)
      for (unsigned i = 0; i < kLanes; ++i) d[i] = (rows[i] & m[i]) | (d[i] & ~m[i]);
    return;
  }
  for (unsigned r = 0; r < n; ++r, d += kLanes, rows += kLanes)
    for (unsigned i = 0; i < kLanes; ++i) if (mask >> i & 1) d[i] = rows[i];
}

const uint32_t* source_rows(Wave& w, const Op& op, int k) {
  const OperandInfo& oi = info_of(op, k);
  return op.src[k] >= kVgpr ? w.row(op.src[k]) : splat(w, op, k, oi.type, rows_of(oi.bits ? oi.bits : 32));
}

RunFn vector_unit(Op* op) {
  const char* name = op->info->name;
  if (!std::strcmp(name, "v_nop") || !std::strcmp(name, "v_clrexcp")) return run_nop;
  std::string base = name;
  if (base == "v_pk_fma_f32") base = "v_fma_f32";
  else if (base == "v_pk_mul_f32") base = "v_mul_f32";
  else if (base == "v_pk_add_f32") base = "v_add_f32";
  const LaneImpl* k = lane_kernel(base.c_str());
  if (!k) return nullptr;
  op->impl = k;
  return is_plain(*op, *k) ? run_plain : run_general;
}

}  // namespace mori_sim
