#include "isa/decode.hpp"

#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace mori_sim {
namespace {

const OpInfo kTable[] = {
#include "isa/tables.inc"
};

struct Index {  // format -> opcode -> row
  std::array<std::vector<const OpInfo*>, 20> rows;
  Index() {
    for (const OpInfo& i : kTable) {
      auto& r = rows[static_cast<size_t>(i.format)];
      if (r.size() <= i.opcode) r.resize(i.opcode + 1u, nullptr);
      r[i.opcode] = &i;
    }
  }
};
const Index& index() {
  static const Index i;
  return i;
}

uint32_t bits(uint32_t w, int hi, int lo) { return (w >> lo) & ((hi - lo == 31) ? ~0u : ((1u << (hi - lo + 1)) - 1u)); }
bool starts(const char* s, const char* head) { return std::strncmp(s, head, std::strlen(head)) == 0; }
bool has(const char* s, const char* part) { return std::strstr(s, part) != nullptr; }
bool ends(const char* s, const char* tail) {
  size_t n = std::strlen(s), m = std::strlen(tail);
  return n >= m && std::strcmp(s + n - m, tail) == 0;
}

uint8_t memory_bytes(const char* n) {  // from the mnemonic's data part
  if (has(n, "atomic") ) return has(n, "_x2") || has(n, "_f64") ? 8 : 4;
  if (has(n, "dwordx16")) return 64;
  if (has(n, "dwordx8")) return 32;
  if (has(n, "dwordx4") || has(n, "b128") || ends(n, "format_xyzw")) return 16;
  if (has(n, "dwordx3") || has(n, "b96") || ends(n, "format_xyz")) return 12;
  if (has(n, "dwordx2") || has(n, "b64") || has(n, "u64") || has(n, "i64") || has(n, "f64") || ends(n, "format_xy")) return 8;
  if (has(n, "ubyte") || has(n, "sbyte") || has(n, "_byte") || has(n, "_b8") || has(n, "_u8") || has(n, "_i8")) return 1;
  if (has(n, "short") || has(n, "_b16") || has(n, "_u16") || has(n, "_i16")) return 2;
  return 4;
}

Category classify(const OpInfo& i) {
  const char* n = i.name;
  switch (i.format) {
    case Format::sopp:
      if (starts(n, "s_branch") || starts(n, "s_cbranch") || starts(n, "s_endpgm")) return Category::branch;
      if (starts(n, "s_waitcnt") || starts(n, "s_sleep")) return Category::wait;
      if (starts(n, "s_barrier")) return Category::barrier;
      return Category::other;
    case Format::sop1:
      return has(n, "pc_b64") ? Category::branch : Category::salu;
    case Format::sop2: case Format::sopc: return Category::salu;
    case Format::sopk: return has(n, "call") ? Category::branch : Category::salu;
    case Format::smem: return Category::smem;
    case Format::vop3p: case Format::vop3px2:
      return has(n, "mfma_") || has(n, "smfmac") ? Category::mfma : Category::valu;
    case Format::vop1: case Format::vop2: case Format::vopc: case Format::vop3: case Format::vop3sd: return Category::valu;
    case Format::mubuf: case Format::mtbuf: case Format::global: case Format::scratch: return Category::vmem;
    case Format::flat: return Category::flat;
    case Format::ds: return Category::lds;
    default: return Category::unknown;
  }
}

// Source 0 of VOP1/VOP2/VOPC may be a literal, SDWA or DPP dword.
bool take_ext(Op* op, const uint32_t* w, unsigned n, uint32_t src0) {
  if (src0 == 249 || src0 == 250) {
    if (n < 2) return false;
    op->ext = w[1];
    op->nbytes = 8;
    op->sdwa = src0 == 249;
    op->dpp = src0 == 250;
    uint16_t r = static_cast<uint16_t>(bits(w[1], 7, 0));
    if (op->sdwa) {
      op->src[0] = bits(w[1], 23, 23) ? r : static_cast<uint16_t>(kVgpr + r);
      op->neg = static_cast<uint8_t>(bits(w[1], 20, 20) | bits(w[1], 28, 28) << 1);
      op->abs = static_cast<uint8_t>(bits(w[1], 21, 21) | bits(w[1], 29, 29) << 1);
    } else {
      op->src[0] = static_cast<uint16_t>(kVgpr + r);
      op->neg = static_cast<uint8_t>(bits(w[1], 20, 20) | bits(w[1], 22, 22) << 1);
      op->abs = static_cast<uint8_t>(bits(w[1], 21, 21) | bits(w[1], 23, 23) << 1);
    }
    return true;
  }
  op->src[0] = static_cast<uint16_t>(src0);
  if (src0 == kLiteral) {
    if (n < 2) return false;
    op->literal = w[1];
    op->nbytes = 8;
  }
  return true;
}

bool with_literal(Op* op, const uint32_t* w, unsigned n) {
  for (int k = 0; k < op->num_src; ++k)
    if (op->src[k] == kLiteral) {
      if (n < 2) return false;
      op->literal = w[1];
      op->nbytes = 8;
    }
  return true;
}

uint16_t vreg(uint32_t r, bool acc) { return static_cast<uint16_t>((acc ? kAgpr : kVgpr) + r); }
uint16_t acc_src(uint32_t s, bool acc) { return static_cast<uint16_t>(acc && s >= 256 ? s + 256 : s); }

void mfma_fields(Op* op, uint32_t lo, uint32_t hi) {
  bool acc_cd = bits(lo, 15, 15), acc_a = bits(hi, 27, 27), acc_b = bits(hi, 28, 28);
  op->cbsz = static_cast<uint8_t>(bits(lo, 10, 8));
  op->abid = static_cast<uint8_t>(bits(lo, 14, 11));
  op->blgp = static_cast<uint8_t>(bits(hi, 31, 29));
  op->dst = vreg(bits(lo, 7, 0), acc_cd);
  op->src[0] = acc_src(bits(hi, 8, 0), acc_a);
  op->src[1] = acc_src(bits(hi, 17, 9), acc_b);
  op->src[2] = acc_src(bits(hi, 26, 18), acc_cd);
  op->acc = acc_cd;
}

bool decode_valu32(const uint32_t* w, unsigned n, Op* op) {  // VOP1, VOP2, VOPC
  uint32_t top = bits(w[0], 31, 25);
  if (top == 0x3f) {
    op->info = find_info(Format::vop1, bits(w[0], 16, 9));
    if (!op->info) return false;
    op->num_src = op->info->src0.bits ? 1 : 0;
    op->dst = static_cast<uint16_t>(kVgpr + bits(w[0], 24, 17));
    if (!take_ext(op, w, n, bits(w[0], 8, 0))) return false;
    if (!std::strcmp(op->info->name, "v_readfirstlane_b32")) op->dst = static_cast<uint16_t>(bits(w[0], 24, 17));
    if (!std::strcmp(op->info->name, "v_accvgpr_mov_b32")) {
      op->dst = static_cast<uint16_t>(op->dst + 256);
      op->src[0] = acc_src(op->src[0], true);
    }
  } else if (top == 0x3e) {
    op->info = find_info(Format::vopc, bits(w[0], 24, 17));
    if (!op->info) return false;
    op->num_src = 2;
    op->sdst = kVcc;
    op->src[1] = static_cast<uint16_t>(kVgpr + bits(w[0], 16, 9));
    if (!take_ext(op, w, n, bits(w[0], 8, 0))) return false;
    if (op->sdwa && bits(op->ext, 15, 15)) op->sdst = static_cast<uint16_t>(bits(op->ext, 14, 8));
  } else {
    op->info = find_info(Format::vop2, bits(w[0], 30, 25));
    if (!op->info) return false;
    const char* name = op->info->name;
    op->num_src = 2;
    op->dst = static_cast<uint16_t>(kVgpr + bits(w[0], 24, 17));
    op->src[1] = static_cast<uint16_t>(kVgpr + bits(w[0], 16, 9));
    if (!take_ext(op, w, n, bits(w[0], 8, 0))) return false;
    if (has(name, "madmk") || has(name, "madak") || has(name, "fmamk") || has(name, "fmaak")) {
      if (n < 2 || op->sdwa || op->dpp) return false;
      op->literal = w[1];
      op->nbytes = 8;
      op->num_src = 3;
      op->src[2] = kLiteral;
      if (ends(name, "mk_f32") || ends(name, "mk_f16")) std::swap(op->src[1], op->src[2]);
    }
    if (has(name, "_co_u32")) op->sdst = kVcc;
    if (has(name, "addc_co") || has(name, "subb_co") || has(name, "subbrev_co") || has(name, "cndmask")) {
      op->src[2] = kVcc;
      op->num_src = 3;
    }
  }
  if (op->sdwa) {
    if (bits(op->ext, 31, 31) && op->num_src > 1) op->src[1] = static_cast<uint16_t>(op->src[1] - kVgpr);
    if (top != 0x3e) {
      op->clamp = bits(op->ext, 13, 13);
      op->omod = static_cast<uint8_t>(bits(op->ext, 15, 14));
    }
  }
  return true;
}

bool decode_vop3(const uint32_t* w, unsigned n, Op* op) {
  if (n < 2) return false;
  op->nbytes = 8;
  op->explicit_vop3 = true;
  uint32_t lo = w[0], hi = w[1];
  if (bits(lo, 31, 23) == 0x1a7) {  // VOP3P
    uint32_t opcode = bits(lo, 22, 16);
    if (opcode == 44) {             // v_mfma_ld_scale_b32: first half of a scaled MFMA
      if (n < 4 || bits(w[2], 31, 23) != 0x1a7) return false;
      op->info = find_info(Format::vop3px2, bits(w[2], 22, 16));
      if (!op->info) return false;
      op->nbytes = 16;
      op->num_src = 3;
      mfma_fields(op, w[2], w[3]);
      op->scale[0] = static_cast<uint16_t>(bits(hi, 8, 0));
      op->scale[1] = static_cast<uint16_t>(bits(hi, 17, 9));
      op->opsel = static_cast<uint8_t>(bits(lo, 13, 11));
      op->opsel_hi = static_cast<uint8_t>(bits(hi, 28, 27));
      op->neg = static_cast<uint8_t>(bits(hi, 31, 29));
      op->neg_hi = static_cast<uint8_t>(bits(lo, 10, 8));
      return true;
    }
    op->info = find_info(Format::vop3p, opcode);
    if (!op->info) return false;
    const char* name = op->info->name;
    op->num_src = static_cast<uint8_t>((op->info->src0.bits > 0) + (op->info->src1.bits > 0) + (op->info->src2.bits > 0));
    if (has(name, "mfma") || has(name, "smfmac")) {
      mfma_fields(op, lo, hi);
      return true;
    }
    op->dst = static_cast<uint16_t>(kVgpr + bits(lo, 7, 0));
    op->src[0] = static_cast<uint16_t>(bits(hi, 8, 0));
    op->src[1] = static_cast<uint16_t>(bits(hi, 17, 9));
    op->src[2] = static_cast<uint16_t>(bits(hi, 26, 18));
    op->neg = static_cast<uint8_t>(bits(hi, 31, 29));
    op->neg_hi = static_cast<uint8_t>(bits(lo, 10, 8));
    op->clamp = bits(lo, 15, 15);
    op->opsel = static_cast<uint8_t>(bits(lo, 13, 11));
    op->opsel_hi = static_cast<uint8_t>(bits(hi, 28, 27) | bits(lo, 14, 14) << 2);
    if (ends(name, "accvgpr_read")) op->src[0] = acc_src(op->src[0], true);
    if (ends(name, "accvgpr_write")) op->dst = static_cast<uint16_t>(op->dst + 256);
    if (has(name, "accvgpr")) op->opsel = op->opsel_hi = op->neg = op->neg_hi = 0, op->num_src = 1;
    return true;
  }
  uint32_t opcode = bits(lo, 25, 16);
  op->src[0] = static_cast<uint16_t>(bits(hi, 8, 0));
  op->src[1] = static_cast<uint16_t>(bits(hi, 17, 9));
  op->src[2] = static_cast<uint16_t>(bits(hi, 26, 18));
  op->neg = static_cast<uint8_t>(bits(hi, 31, 29));
  op->omod = static_cast<uint8_t>(bits(hi, 28, 27));
  op->clamp = bits(lo, 15, 15);
  op->dst = static_cast<uint16_t>(kVgpr + bits(lo, 7, 0));
  if (const OpInfo* sd = find_info(Format::vop3sd, opcode)) {
    op->info = sd;
    op->sdst = static_cast<uint16_t>(bits(lo, 14, 8));
  } else {
    op->info = find_info(Format::vop3, opcode);
    if (!op->info) return false;
    op->abs = static_cast<uint8_t>(bits(lo, 10, 8));
    op->opsel = static_cast<uint8_t>(bits(lo, 14, 11));
    const char* name = op->info->name;
    if (starts(name, "v_cmp")) {
      op->sdst = static_cast<uint16_t>(bits(lo, 7, 0));
      op->dst = kNoOperand;
    } else if (has(name, "readlane") || has(name, "readfirstlane")) {
      op->dst = static_cast<uint16_t>(bits(lo, 7, 0));
    }
  }
  op->num_src = static_cast<uint8_t>((op->info->src0.bits > 0) + (op->info->src1.bits > 0) + (op->info->src2.bits > 0));
  if (starts(op->info->name, "v_addc_co") || starts(op->info->name, "v_subb")) op->num_src = 3;
  for (int k = 0; k < op->num_src; ++k)
    if (op->src[k] == kLiteral || op->src[k] == 249 || op->src[k] == 250) return false;
  return true;
}

bool decode_memory(const uint32_t* w, unsigned n, Op* op) {
  if (n < 2) return false;
  op->nbytes = 8;
  uint32_t lo = w[0], hi = w[1];
  switch (bits(lo, 31, 26)) {
    case 0x30:
      op->info = find_info(Format::smem, bits(lo, 25, 18));
      if (!op->info) return false;
      op->dst = static_cast<uint16_t>(bits(lo, 12, 6));
      op->srsrc = static_cast<uint16_t>(bits(lo, 5, 0) * 2);
      op->sc0 = bits(lo, 16, 16);
      op->imm = bits(lo, 17, 17);
      op->soffset_en = bits(lo, 14, 14);
      op->offset = static_cast<int32_t>(bits(hi, 20, 0) << 11) >> 11;
      op->soffset = static_cast<uint16_t>(bits(hi, 31, 25));
      break;
    case 0x36:
      op->info = find_info(Format::ds, bits(lo, 24, 17));
      if (!op->info) return false;
      op->acc = bits(lo, 25, 25);
      op->gds = bits(lo, 16, 16);
      op->offset0 = static_cast<uint8_t>(bits(lo, 7, 0));
      op->offset1 = static_cast<uint8_t>(bits(lo, 15, 8));
      op->offset = static_cast<int32_t>(bits(lo, 15, 0));
      op->src[0] = vreg(bits(hi, 7, 0), false);
      op->src[1] = vreg(bits(hi, 15, 8), op->acc);
      op->src[2] = vreg(bits(hi, 23, 16), op->acc);
      op->dst = vreg(bits(hi, 31, 24), op->acc);
      break;
    case 0x37: {
      static const Format kSeg[] = {Format::flat, Format::scratch, Format::global, Format::none};
      op->info = find_info(kSeg[bits(lo, 15, 14)], bits(lo, 24, 18));
      if (!op->info) return false;
      op->acc = bits(hi, 23, 23);
      op->sve = bits(lo, 13, 13);
      op->lds = has(op->info->name, "_lds_");
      op->offset = op->info->format == Format::flat ? static_cast<int32_t>(bits(lo, 11, 0))
                                                    : static_cast<int32_t>(bits(lo, 12, 0) << 19) >> 19;
      op->sc0 = bits(lo, 16, 16);
      op->nt = bits(lo, 17, 17);
      op->sc1 = bits(lo, 25, 25);
      op->src[0] = vreg(bits(hi, 7, 0), false);
      op->src[1] = vreg(bits(hi, 15, 8), op->acc);
      op->saddr = static_cast<uint16_t>(bits(hi, 22, 16));
      op->dst = vreg(bits(hi, 31, 24), op->acc);
      break;
    }
    case 0x38:
    case 0x3a:
      op->info = bits(lo, 31, 26) == 0x38 ? find_info(Format::mubuf, bits(lo, 24, 18)) : find_info(Format::mtbuf, bits(lo, 18, 15));
      if (!op->info) return false;
      op->acc = bits(hi, 23, 23);
      op->offset = static_cast<int32_t>(bits(lo, 11, 0));
      op->offen = bits(lo, 12, 12);
      op->idxen = bits(lo, 13, 13);
      op->sc0 = bits(lo, 14, 14);
      if (op->info->format == Format::mubuf) {
        op->sc1 = bits(lo, 15, 15);
        op->lds = bits(lo, 16, 16);
        op->nt = bits(lo, 17, 17);
      } else {
        op->sc1 = bits(hi, 21, 21);
        op->nt = bits(hi, 22, 22);
        op->dfmt = static_cast<uint8_t>(bits(lo, 22, 19));
        op->nfmt = static_cast<uint8_t>(bits(lo, 25, 23));
      }
      op->src[0] = vreg(bits(hi, 7, 0), false);
      op->src[1] = op->dst = vreg(bits(hi, 15, 8), op->acc);
      op->srsrc = static_cast<uint16_t>(bits(hi, 20, 16) * 4);
      op->soffset = static_cast<uint16_t>(bits(hi, 31, 24));
      break;
    default: return false;
  }
  op->mem_bytes = memory_bytes(op->info->name);
  return true;
}

bool decode_scalar(const uint32_t* w, unsigned n, Op* op) {
  uint32_t lo = w[0];
  switch (bits(lo, 31, 23)) {
    case 0x17d:
      op->info = find_info(Format::sop1, bits(lo, 15, 8));
      if (!op->info) return false;
      op->num_src = op->info->src0.bits ? 1 : 0;
      op->dst = static_cast<uint16_t>(bits(lo, 22, 16));
      op->src[0] = static_cast<uint16_t>(bits(lo, 7, 0));
      return with_literal(op, w, n);
    case 0x17e:
      op->info = find_info(Format::sopc, bits(lo, 22, 16));
      if (!op->info) return false;
      op->num_src = 2;
      op->src[0] = static_cast<uint16_t>(bits(lo, 7, 0));
      op->src[1] = static_cast<uint16_t>(bits(lo, 15, 8));
      return with_literal(op, w, n);
    case 0x17f:
      op->info = find_info(Format::sopp, bits(lo, 22, 16));
      op->simm16 = static_cast<int16_t>(lo & 0xffff);
      return op->info != nullptr;
    default: break;
  }
  if (bits(lo, 31, 28) == 0xb) {
    op->info = find_info(Format::sopk, bits(lo, 27, 23));
    if (!op->info) return false;
    op->dst = static_cast<uint16_t>(bits(lo, 22, 16));
    op->simm16 = static_cast<int16_t>(lo & 0xffff);
    if (!std::strcmp(op->info->name, "s_setreg_imm32_b32")) {
      if (n < 2) return false;
      op->literal = w[1];
      op->nbytes = 8;
    }
    return true;
  }
  op->info = find_info(Format::sop2, bits(lo, 29, 23));
  if (!op->info) return false;
  op->num_src = 2;
  op->dst = static_cast<uint16_t>(bits(lo, 22, 16));
  op->src[0] = static_cast<uint16_t>(bits(lo, 7, 0));
  op->src[1] = static_cast<uint16_t>(bits(lo, 15, 8));
  return with_literal(op, w, n);
}

}  // namespace

const OpInfo* find_info(Format format, unsigned opcode) {
  const auto& r = index().rows[static_cast<size_t>(format)];
  return opcode < r.size() ? r[opcode] : nullptr;
}

const OpInfo* all_infos(size_t* count) {
  *count = sizeof(kTable) / sizeof(kTable[0]);
  return kTable;
}

const char* category_name(Category c) {
  static const char* const kNames[] = {"unknown", "valu", "salu", "mfma", "vmem", "smem",
                                       "lds", "flat", "branch", "wait", "barrier", "other"};
  return kNames[static_cast<int>(c)];
}

bool decode(const uint32_t* w, unsigned n, Op* op) {
  *op = Op{};
  if (n == 0) return false;
  op->word[0] = w[0];
  bool ok;
  if (!(w[0] >> 31)) ok = decode_valu32(w, n, op);
  else if (bits(w[0], 31, 30) == 2) ok = decode_scalar(w, n, op);
  else if (bits(w[0], 31, 26) == 0x34) ok = decode_vop3(w, n, op);
  else ok = decode_memory(w, n, op);
  if (!ok) {
    *op = Op{};
    op->word[0] = w[0];
    return false;
  }
  for (unsigned k = 0; k < op->nbytes / 4u; ++k) op->word[k] = w[k];
  op->category = classify(*op->info);
  return true;
}

}  // namespace mori_sim
