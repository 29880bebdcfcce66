#include "coherence/hazards.hpp"

#include <cstring>

namespace mori_sim {
namespace {

bool has(const char* s, const char* part) { return std::strstr(s, part) != nullptr; }
uint16_t dwords(unsigned bits) { return static_cast<uint16_t>(bits ? (bits + 31) / 32 : 1); }

void add(std::vector<RegisterRange>* to, unsigned code, unsigned count) {
  if (code == kNoOperand || (code >= 128 && code < kVgpr) || code >= 768) return;
  to->push_back({static_cast<uint16_t>(code), static_cast<uint16_t>(count)});
}

void alu(const Op& op, RegisterUse* u) {
  const OperandInfo* src[] = {&op.info->src0, &op.info->src1, &op.info->src2};
  static const unsigned kSmall[] = {8, 8, 6, 6, 4, 8, 8, 8};
  for (int k = 0; k < op.num_src; ++k) {
    unsigned n = dwords(src[k]->bits);
    if (op.category == Category::mfma && has(op.info->name, "f8f6f4") && k < 2) n = kSmall[(k ? op.blgp : op.cbsz) & 7];
    if (op.src[k] < 128 && k == 2 && op.info->format != Format::sop2 && (has(op.info->name, "cndmask") || has(op.info->name, "_co_"))) n = 2;
    add(&u->reads, op.src[k], n);
  }
  for (unsigned s : op.scale) add(&u->reads, s, 1);
  if (op.info->format == Format::vop3px2 || op.info->dst.bits) add(&u->writes, op.dst, dwords(op.info->dst.bits));
  if (op.sdst != kNoOperand) add(&u->writes, op.sdst, 2);
  if (has(op.info->name, "fmac") || has(op.info->name, "dot2c") || has(op.info->name, "_swap_")) add(&u->reads, op.dst, dwords(op.info->dst.bits));
  if (has(op.info->name, "setreg_b32")) add(&u->reads, op.dst, 1);
  if (op.info->format == Format::sopk && (has(op.info->name, "cmpk") || has(op.info->name, "addk") || has(op.info->name, "mulk"))) add(&u->reads, op.dst, 1);
}

void memory(const Op& op, RegisterUse* u) {
  const char* n = op.info->name;
  const unsigned data = op.mem_bytes < 4 ? 1 : op.mem_bytes / 4u;
  const bool atomic = has(n, "atomic"), store = has(n, "store");
  switch (op.info->format) {
    case Format::smem:
      if (!has(n, "time")) add(&u->reads, op.srsrc, has(n, "buffer") ? 4 : 2);  // clocks are read from no address
      if (op.soffset_en) add(&u->reads, op.soffset, 1);
      add(&u->writes, op.dst, has(n, "time") ? 2 : data);
      return;
    case Format::ds:
      if (op.info->src0.bits) add(&u->reads, op.src[0], 1);
      if (op.info->src1.bits) add(&u->reads, op.src[1], dwords(op.info->src1.bits));
      if (op.info->src2.bits) add(&u->reads, op.src[2], dwords(op.info->src2.bits));
      if (op.info->dst.bits) add(&u->writes, op.dst, dwords(op.info->dst.bits));
      return;
    case Format::mubuf:
      if (has(n, "wbl2") || has(n, "buffer_inv")) return;
      if (op.offen || op.idxen) add(&u->reads, op.src[0], op.offen && op.idxen ? 2 : 1);
      add(&u->reads, op.srsrc, 4);
      add(&u->reads, op.soffset, 1);
      break;
    case Format::scratch:
      if (op.sve) add(&u->reads, op.src[0], 1);
      if (op.saddr != 0x7f) add(&u->reads, op.saddr, 1);
      break;
    default:
      add(&u->reads, op.src[0], op.info->format == Format::global && op.saddr != 0x7f ? 1 : 2);
      if (op.info->format == Format::global && op.saddr != 0x7f) add(&u->reads, op.saddr, 2);
  }
  if (store || atomic) add(&u->reads, op.src[1], has(n, "cmpswap") ? 2 * data : data);
  if ((atomic && op.sc0) || (!atomic && !store && !op.lds)) add(&u->writes, op.dst, data);
  if (op.lds) add(&u->reads, kM0, 1);
}

}  // namespace

RegisterUse registers_of(const Op& op) {
  RegisterUse u;
  if (!op.info) return u;
  switch (op.category) {
    case Category::vmem: case Category::flat: case Category::smem: case Category::lds: memory(op, &u); break;
    default: alu(op, &u);
  }
  return u;
}

}  // namespace mori_sim
