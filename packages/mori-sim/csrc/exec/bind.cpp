// Decoded instruction -> function. The one place that says what is implemented.
#include "exec/units.hpp"

namespace mori_sim {

namespace {

// Encodings no assembler produces: scalars where the unit needs registers.
bool operands_fit(const Op& op) {
  const OperandInfo* src[] = {&op.info->src0, &op.info->src1, &op.info->src2};
  if (op.category != Category::valu) return true;
  const bool swap = std::strstr(op.info->name, "swap") != nullptr;
  for (int k = 0; k < op.num_src; ++k)
    if (op.src[k] < kVgpr && (src[k]->bits > 64 || swap)) return false;
  return !(swap && (op.sdwa || op.dpp));
}

}  // namespace

std::string bind(Op* op) {
  if (!op->info) return "no gfx950 instruction has this encoding";
  const char* name = op->info->name;
  if (!operands_fit(*op)) return std::string(name) + " with operands it cannot have";
  RunFn fn = nullptr;
  switch (op->info->format) {
    case Format::sop1: case Format::sop2: case Format::sopc: case Format::sopk: case Format::sopp: fn = scalar_unit(name); break;
    case Format::smem: fn = scalar_memory_unit(*op); break;
    case Format::ds: fn = lds_unit(op); break;
    case Format::mubuf: case Format::mtbuf: case Format::flat: case Format::global: case Format::scratch: fn = vector_memory_unit(op); break;
    default:
      if (op->category == Category::mfma) fn = matrix_unit(op);
      else if (!(fn = cross_lane_unit(name))) fn = vector_unit(op);
  }
  if (!fn) return std::string(name) + " is not implemented";
  op->run = fn;
  return "";
}

const std::vector<std::string>& unknown_behaviours() {
  static const std::vector<std::string> list = {
      "v_cvt_pk_{fp8,bf8}_f32 and the scaled forms out of range: NaN (fp8) or infinity (bf8) unless MODE.FP16_OVFL or the option fp8_saturates is set; then the largest finite value",
      "conversions to fp4/fp6/bf6: out of range and NaN give the largest magnitude with the source's sign",
      "v_rcp/rsq/sqrt/exp/log/sin/cos: the correctly rounded result is given; hardware may differ by 1 ulp. f32 denormals are flushed on both sides of these",
      "MFMA accumulation order inside one instruction: see mfma_order; the default sums in float64 and rounds once",
      "f8f6f4 8-bit operands: two runs of 16 k per lane (4- and 6-bit: 32 consecutive)",
      "v_cvt_sr_*: the random bits are added right below the kept mantissa",
      "16-bit VOP3-only results keep the other half of the register; those that also exist as VOP1/VOP2 clear the upper half",
      "matrix results that are NaN are 0x7fc00000; elsewhere a NaN's payload is the host's",
      "v_div_scale/v_div_fixup at the ends of the range: chosen so that the compiler's division sequence is correctly rounded there too",
      "strict mode: plain loads of uncached memory are taken to miss L1; copy engines neither probe nor update any L2",
      "packed f32 with an inline constant: the constant stands in both halves",
      "raw buffer bounds: voffset + offset + soffset + size must not pass num_records, dword by dword",
      "ds_read_*_tr_*: tile of 16 lanes, lane c gets column c; only with all lanes active",
      "buffer/global load to LDS: lane i writes M0 + offset + i * size",
      "s_memtime counts wave instructions of the whole machine; s_memrealtime is the host's clock at 100 MHz",
      "v_permlane{16,32}_swap with inactive lanes: a lane is written only if it is active",
      "ds_write and global stores of several lanes to one address: the highest lane wins",
  };
  return list;
}

}  // namespace mori_sim
