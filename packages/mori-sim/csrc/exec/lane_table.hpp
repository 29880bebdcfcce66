// The 64-lane arithmetic kernels: one function per opcode, found by name when an instruction is decoded.
//
// lanes.inc is compiled several times for different processors (lanes_base.cpp, lanes_v3.cpp); lane_kernel() picks
// the fastest set this machine can run. All sets give the same bits.
#pragma once

#include <cstdint>

namespace mori_sim {

struct Op;
struct Options;

struct LaneCall {
  uint32_t* d;              // result rows
  const uint32_t *a, *b, *c;
  const uint32_t* old;      // the destination rows before the instruction
  uint64_t mask_in = 0;     // carry in, condition, vcc
  uint64_t mask_out = 0;    // compare result, carry out
  const Op* op = nullptr;
  const Options* options = nullptr;
  uint32_t mode = 0;
};

using LaneFn = void (*)(LaneCall&);

enum LaneFlags : uint16_t {
  kWritesMask = 1,     // compare or carry: mask_out goes to sdst
  kReadsMask = 2,      // src2 (or vcc) is a lane mask
  kAccumulates = 4,    // src2 is the old destination
  kNoResult = 8,       // no VGPR destination
  kOwnModifiers = 16,  // handles opsel/neg itself
  kPreserves = 32,     // 16-bit result keeps the other half
  kCmpx = 64,          // also writes exec
  kReadsVcc = 128,     // v_div_fmas
};

struct LaneImpl {
  const char* name;
  LaneFn fn;
  uint16_t flags;
};

struct MatrixCall {
  const uint32_t *a, *b, *c;  // register rows; c may be null: `c_splat` then
  uint32_t c_splat;
  uint64_t c_splat64;
  uint32_t* d;
  const uint32_t *scale_a, *scale_b;  // rows, null: unscaled
  const Op* op;
  const Options* options;
};
struct MatrixShape {
  const char* name;
  uint8_t m, n, k, blocks;
  char a, b;       // 'f' f32, 'h' f16, 'b' bf16, 'i' i8, '8' fp8, '5' bf8, 'd' f64, 'x' by cbsz/blgp
  char out;        // 'f', 'i', 'd'
  bool sparse;
};
using MatrixFn = void (*)(const MatrixShape&, const MatrixCall&);

const LaneImpl* lane_kernel(const char* name);
MatrixFn matrix_kernel();
const char* lane_set_name();

}  // namespace mori_sim
