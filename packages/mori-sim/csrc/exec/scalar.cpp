// Scalar unit: SOP1, SOP2, SOPC, SOPK, SOPP, and the program counter.
#include <chrono>
#include <unordered_map>

#include "exec/units.hpp"

namespace mori_sim {
namespace {

using I32 = int32_t;
using U32 = uint32_t;
using U64 = uint64_t;
using I64 = int64_t;

// Operand shapes: S0/S1 32 or 64 bits, result likewise; the last template argument says what SCC becomes.
enum class Scc { keep, nonzero, own };

template <class R, class A, class B, Scc scc, class F>
struct Sop2 {
  static void run(Wave& w, const Op& op) {
    A a = sizeof(A) == 8 ? static_cast<A>(read64(w, op, op.src[0])) : static_cast<A>(read32(w, op, op.src[0]));
    B b = sizeof(B) == 8 ? static_cast<B>(read64(w, op, op.src[1])) : static_cast<B>(read32(w, op, op.src[1]));
    bool s = w.scc;
    R r = F{}(a, b, s);
    if (sizeof(R) == 8) write64(w, op.dst, static_cast<U64>(r));
    else write32(w, op.dst, static_cast<U32>(r));
    if (scc == Scc::nonzero) w.scc = r != 0;
    if (scc == Scc::own) w.scc = s;
  }
};

template <class R, class A, Scc scc, class F>
struct Sop1 {
  static void run(Wave& w, const Op& op) {
    A a = sizeof(A) == 8 ? static_cast<A>(read64(w, op, op.src[0])) : static_cast<A>(read32(w, op, op.src[0]));
    bool s = w.scc;
    R old = sizeof(R) == 8 ? static_cast<R>(op.dst < 127 ? read64(w, op, op.dst) : 0) : static_cast<R>(w.s[op.dst & 127]);
    R r = F{}(a, old, s);
    if (sizeof(R) == 8) write64(w, op.dst, static_cast<U64>(r));
    else write32(w, op.dst, static_cast<U32>(r));
    if (scc == Scc::nonzero) w.scc = r != 0;
    if (scc == Scc::own) w.scc = s;
  }
};

template <class A, class F>
struct Sopc {
  static void run(Wave& w, const Op& op) {
    A a = sizeof(A) == 8 ? static_cast<A>(read64(w, op, op.src[0])) : static_cast<A>(read32(w, op, op.src[0]));
    A b = sizeof(A) == 8 ? static_cast<A>(read64(w, op, op.src[1])) : static_cast<A>(read32(w, op, op.src[1]));
    w.scc = F{}(a, b);
  }
};

template <class F>
struct Sopk {  // F(old, imm, scc) -> value written; compares only set scc
  static void run(Wave& w, const Op& op) {
    bool s = w.scc;
    U32 r = F{}(w.s[op.dst & 127], static_cast<I32>(op.simm16), s);
    write32(w, op.dst, r);
    w.scc = s;
  }
};

template <class F>
struct SaveExec {
  static void run(Wave& w, const Op& op) {
    U64 a = read64(w, op, op.src[0]), e = w.exec();
    U64 r = F{}(a, e);
    write64(w, op.dst, e);
    w.set_exec(r);
    w.scc = r != 0;
  }
};
template <class F>
struct WriteExec {
  static void run(Wave& w, const Op& op) {
    U64 r = F{}(read64(w, op, op.src[0]), w.exec());
    w.set_exec(r);
    write64(w, op.dst, r);
    w.scc = r != 0;
  }
};

template <class T> T shift(T v, U32 n, bool left) {
  n &= sizeof(T) * 8 - 1;
  return left ? static_cast<T>(static_cast<typename std::make_unsigned<T>::type>(v) << n) : static_cast<T>(v >> n);
}
template <class T> T field(T v, U32 at, U32 width) {  // unsigned or signed bit field
  const U32 n = sizeof(T) * 8;
  if (width == 0) return 0;
  if (at >= n) at &= n - 1;
  if (at + width >= n) return static_cast<T>(v >> at);
  return static_cast<T>(static_cast<T>(static_cast<typename std::make_unsigned<T>::type>(v) << (n - at - width)) >> (n - width));
}

#define OP2(name, R, A, B, scc, expr) \
  struct F_##name { R operator()(A a, B b, bool& s) const { (void)s; (void)a; (void)b; return expr; } }; \
  const auto run_##name = &Sop2<R, A, B, Scc::scc, F_##name>::run;
#define OP1(name, R, A, scc, expr) \
  struct F_##name { R operator()(A a, R old, bool& s) const { (void)s; (void)a; (void)old; return expr; } }; \
  const auto run_##name = &Sop1<R, A, Scc::scc, F_##name>::run;
#define OPC(name, A, expr) \
  struct F_##name { bool operator()(A a, A b) const { return expr; } }; \
  const auto run_##name = &Sopc<A, F_##name>::run;
#define OPK(name, expr) \
  struct F_##name { U32 operator()(U32 d, I32 k, bool& s) const { (void)s; (void)d; return expr; } }; \
  const auto run_##name = &Sopk<F_##name>::run;
#define SAVE(name, expr) \
  struct F_##name { U64 operator()(U64 a, U64 e) const { return expr; } }; \
  const auto run_##name = &SaveExec<F_##name>::run;
#define WREXEC(name, expr) \
  struct F_##name { U64 operator()(U64 a, U64 e) const { return expr; } }; \
  const auto run_##name = &WriteExec<F_##name>::run;

OP2(s_add_u32, U32, U32, U32, own, (s = (U64(a) + b) >> 32 != 0, a + b))
OP2(s_sub_u32, U32, U32, U32, own, (s = b > a, a - b))
OP2(s_add_i32, U32, U32, U32, own, (s = ((a ^ (a + b)) & (b ^ (a + b))) >> 31, a + b))
OP2(s_sub_i32, U32, U32, U32, own, (s = ((a ^ b) & (a ^ (a - b))) >> 31, a - b))
U32 addc(U32 a, U32 b, bool& s) { U64 t = U64(a) + b + s; s = t >> 32 != 0; return U32(t); }
U32 subb(U32 a, U32 b, bool& s) { bool in = s; s = U64(b) + in > a; return a - b - in; }
OP2(s_addc_u32, U32, U32, U32, own, addc(a, b, s))
OP2(s_subb_u32, U32, U32, U32, own, subb(a, b, s))
OP2(s_min_i32, I32, I32, I32, own, (s = a < b, a < b ? a : b))
OP2(s_min_u32, U32, U32, U32, own, (s = a < b, a < b ? a : b))
OP2(s_max_i32, I32, I32, I32, own, (s = a >= b, a >= b ? a : b))
OP2(s_max_u32, U32, U32, U32, own, (s = a >= b, a >= b ? a : b))
OP2(s_cselect_b32, U32, U32, U32, keep, s ? a : b)
OP2(s_cselect_b64, U64, U64, U64, keep, s ? a : b)
#define LOGIC(op, expr) OP2(s_##op##_b32, U32, U32, U32, nonzero, expr) OP2(s_##op##_b64, U64, U64, U64, nonzero, expr)
LOGIC(and, a & b) LOGIC(or, a | b) LOGIC(xor, a ^ b) LOGIC(andn2, a & ~b) LOGIC(orn2, a | ~b)
LOGIC(nand, ~(a & b)) LOGIC(nor, ~(a | b)) LOGIC(xnor, ~(a ^ b))
OP2(s_lshl_b32, U32, U32, U32, nonzero, shift(a, b, true))
OP2(s_lshl_b64, U64, U64, U32, nonzero, shift(a, b, true))
OP2(s_lshr_b32, U32, U32, U32, nonzero, shift(a, b, false))
OP2(s_lshr_b64, U64, U64, U32, nonzero, shift(a, b, false))
OP2(s_ashr_i32, I32, I32, U32, nonzero, shift(a, b, false))
OP2(s_ashr_i64, I64, I64, U32, nonzero, shift(a, b, false))
OP2(s_bfm_b32, U32, U32, U32, keep, ((1u << (a & 31)) - 1u) << (b & 31))
OP2(s_bfm_b64, U64, U32, U32, keep, ((1ull << (a & 63)) - 1ull) << (b & 63))
OP2(s_mul_i32, U32, U32, U32, keep, a * b)
OP2(s_bfe_u32, U32, U32, U32, nonzero, field(a, b & 31, b >> 16 & 127))
OP2(s_bfe_i32, I32, I32, U32, nonzero, field(a, b & 31, b >> 16 & 127))
OP2(s_bfe_u64, U64, U64, U32, nonzero, field(a, b & 63, b >> 16 & 127))
OP2(s_bfe_i64, I64, I64, U32, nonzero, field(a, b & 63, b >> 16 & 127))
OP2(s_absdiff_i32, U32, U32, U32, nonzero, (I32(a - b) < 0 ? 0u - (a - b) : a - b))
OP2(s_mul_hi_u32, U32, U32, U32, keep, U32(U64(a) * b >> 32))
OP2(s_mul_hi_i32, I32, I32, I32, keep, I32(I64(a) * b >> 32))
#define SHADD(n) OP2(s_lshl##n##_add_u32, U32, U32, U32, own, (s = ((U64(a) << n) + b) >> 32 != 0, (a << n) + b))
SHADD(1) SHADD(2) SHADD(3) SHADD(4)
OP2(s_pack_ll_b32_b16, U32, U32, U32, keep, (a & 0xffff) | b << 16)
OP2(s_pack_lh_b32_b16, U32, U32, U32, keep, (a & 0xffff) | (b & 0xffff0000u))
OP2(s_pack_hh_b32_b16, U32, U32, U32, keep, (a >> 16) | (b & 0xffff0000u))

OP1(s_mov_b32, U32, U32, keep, a) OP1(s_mov_b64, U64, U64, keep, a)
OP1(s_cmov_b32, U32, U32, keep, s ? a : old) OP1(s_cmov_b64, U64, U64, keep, s ? a : old)
OP1(s_not_b32, U32, U32, nonzero, ~a) OP1(s_not_b64, U64, U64, nonzero, ~a)
template <class T> T wqm(T a) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; i += 4) if (a >> i & 15) r |= T(15) << i;
  return r;
}
template <class T> T quadmask(T a) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; i += 4) if (a >> i & 15) r |= T(1) << (i / 4);
  return r;
}
template <class T> T reversed(T a) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) r = T(r << 1) | (a >> i & 1);
  return r;
}
I32 first_one(U64 a) { return a ? __builtin_ctzll(a) : -1; }
I32 leading(U32 a) { return a ? __builtin_clz(a) : -1; }
I32 leading(U64 a) { return a ? __builtin_clzll(a) : -1; }
OP1(s_wqm_b32, U32, U32, nonzero, wqm(a)) OP1(s_wqm_b64, U64, U64, nonzero, wqm(a))
OP1(s_quadmask_b32, U32, U32, nonzero, quadmask(a)) OP1(s_quadmask_b64, U64, U64, nonzero, quadmask(a))
OP1(s_brev_b32, U32, U32, keep, reversed(a)) OP1(s_brev_b64, U64, U64, keep, reversed(a))
OP1(s_bcnt0_i32_b32, U32, U32, nonzero, U32(32 - __builtin_popcount(a)))
OP1(s_bcnt0_i32_b64, U32, U64, nonzero, U32(64 - __builtin_popcountll(a)))
OP1(s_bcnt1_i32_b32, U32, U32, nonzero, U32(__builtin_popcount(a)))
OP1(s_bcnt1_i32_b64, U32, U64, nonzero, U32(__builtin_popcountll(a)))
OP1(s_ff0_i32_b32, I32, U32, keep, first_one(~a)) OP1(s_ff0_i32_b64, I32, U64, keep, first_one(~a))
OP1(s_ff1_i32_b32, I32, U32, keep, first_one(a)) OP1(s_ff1_i32_b64, I32, U64, keep, first_one(a))
OP1(s_flbit_i32_b32, I32, U32, keep, leading(a)) OP1(s_flbit_i32_b64, I32, U64, keep, leading(a))
OP1(s_flbit_i32, I32, I32, keep, leading(U32(a < 0 ? ~a : a))) OP1(s_flbit_i32_i64, I32, I64, keep, leading(U64(a < 0 ? ~a : a)))
OP1(s_sext_i32_i8, I32, U32, keep, int8_t(a)) OP1(s_sext_i32_i16, I32, U32, keep, int16_t(a))
OP1(s_bitset0_b32, U32, U32, keep, old & ~(1u << (a & 31))) OP1(s_bitset1_b32, U32, U32, keep, old | 1u << (a & 31))
OP1(s_bitset0_b64, U64, U32, keep, old & ~(1ull << (a & 63))) OP1(s_bitset1_b64, U64, U32, keep, old | 1ull << (a & 63))
OP1(s_abs_i32, U32, U32, nonzero, I32(a) < 0 ? 0u - a : a)
U64 replicate(U32 a) {
  U64 r = 0;
  for (unsigned i = 0; i < 32; ++i) r |= U64(a >> i & 1) * 3 << (2 * i);
  return r;
}
OP1(s_bitreplicate_b64_b32, U64, U32, keep, replicate(a))
SAVE(s_and_saveexec_b64, a & e) SAVE(s_or_saveexec_b64, a | e) SAVE(s_xor_saveexec_b64, a ^ e)
SAVE(s_andn2_saveexec_b64, a & ~e) SAVE(s_orn2_saveexec_b64, a | ~e) SAVE(s_nand_saveexec_b64, ~(a & e))
SAVE(s_nor_saveexec_b64, ~(a | e)) SAVE(s_xnor_saveexec_b64, ~(a ^ e))
SAVE(s_andn1_saveexec_b64, ~a & e) SAVE(s_orn1_saveexec_b64, ~a | e)
WREXEC(s_andn1_wrexec_b64, ~a & e) WREXEC(s_andn2_wrexec_b64, a & ~e)

OPC(s_cmp_eq_i32, U32, a == b) OPC(s_cmp_lg_i32, U32, a != b) OPC(s_cmp_gt_i32, I32, a > b) OPC(s_cmp_ge_i32, I32, a >= b)
OPC(s_cmp_lt_i32, I32, a < b) OPC(s_cmp_le_i32, I32, a <= b)
OPC(s_cmp_eq_u32, U32, a == b) OPC(s_cmp_lg_u32, U32, a != b) OPC(s_cmp_gt_u32, U32, a > b) OPC(s_cmp_ge_u32, U32, a >= b)
OPC(s_cmp_lt_u32, U32, a < b) OPC(s_cmp_le_u32, U32, a <= b)
OPC(s_cmp_eq_u64, U64, a == b) OPC(s_cmp_lg_u64, U64, a != b)
OPC(s_bitcmp0_b32, U32, !(a >> (b & 31) & 1)) OPC(s_bitcmp1_b32, U32, a >> (b & 31) & 1)
template <bool one> void bitcmp64(Wave& w, const Op& op) {
  w.scc = (read64(w, op, op.src[0]) >> (read32(w, op, op.src[1]) & 63) & 1) == one;
}

OPK(s_movk_i32, U32(k)) OPK(s_cmovk_i32, s ? U32(k) : d)
OPK(s_cmpk_eq_i32, (s = I32(d) == k, d)) OPK(s_cmpk_lg_i32, (s = I32(d) != k, d)) OPK(s_cmpk_gt_i32, (s = I32(d) > k, d))
OPK(s_cmpk_ge_i32, (s = I32(d) >= k, d)) OPK(s_cmpk_lt_i32, (s = I32(d) < k, d)) OPK(s_cmpk_le_i32, (s = I32(d) <= k, d))
OPK(s_cmpk_eq_u32, (s = d == (U32(k) & 0xffff), d)) OPK(s_cmpk_lg_u32, (s = d != (U32(k) & 0xffff), d))
OPK(s_cmpk_gt_u32, (s = d > (U32(k) & 0xffff), d)) OPK(s_cmpk_ge_u32, (s = d >= (U32(k) & 0xffff), d))
OPK(s_cmpk_lt_u32, (s = d < (U32(k) & 0xffff), d)) OPK(s_cmpk_le_u32, (s = d <= (U32(k) & 0xffff), d))
OPK(s_addk_i32, (s = ((d ^ (d + U32(k))) & (U32(k) ^ (d + U32(k)))) >> 31, d + U32(k)))
OPK(s_mulk_i32, d * U32(k))

// ---- program counter. Wave::pc already points behind the instruction.
void jump(Wave& w, uint64_t target) { w.pc = target; }
template <int what> void branch(Wave& w, const Op& op) {
  bool take = what == 0 || (what == 1 && !w.scc) || (what == 2 && w.scc) || (what == 3 && w.vcc() == 0) ||
              (what == 4 && w.vcc() != 0) || (what == 5 && w.exec() == 0) || (what == 6 && w.exec() != 0);
  if (take) jump(w, w.pc + 4 * static_cast<int64_t>(op.simm16));
}
void getpc(Wave& w, const Op& op) { write64(w, op.dst, w.pc); }
void setpc(Wave& w, const Op& op) { jump(w, read64(w, op, op.src[0])); }
void swappc(Wave& w, const Op& op) {
  uint64_t to = read64(w, op, op.src[0]);
  write64(w, op.dst, w.pc);
  jump(w, to);
}
void call(Wave& w, const Op& op) {
  write64(w, op.dst, w.pc);
  jump(w, w.pc + 4 * static_cast<int64_t>(op.simm16));
}

void nop(Wave&, const Op&) {}
void endpgm(Wave& w, const Op&) {
  w.status = WaveStatus::ended;
  w.yield = true;
}
void barrier(Wave& w, const Op&) {
  w.counters->barriers++;
  w.status = WaveStatus::barrier;
  w.yield = true;
}
void sleep(Wave& w, const Op& op) {  // 64 clocks per count on hardware; here: let the others run
  w.counters->waits++;
  w.sleep_until = w.ctx->ticks + static_cast<uint64_t>(op.simm16 & 127) * 8;
  w.yield = true;
}
void wait(Wave& w, const Op&) { w.counters->waits++; }
void trap(Wave& w, const Op& op) { w.stop("the kernel trapped (s_trap " + std::to_string(op.simm16 & 255) + ")"); }

// ---- hardware registers
uint32_t read_hwreg(Wave& w, unsigned id, bool* known) {
  *known = true;
  switch (id) {
    case 1: return w.mode;
    case 2: return static_cast<uint32_t>(w.scc);                         // status, scc only
    case 3: return 0;                                                    // trap status
    case 4: return (w.index & 15) | (w.group->cu % 16) << 8;             // HW_ID: wave, cu
    case 5: return 0;                                                    // GPR alloc
    case 6: return static_cast<uint32_t>((w.group->lds.size() + 511) / 512) << 12;
    case 20: return w.group->xcd;                                        // XCC_ID
    default: *known = false; return 0;
  }
}
void getreg(Wave& w, const Op& op) {
  unsigned imm = static_cast<uint16_t>(op.simm16);
  bool known;
  uint32_t v = read_hwreg(w, imm & 63, &known);
  if (!known) return w.stop("hardware register " + std::to_string(imm & 63) + " is not modelled");
  unsigned size = (imm >> 11) + 1;
  v >>= imm >> 6 & 31;
  write32(w, op.dst, size == 32 ? v : v & ((1u << size) - 1));
}
void set_hwreg(Wave& w, const Op& op, uint32_t v) {
  unsigned imm = static_cast<uint16_t>(op.simm16), at = imm >> 6 & 31, size = (imm >> 11) + 1;
  if ((imm & 63) != 1) return w.stop("writing hardware register " + std::to_string(imm & 63) + " is not modelled");
  uint32_t mask = (size == 32 ? ~0u : (1u << size) - 1) << at;
  w.mode = (w.mode & ~mask) | (v << at & mask);
}
void setreg(Wave& w, const Op& op) { set_hwreg(w, op, w.s[op.dst & 127]); }
void setreg_imm(Wave& w, const Op& op) { set_hwreg(w, op, op.literal); }

void movrels(Wave& w, const Op& op) { write32(w, op.dst, w.s[(op.src[0] + w.s[kM0]) & 127]); }
void movreld(Wave& w, const Op& op) { write32(w, (op.dst + w.s[kM0]) & 127, read32(w, op, op.src[0])); }
void movrels64(Wave& w, const Op& op) { write64(w, op.dst, read64(w, op, (op.src[0] + w.s[kM0]) & 126)); }
void movreld64(Wave& w, const Op& op) { write64(w, (op.dst + w.s[kM0]) & 126, read64(w, op, op.src[0])); }

// VGPR indexing: while it is on, M0[7:0] is added to the VGPR operands that M0[15:12] names (turns.cpp applies it).
void set_index(Wave& w, uint32_t index, uint32_t which) { w.s[kM0] = (w.s[kM0] & 0xffff0f00u) | (index & 255) | (which & 15) << 12; }
void gpr_idx_on(Wave& w, const Op& op) {
  set_index(w, read32(w, op, op.src[0]), op.src[1]);  // the second operand is the four bits themselves
  w.indexes_vgprs = true;
}
void gpr_idx_off(Wave& w, const Op&) { w.indexes_vgprs = false; }
void gpr_idx_idx(Wave& w, const Op& op) { w.s[kM0] = (w.s[kM0] & ~255u) | (read32(w, op, op.src[0]) & 255); }
void gpr_idx_mode(Wave& w, const Op& op) { set_index(w, w.s[kM0], static_cast<uint32_t>(op.simm16)); }

#define ROW(name) {#name, run_##name}
#define ROW2(op) {"s_" #op "_b32", run_s_##op##_b32}, {"s_" #op "_b64", run_s_##op##_b64}
const std::unordered_map<std::string, RunFn>& table() {
  static const std::unordered_map<std::string, RunFn> t = {
      ROW(s_add_u32), ROW(s_sub_u32), ROW(s_add_i32), ROW(s_sub_i32), ROW(s_addc_u32), ROW(s_subb_u32),
      ROW(s_min_i32), ROW(s_min_u32), ROW(s_max_i32), ROW(s_max_u32), ROW2(cselect), ROW2(and), ROW2(or), ROW2(xor),
      ROW2(andn2), ROW2(orn2), ROW2(nand), ROW2(nor), ROW2(xnor), ROW2(lshl), ROW2(lshr), ROW(s_ashr_i32), ROW(s_ashr_i64),
      ROW2(bfm), ROW(s_mul_i32), ROW(s_bfe_u32), ROW(s_bfe_i32), ROW(s_bfe_u64), ROW(s_bfe_i64), ROW(s_absdiff_i32),
      ROW(s_mul_hi_u32), ROW(s_mul_hi_i32), ROW(s_lshl1_add_u32), ROW(s_lshl2_add_u32), ROW(s_lshl3_add_u32),
      ROW(s_lshl4_add_u32), ROW(s_pack_ll_b32_b16), ROW(s_pack_lh_b32_b16), ROW(s_pack_hh_b32_b16),
      ROW2(mov), ROW2(cmov), ROW2(not), ROW2(wqm), ROW2(quadmask), ROW2(brev), ROW(s_bcnt0_i32_b32), ROW(s_bcnt0_i32_b64),
      ROW(s_bcnt1_i32_b32), ROW(s_bcnt1_i32_b64), ROW(s_ff0_i32_b32), ROW(s_ff0_i32_b64), ROW(s_ff1_i32_b32),
      ROW(s_ff1_i32_b64), ROW(s_flbit_i32_b32), ROW(s_flbit_i32_b64), ROW(s_flbit_i32), ROW(s_flbit_i32_i64),
      ROW(s_sext_i32_i8), ROW(s_sext_i32_i16), ROW2(bitset0), ROW2(bitset1), ROW(s_abs_i32), ROW(s_bitreplicate_b64_b32),
      ROW(s_and_saveexec_b64), ROW(s_or_saveexec_b64), ROW(s_xor_saveexec_b64), ROW(s_andn2_saveexec_b64),
      ROW(s_orn2_saveexec_b64), ROW(s_nand_saveexec_b64), ROW(s_nor_saveexec_b64), ROW(s_xnor_saveexec_b64),
      ROW(s_andn1_saveexec_b64), ROW(s_orn1_saveexec_b64), ROW(s_andn1_wrexec_b64), ROW(s_andn2_wrexec_b64),
      ROW(s_cmp_eq_i32), ROW(s_cmp_lg_i32), ROW(s_cmp_gt_i32), ROW(s_cmp_ge_i32), ROW(s_cmp_lt_i32), ROW(s_cmp_le_i32),
      ROW(s_cmp_eq_u32), ROW(s_cmp_lg_u32), ROW(s_cmp_gt_u32), ROW(s_cmp_ge_u32), ROW(s_cmp_lt_u32), ROW(s_cmp_le_u32),
      ROW(s_cmp_eq_u64), ROW(s_cmp_lg_u64), ROW(s_bitcmp0_b32), ROW(s_bitcmp1_b32),
      {"s_bitcmp0_b64", bitcmp64<false>}, {"s_bitcmp1_b64", bitcmp64<true>},
      ROW(s_movk_i32), ROW(s_cmovk_i32), ROW(s_cmpk_eq_i32), ROW(s_cmpk_lg_i32), ROW(s_cmpk_gt_i32), ROW(s_cmpk_ge_i32),
      ROW(s_cmpk_lt_i32), ROW(s_cmpk_le_i32), ROW(s_cmpk_eq_u32), ROW(s_cmpk_lg_u32), ROW(s_cmpk_gt_u32),
      ROW(s_cmpk_ge_u32), ROW(s_cmpk_lt_u32), ROW(s_cmpk_le_u32), ROW(s_addk_i32), ROW(s_mulk_i32),
      {"s_getreg_b32", getreg}, {"s_setreg_b32", setreg}, {"s_setreg_imm32_b32", setreg_imm}, {"s_call_b64", call},
      {"s_getpc_b64", getpc}, {"s_setpc_b64", setpc}, {"s_swappc_b64", swappc},
      {"s_movrels_b32", movrels}, {"s_movreld_b32", movreld}, {"s_movrels_b64", movrels64}, {"s_movreld_b64", movreld64},
      {"s_set_gpr_idx_on", gpr_idx_on}, {"s_set_gpr_idx_off", gpr_idx_off}, {"s_set_gpr_idx_idx", gpr_idx_idx}, {"s_set_gpr_idx_mode", gpr_idx_mode},
      {"s_nop", nop}, {"s_endpgm", endpgm}, {"s_branch", branch<0>}, {"s_wakeup", nop}, {"s_cbranch_scc0", branch<1>},
      {"s_cbranch_scc1", branch<2>}, {"s_cbranch_vccz", branch<3>}, {"s_cbranch_vccnz", branch<4>},
      {"s_cbranch_execz", branch<5>}, {"s_cbranch_execnz", branch<6>}, {"s_barrier", barrier}, {"s_waitcnt", wait},
      {"s_sleep", sleep}, {"s_setprio", nop}, {"s_trap", trap}, {"s_icache_inv", nop}, {"s_incperflevel", nop},
      {"s_decperflevel", nop}, {"s_ttracedata", nop}, {"s_endpgm_saved", endpgm}, {"s_set_valu_coexec_mode", nop},
  };
  return t;
}

}  // namespace

RunFn scalar_unit(const char* name) {
  auto it = table().find(name);
  return it == table().end() ? nullptr : it->second;
}

// ---- constants
uint32_t constant32(const Op& op, unsigned code, char type) {
  static const float kFloats[] = {0.5f, -0.5f, 1.f, -1.f, 2.f, -2.f, 4.f, -4.f};
  static const uint16_t kHalfs[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118};
  static const uint16_t kBrain[] = {0x3f00, 0xbf00, 0x3f80, 0xbf80, 0x4000, 0xc000, 0x4080, 0xc080, 0x3e22};
  if (code == kLiteral) return op.literal;
  if (code >= 128 && code <= 192) return code - 128;
  if (code >= 193 && code <= 208) return static_cast<uint32_t>(192 - static_cast<int>(code));
  if (code >= 240 && code <= 248) {
    if (type == 'h' || type == 'p') return kHalfs[code - 240];
    if (type == 'b') return kBrain[code - 240];
    if (code == 248) return 0x3e22f983;
    uint32_t v;
    std::memcpy(&v, &kFloats[code - 240], 4);
    return v;
  }
  return 0;
}
uint64_t constant64(const Op& op, unsigned code, char type) {
  if (code == kLiteral) return type == 'd' ? static_cast<uint64_t>(op.literal) << 32 : op.literal;
  if (code >= 193 && code <= 208) return static_cast<uint64_t>(192 - static_cast<int64_t>(code));
  if (code >= 240 && code <= 248) {
    static const double kDoubles[] = {0.5, -0.5, 1., -1., 2., -2., 4., -4.};
    if (type == 'q') {
      uint64_t v = constant32(op, code, 'f');
      return v | v << 32;
    }
    if (code == 248) return 0x3fc45f306dc9c882ull;
    uint64_t v;
    std::memcpy(&v, &kDoubles[code - 240], 8);
    return v;
  }
  return constant32(op, code, 'i');
}

}  // namespace mori_sim
