// Instructions that move values between lanes, between scalar and vector registers, or between VGPRs and AGPRs.
#include <unordered_map>

#include "exec/units.hpp"

namespace mori_sim {
namespace {

void readfirstlane(Wave& w, const Op& op) {
  const uint64_t e = w.exec();
  const unsigned lane = e ? static_cast<unsigned>(__builtin_ctzll(e)) : 0;
  const uint32_t v = op.src[0] >= kVgpr ? w.row(op.src[0])[lane] : read32(w, op, op.src[0]);
  write32(w, op.dst, v);
}
void readlane(Wave& w, const Op& op) {
  const unsigned lane = read32(w, op, op.src[1]) & 63;
  write32(w, op.dst, op.src[0] >= kVgpr ? w.row(op.src[0])[lane] : read32(w, op, op.src[0]));
}
void writelane(Wave& w, const Op& op) { w.row(op.dst)[read32(w, op, op.src[1]) & 63] = read32(w, op, op.src[0]); }

void swap(Wave& w, const Op& op) {
  uint32_t *a = w.row(op.dst), *b = w.row(op.src[0]);
  const uint64_t e = w.exec();
  for (unsigned i = 0; i < kLanes; ++i)
    if (e >> i & 1) { uint32_t t = a[i]; a[i] = b[i]; b[i] = t; }
}
// Odd groups of `rows` lanes of the destination trade places with the even groups of the source.
template <unsigned rows> void permlane_swap(Wave& w, const Op& op) {
  if (op.dpp || op.sdwa) return w.stop("permlane swap with DPP or SDWA");
  uint32_t *d = w.row(op.dst), *s = w.row(op.src[0]);
  const uint64_t e = w.exec();
  for (unsigned i = 0; i < kLanes; ++i) {
    if (i / rows % 2 == 1) continue;
    const unsigned j = i + rows;
    const bool si = e >> i & 1, dj = e >> j & 1;
    const uint32_t from_s = s[i], from_d = d[j];
    if (dj) d[j] = from_s;
    if (si) s[i] = from_d;
  }
}
void copy(Wave& w, const Op& op) {  // accvgpr_read/write/mov
  const uint32_t* r = source_rows(w, op, 0);
  write_rows(w, op.dst, r, 1, w.exec());
}
void pk_mov(Wave& w, const Op& op) {  // low result: a dword of src0, high result: a dword of src1
  uint32_t* out = w.ctx->out;
  for (unsigned k = 0; k < 2; ++k) {
    const bool high = op.opsel >> k & 1;
    const unsigned code = op.src[k];
    if (code >= kVgpr) {
      std::memcpy(out + k * kLanes, w.row(code) + (high ? kLanes : 0), kLanes * 4);
    } else {
      const uint64_t v = code < 128 ? read64(w, op, code) : constant64(op, code, 'q');
      for (unsigned i = 0; i < kLanes; ++i) out[k * kLanes + i] = static_cast<uint32_t>(high ? v >> 32 : v);
    }
  }
  write_rows(w, op.dst, out, 2, w.exec());
}

}  // namespace

RunFn cross_lane_unit(const char* name) {
  static const std::unordered_map<std::string, RunFn> t = {
      {"v_readfirstlane_b32", readfirstlane}, {"v_readlane_b32", readlane}, {"v_writelane_b32", writelane},
      {"v_swap_b32", swap}, {"v_permlane32_swap_b32", permlane_swap<32>}, {"v_permlane16_swap_b32", permlane_swap<16>},
      {"v_accvgpr_read", copy}, {"v_accvgpr_write", copy}, {"v_accvgpr_mov_b32", copy}, {"v_pk_mov_b32", pk_mov},
  };
  auto it = t.find(name);
  return it == t.end() ? nullptr : it->second;
}

}  // namespace mori_sim
