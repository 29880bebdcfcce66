// gfx950 instructions, decoded once.
//
// decode() turns the dwords at one address into an Op: the table row, the operands as register numbers in one common
// numbering, and every modifier in a field of its own. The executor binds a function to it (exec/bind.cpp) and never
// looks at the encoding again. text() prints an Op the way LLVM's assembler reads it.
//
// Operand numbering (Op::dst, Op::src): 0..127 scalar registers as encoded (106 vcc, 124 m0, 126 exec), 128..248 inline
// constants, 249 SDWA and 250 DPP never appear (the real source is filled in), 251 vccz, 252 execz, 253 scc,
// 255 literal, 256+n VGPR n, 512+n AGPR n.
#pragma once

#include <cstdint>
#include <string>

namespace mori_sim {

struct Wave;
struct Op;

enum class Format : uint8_t {
  none, sop1, sop2, sopc, sopk, sopp, smem, vop1, vop2, vopc, vop3, vop3sd, vop3p, vop3px2,
  mubuf, mtbuf, flat, global, scratch, ds,
};

struct OperandInfo {
  uint16_t bits;
  char type;  // 'f' f32, 'd' f64, 'h' f16, 'b' bf16, 'p' two f16, 'q' two f32, 'i' anything else, '-' absent
};

struct OpInfo {  // one row of tables.inc
  Format format;
  uint16_t opcode;
  const char* name;  // without _e32/_e64
  OperandInfo dst, src0, src1, src2;
};

constexpr uint16_t kLiteral = 255, kVgpr = 256, kAgpr = 512, kNoOperand = 0xffff;
constexpr uint16_t kVcc = 106, kM0 = 124, kExec = 126;

enum class Category : uint8_t { unknown, valu, salu, mfma, vmem, smem, lds, flat, branch, wait, barrier, other };

using RunFn = void (*)(Wave&, const Op&);

struct Op {
  RunFn run = nullptr;          // set by bind(); null until the slot is decoded
  const void* impl = nullptr;   // what `run` needs: a lane kernel, a matrix shape, ...
  mutable const void* registers = nullptr;  // strict mode: a RegisterUse, once asked for
  const OpInfo* info = nullptr; // null: not an instruction
  uint8_t nbytes = 4;
  Category category = Category::unknown;
  uint8_t num_src = 0;
  bool wide_dst = false;
  uint16_t dst = kNoOperand, sdst = kNoOperand;
  uint16_t src[3] = {kNoOperand, kNoOperand, kNoOperand};
  uint32_t literal = 0;
  // VALU modifiers
  uint8_t abs = 0, neg = 0, neg_hi = 0, omod = 0, opsel = 0, opsel_hi = 0;
  bool clamp = false, sdwa = false, dpp = false, explicit_vop3 = false;
  uint32_t ext = 0;             // the SDWA or DPP dword
  // MFMA
  uint8_t cbsz = 0, abid = 0, blgp = 0;
  uint16_t scale[2] = {kNoOperand, kNoOperand};
  // memory
  int32_t offset = 0;
  uint8_t offset0 = 0, offset1 = 0;
  uint16_t saddr = kNoOperand, srsrc = kNoOperand, soffset = kNoOperand;
  bool sc0 = false, sc1 = false, nt = false, lds = false, offen = false, idxen = false, gds = false, sve = false,
       acc = false, imm = false, soffset_en = false;
  uint8_t dfmt = 0, nfmt = 0;
  int16_t simm16 = 0;
  uint8_t mem_bytes = 0;        // bytes moved per lane (per address for read2/write2)
  uint32_t word[4] = {0, 0, 0, 0};
};

// `words` holds `available` dwords from the instruction on. False when they are no instruction.
bool decode(const uint32_t* words, unsigned available, Op* op);
std::string text(const Op& op, uint64_t pc);
const char* category_name(Category c);
const OpInfo* find_info(Format format, unsigned opcode);
const OpInfo* all_infos(size_t* count);

// exec/bind.cpp: sets op->run and op->impl. Empty string: implemented; else the reason why it is not.
std::string bind(Op* op);

}  // namespace mori_sim
