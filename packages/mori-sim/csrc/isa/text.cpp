// Op -> assembler text in LLVM's spelling, so that text and bytes can be compared both ways.
#include <cstdio>
#include <cstring>

#include "isa/decode.hpp"

namespace mori_sim {
namespace {

bool starts(const char* s, const char* head) { return std::strncmp(s, head, std::strlen(head)) == 0; }
bool has(const char* s, const char* part) { return std::strstr(s, part) != nullptr; }

template <class... T>
std::string print(const char* f, T... a) {
  char b[128];
  std::snprintf(b, sizeof b, f, a...);
  return b;
}

std::string range(const char* file, unsigned first, unsigned bits) {
  unsigned n = (bits + 31) / 32;
  if (n <= 1) return print("%s%u", file, first);
  return print("%s[%u:%u]", file, first, first + n - 1);
}

std::string reg(unsigned code, unsigned bits, const Op& op) {
  bool wide = bits > 32;
  if (code >= kAgpr) return range("a", code - kAgpr, bits);
  if (code >= kVgpr) return range("v", code - kVgpr, bits);
  if (code < 102) return range("s", code, bits);
  switch (code) {
    case 102: return wide ? "flat_scratch" : "flat_scratch_lo";
    case 103: return "flat_scratch_hi";
    case 104: return wide ? "xnack_mask" : "xnack_mask_lo";
    case 105: return "xnack_mask_hi";
    case 106: return wide ? "vcc" : "vcc_lo";
    case 107: return "vcc_hi";
    case 124: return "m0";
    case 126: return wide ? "exec" : "exec_lo";
    case 127: return "exec_hi";
    case 235: return "src_shared_base";
    case 236: return "src_shared_limit";
    case 237: return "src_private_base";
    case 238: return "src_private_limit";
    case 239: return "src_pops_exiting_wave_id";
    case 240: return "0.5";
    case 241: return "-0.5";
    case 242: return "1.0";
    case 243: return "-1.0";
    case 244: return "2.0";
    case 245: return "-2.0";
    case 246: return "4.0";
    case 247: return "-4.0";
    case 248: return "0.15915494";
    case 251: return "src_vccz";
    case 252: return "src_execz";
    case 253: return "src_scc";
    case 254: return "src_lds_direct";
    case kLiteral: return print("0x%x", op.literal);
    default: break;
  }
  if (code >= 108 && code < 124) return range("ttmp", code - 108, bits);
  if (code >= 128 && code <= 192) return print("%u", code - 128);
  if (code >= 193 && code <= 208) return print("%d", 192 - static_cast<int>(code));
  return print("?%u", code);
}

unsigned src_bits(const Op& op, int k) {
  const OperandInfo& i = k == 0 ? op.info->src0 : k == 1 ? op.info->src1 : op.info->src2;
  return i.bits ? i.bits : 32;
}

std::string source(const Op& op, int k) {
  bool floats = (op.abs | op.neg) & (1 << k);
  std::string s = reg(op.src[k], src_bits(op, k), op);
  if (op.sdwa) {
    bool sext = op.ext >> (k ? 27 : 19) & 1;
    if (sext) return "sext(" + s + ")";
  }
  if (!floats || op.info->format == Format::vop3p || has(op.info->name, "bitop3")) return s;
  if (op.abs >> k & 1) s = "|" + s + "|";
  if (op.neg >> k & 1) s = "-" + s;
  return s;
}

std::string bit_list(const char* name, unsigned v, unsigned n) {
  std::string s = print(" %s:[", name);
  for (unsigned i = 0; i < n; ++i) s += print(i ? ",%u" : "%u", v >> i & 1);
  return s + "]";
}

std::string output_modifiers(const Op& op) {
  static const char* const kOmod[] = {"", " mul:2", " mul:4", " div:2"};
  return std::string(op.clamp ? " clamp" : "") + kOmod[op.omod];
}

std::string sdwa_text(const Op& op) {
  static const char* const kSel[] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD", "?"};
  static const char* const kUnused[] = {"UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE", "?"};
  std::string s;
  if (op.info->format != Format::vopc && std::strcmp(op.info->name, "v_nop"))
    s += print(" dst_sel:%s dst_unused:%s", kSel[op.ext >> 8 & 7], kUnused[op.ext >> 11 & 3]);
  s += print(" src0_sel:%s", kSel[op.ext >> 16 & 7]);
  if (op.info->format != Format::vop1) s += print(" src1_sel:%s", kSel[op.ext >> 24 & 7]);
  return s;
}

std::string dpp_text(const Op& op) {
  unsigned c = op.ext >> 8 & 0x1ff;
  std::string s;
  if (c < 0x100) s = print(" quad_perm:[%u,%u,%u,%u]", c & 3, c >> 2 & 3, c >> 4 & 3, c >> 6 & 3);
  else if (c > 0x100 && c < 0x110) s = print(" row_shl:%u", c & 15);
  else if (c > 0x110 && c < 0x120) s = print(" row_shr:%u", c & 15);
  else if (c > 0x120 && c < 0x130) s = print(" row_ror:%u", c & 15);
  else if (c == 0x130) s = " wave_shl:1";
  else if (c == 0x134) s = " wave_rol:1";
  else if (c == 0x138) s = " wave_shr:1";
  else if (c == 0x13c) s = " wave_ror:1";
  else if (c == 0x140) s = " row_mirror";
  else if (c == 0x141) s = " row_half_mirror";
  else if (c == 0x142) s = " row_bcast:15";
  else if (c == 0x143) s = " row_bcast:31";
  else if (c >= 0x150 && c < 0x160) s = print(" row_newbcast:%u", c & 15);
  else s = print(" dpp_ctrl:0x%x", c);
  s += print(" row_mask:0x%x bank_mask:0x%x", op.ext >> 28, op.ext >> 24 & 15);
  if (op.ext >> 19 & 1) s += " bound_ctrl:0";
  return s;
}

std::string valu_text(const Op& op) {
  const OpInfo& i = *op.info;
  std::string s = i.name;
  if (starts(i.name, "v_mad_mix")) s.replace(2, 3, "fma");  // LLVM's name on this target
  bool vop3 = i.format == Format::vop3 || i.format == Format::vop3sd;
  bool only3 = vop3 && i.opcode >= 448;  // no 32-bit form exists, so LLVM has no _e64 suffix
  if (i.format == Format::vop3sd && i.opcode >= 480) only3 = true;
  if (op.sdwa) s += "_sdwa";
  else if (op.dpp) s += "_dpp";
  else if (vop3 && !only3) s += "_e64";
  else if (!vop3 && i.format != Format::vop3p && !has(i.name, "mk_f") && !has(i.name, "ak_f")) {
    static const char* const kPlain[] = {"v_readfirstlane_b32", "v_swap_b32", "v_accvgpr_mov_b32"};
    bool plain = false;
    for (const char* p : kPlain) plain |= !std::strcmp(p, i.name);
    if (!plain) s += "_e32";
  }
  std::string args;
  auto add = [&](const std::string& a) { args += (args.empty() ? " " : ", ") + a; };
  if (op.dst != kNoOperand && std::strcmp(i.name, "v_nop") && std::strcmp(i.name, "v_clrexcp")) add(reg(op.dst, i.dst.bits ? i.dst.bits : 32, op));
  if (op.sdst != kNoOperand) add(reg(op.sdst, 64, op));
  for (int k = 0; k < op.num_src; ++k) {
    if (op.src[k] == kVcc && k == 2) add("vcc");
    else if (k == 2 && (starts(i.name, "v_addc_co") || starts(i.name, "v_subb"))) add(reg(op.src[k], 64, op));
    else if (i.format == Format::vop3 && has(i.name, "permlane") ) add(reg(op.src[k], 32, op));
    else add(source(op, k));
  }
  s += args;
  if (i.format == Format::vop3p) {
    unsigned n = op.num_src;
    if (has(i.name, "accvgpr")) return s;
    if (op.opsel) s += bit_list("op_sel", op.opsel, n);
    unsigned all = (1u << n) - 1;
    bool mix = has(i.name, "mad_mix");
    if ((op.opsel_hi & all) != (mix ? 0u : all)) s += bit_list("op_sel_hi", op.opsel_hi, n);
    if (op.neg) s += bit_list("neg_lo", op.neg, n);
    if (op.neg_hi) s += bit_list("neg_hi", op.neg_hi, n);
    if (op.clamp) s += " clamp";
    return s;
  }
  if (i.format == Format::vop3 && op.opsel) {
    unsigned n = op.num_src, v = (op.opsel & ((1u << n) - 1)) | (op.opsel >> 3 & 1) << n;
    if (has(i.name, "bitop3")) v = (op.opsel & 7u) | (op.opsel >> 3 & 1) << 3, n = 3;
    s += bit_list("op_sel", v, n + (op.dst != kNoOperand ? 1 : 0));
  }
  if (i.format == Format::vop3 && has(i.name, "bitop3")) {
    const unsigned table = static_cast<unsigned>(op.omod) << 6 | (op.abs & 7u) << 3 | (op.neg & 7u);
    return s + print(" bitop3:0x%x", table);
  }
  s += output_modifiers(op);
  if (op.sdwa) s += sdwa_text(op);
  if (op.dpp) s += dpp_text(op);
  return s;
}

std::string mfma_text(const Op& op) {
  const OpInfo& i = *op.info;
  bool f8f6f4 = has(i.name, "f8f6f4");
  static const unsigned kBits[] = {256, 256, 192, 192, 128, 256, 256, 256};
  std::string s = std::string(i.name) + " " + reg(op.dst, i.dst.bits, op);
  s += ", " + reg(op.src[0], f8f6f4 ? kBits[op.cbsz & 7] : i.src0.bits, op);
  s += ", " + reg(op.src[1], f8f6f4 ? kBits[op.blgp & 7] : i.src1.bits, op);
  s += ", " + reg(op.src[2], has(i.name, "smfmac") ? 32 : i.dst.bits, op);
  if (i.format == Format::vop3px2) {
    s += ", " + reg(op.scale[0], 32, op) + ", " + reg(op.scale[1], 32, op);
    s += bit_list("op_sel", op.opsel & 3u, 3) + bit_list("op_sel_hi", op.opsel_hi, 3);
  }
  if (op.cbsz) s += print(" cbsz:%u", op.cbsz);
  if (op.abid && !f8f6f4) s += print(" abid:%u", op.abid);
  if (op.blgp) {
    if (has(i.name, "_f64")) s += bit_list("neg", op.blgp, 3);
    else s += print(" blgp:%u", op.blgp);
  }
  return s;
}

std::string cache_bits(const Op& op) {
  return std::string(op.sc0 ? " sc0" : "") + (op.nt ? " nt" : "") + (op.sc1 ? " sc1" : "");
}

std::string memory_text(const Op& op) {
  const OpInfo& i = *op.info;
  std::string s = i.name;
  unsigned data = op.mem_bytes * 8u < 32 ? 32 : op.mem_bytes * 8u;
  bool atomic = has(i.name, "atomic"), store = has(i.name, "store"), cmp = has(i.name, "cmpswap");
  if (i.format == Format::mubuf || i.format == Format::mtbuf) {
    if (has(i.name, "wbl2") || has(i.name, "_inv")) return s + cache_bits(op);
    if (has(i.name, "format_d16")) data = has(i.name, "xyz") ? 64 : 32;
    if (!op.lds) s += " " + reg(op.dst, cmp ? data * 2 : data, op) + ",";
    unsigned words = op.offen + op.idxen;
    s += " " + (words ? reg(op.src[0], words * 32, op) : std::string("off"));
    s += ", " + reg(op.srsrc, 128, op) + ", " + reg(op.soffset, 32, op);
    if (i.format == Format::mtbuf) s += print(" format:%u", op.dfmt | op.nfmt << 4);
    if (op.idxen) s += " idxen";
    if (op.offen) s += " offen";
    if (op.offset) s += print(" offset:%d", op.offset);
    s += cache_bits(op);
    return op.lds ? s + " lds" : s;
  }
  bool flat = i.format == Format::flat, scratch = i.format == Format::scratch;
  std::string addr;
  bool has_saddr = op.saddr != 0x7f;
  if (flat) addr = reg(op.src[0], 64, op);
  else if (scratch) addr = op.sve ? reg(op.src[0], 32, op) : "off";
  else addr = reg(op.src[0], has_saddr ? 32 : 64, op);
  std::string base = flat ? "" : has_saddr ? reg(op.saddr, scratch ? 32 : 64, op) : "off";
  unsigned wide = cmp ? data * 2 : data;
  if (op.lds) s += " " + addr;
  else if (atomic) s += (op.sc0 ? " " + reg(op.dst, data, op) + "," : std::string()) + " " + addr + ", " + reg(op.src[1], wide, op);
  else if (store) s += " " + addr + ", " + reg(op.src[1], data, op);
  else s += " " + reg(op.dst, data, op) + ", " + addr;
  if (!flat) s += ", " + base;
  if (op.offset) s += print(" offset:%d", op.offset);
  return s + cache_bits(op);
}

std::string ds_text(const Op& op) {
  const OpInfo& i = *op.info;
  const char* n = i.name;
  std::string args;
  auto add = [&](const std::string& a) { args += (args.empty() ? " " : ", ") + a; };
  if (i.dst.bits) add(reg(op.dst, i.dst.bits, op));
  bool no_addr = has(n, "addtid") || !std::strcmp(n, "ds_nop") || has(n, "consume") || has(n, "append") || has(n, "gws_barrier") || has(n, "gws_sema") || has(n, "gws_init");
  if (!no_addr) add(reg(op.src[0], 32, op));
  if (i.src1.bits) add(reg(op.src[1], i.src1.bits, op));
  if (i.src2.bits) add(reg(op.src[2], i.src2.bits, op));
  std::string s = n + args;
  bool two = has(n, "read2") || has(n, "write2") || has(n, "wrxchg2");
  if (two) {
    if (op.offset0) s += print(" offset0:%u", op.offset0);
    if (op.offset1) s += print(" offset1:%u", op.offset1);
  } else if (op.offset) {
    s += print(" offset:%u", static_cast<unsigned>(op.offset));
  }
  return op.gds ? s + " gds" : s;
}

std::string smem_text(const Op& op) {
  const char* n = op.info->name;
  if (has(n, "time")) return std::string(n) + " " + reg(op.dst, 64, op);
  if (has(n, "dcache") && !has(n, "discard")) return n;
  bool atomic = has(n, "atomic");
  unsigned data = op.mem_bytes * 8u * (has(n, "cmpswap") ? 2 : 1);
  std::string s = std::string(n) + " " + (has(n, "probe") ? print("%u", op.dst) : has(n, "discard") ? std::string() : reg(op.dst, data, op));
  s += (has(n, "discard") ? "" : ", ") + reg(op.srsrc, has(n, "buffer") ? 128 : 64, op) + ", ";
  if (op.soffset_en && op.imm) s += reg(op.soffset, 32, op) + print(" offset:0x%x", op.offset & 0x1fffff);
  else if (op.imm) s += op.offset < 0 ? print("-0x%x", -op.offset) : print("0x%x", op.offset);
  else if (op.soffset_en) s += reg(op.soffset, 32, op);
  else s += reg(static_cast<unsigned>(op.offset & 0x7f), 32, op);
  (void)atomic;
  return op.sc0 ? s + " glc" : s;
}

std::string waitcnt(unsigned v) {
  std::string s = "s_waitcnt";
  unsigned vm = (v & 15) | (v >> 10 & 0x30), exp = v >> 4 & 7, lgkm = v >> 8 & 15;
  if (vm != 63) s += print(" vmcnt(%u)", vm);
  if (exp != 7) s += print(" expcnt(%u)", exp);
  if (lgkm != 15) s += print(" lgkmcnt(%u)", lgkm);
  return s.size() > 9 ? s : s + print(" 0x%x", v);
}

std::string scalar_text(const Op& op, uint64_t pc) {
  const OpInfo& i = *op.info;
  const char* n = i.name;
  unsigned imm = static_cast<uint16_t>(op.simm16);
  switch (i.format) {
    case Format::sopp:
      if (!std::strcmp(n, "s_waitcnt")) return waitcnt(imm);
      if (starts(n, "s_branch") || starts(n, "s_cbranch"))
        return std::string(n) + print(" %u", imm) +
               (pc ? print(" // to 0x%llx", static_cast<unsigned long long>(pc + 4 + 4 * static_cast<int64_t>(op.simm16))) : "");
      for (const char* plain : {"s_endpgm", "s_barrier", "s_wakeup", "s_icache_inv", "s_ttracedata", "s_endpgm_saved",
                                "s_set_gpr_idx_off", "s_endpgm_ordered_ps_done"})
        if (!std::strcmp(n, plain)) return n;
      return std::string(n) + print(" 0x%x", imm);
    case Format::sopk:
      if (has(n, "reg")) {
        std::string hw = print("hwreg(%u, %u, %u)", imm & 63, imm >> 6 & 31, (imm >> 11) + 1);
        if (has(n, "getreg")) return std::string(n) + " " + reg(op.dst, 32, op) + ", " + hw;
        if (has(n, "imm32")) return std::string(n) + " " + hw + print(", 0x%x", op.literal);
        return std::string(n) + " " + hw + ", " + reg(op.dst, 32, op);
      }
      if (has(n, "call") || has(n, "fork")) return std::string(n) + " " + reg(op.dst, 64, op) + print(", %u", imm);
      return std::string(n) + " " + reg(op.dst, 32, op) + print(", 0x%x", imm);
    default: break;
  }
  if (!std::strcmp(n, "s_set_gpr_idx_on")) {
    std::string which;
    static const char* const kNames[] = {"SRC0", "SRC1", "SRC2", "DST"};
    for (unsigned k = 0; k < 4; ++k)
      if (op.src[1] >> k & 1) which += (which.empty() ? "" : ",") + std::string(kNames[k]);
    return std::string(n) + " " + reg(op.src[0], 32, op) + ", gpr_idx(" + which + ")";
  }
  std::string args;
  auto add = [&](const std::string& a) { args += (args.empty() ? " " : ", ") + a; };
  if (i.format != Format::sopc && i.dst.bits) add(reg(op.dst, i.dst.bits, op));
  for (int k = 0; k < op.num_src; ++k) add(reg(op.src[k], src_bits(op, k), op));
  return n + args;
}

}  // namespace

std::string text(const Op& op, uint64_t pc) {
  if (!op.info) return print("not an instruction: 0x%08x", op.word[0]);
  switch (op.info->format) {
    case Format::sop1: case Format::sop2: case Format::sopc: case Format::sopk: case Format::sopp: return scalar_text(op, pc);
    case Format::smem: return smem_text(op);
    case Format::ds: return ds_text(op);
    case Format::mubuf: case Format::mtbuf: case Format::flat: case Format::global: case Format::scratch: return memory_text(op);
    default: return op.category == Category::mfma ? mfma_text(op) : valu_text(op);
  }
}

}  // namespace mori_sim
