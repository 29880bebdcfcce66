// Operand rows: what the GEMM's body reads of a token, made where the token is, so that this is also what travels.
//
//   R  e4m3 codes and one scale a row. The row is quantised in blocks of 32 with a scale each; then codes are brought to the
//      largest scale of the row: e4m3(code * 2^(scale - largest)). 0.1 % of 16 codes lose a bit on normal data.
//   A  bf16: code * 2^(scale - 127), exactly. (2 bytes a value on the wire, no scales.)
//
// A warp takes a row, 8 values a lane at a time; four lanes share a block of 32.
#pragma once
#include "numbers.cuh"
#include "params.cuh"

#ifndef QUANTISED
#define QUANTISED 0  // 1: the input has codes and scales already
#endif
#define EXACT 0
#define REBASED 1

DEVICE uint32_t input_scale(float largest) { return rounded_up_scale(max_nan(largest, 1e-10f)); }
DEVICE float largest_of_block(float mine) {  // of the four lanes
  mine = max_nan(mine, __shfl_xor_sync(~0u, mine, 1));
  return max_nan(mine, __shfl_xor_sync(~0u, mine, 2));
}
// Two codes times 2^-shift, rounded.
DEVICE uint32_t shift_codes(uint32_t codes, uint32_t shift) {
  const uint32_t halves = e4m3x2_to_halves((uint16_t)codes);
  const float factor = power_of_two(127 - min(shift, 100u));  // exact before the rounding
  return to_e4m3x2(half_low(halves) * factor, half_high(halves) * factor);
}

struct Eight {  // values of one lane: codes and the scale of their block
  uint32_t codes[2];
  uint32_t scale;
};

DEVICE float largest_of_pairs(const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max_nan(largest, max_nan(fabsf(bf16_low(words[i])), fabsf(bf16_high(words[i]))));
  return largest;
}
// Value 8 * `at` of the row and the seven behind it. All lanes of the warp.
DEVICE Eight quantise_eight(const char* row, const uint8_t* scales, int at, bool exists) {
  Eight e = {{0, 0}, 0};
#if QUANTISED
  if (exists) {
    const uint2 v = ((const uint2*)row)[at];
    e.codes[0] = v.x, e.codes[1] = v.y, e.scale = scales[at >> 2];
  }
#else
  uint4 v = make_uint4(0, 0, 0, 0);
  if (exists) v = ((const uint4*)row)[at];
  e.scale = input_scale(largest_of_block(largest_of_pairs(v)));
  const float factor = e.scale == 255 ? not_a_number() : power_of_two(254 - e.scale);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    e.codes[i >> 1] |= (uint32_t)to_e4m3x2(bf16_low(words[i]) * factor, bf16_high(words[i]) * factor) << 16 * (i & 1);
#endif
  return e;
}

DEVICE uint32_t largest_scale(const char* row, const uint8_t* scales, int hidden, int lane) {
  uint32_t largest = 1;  // not 0, which would be a factor of 0 in the GEMM
  for (int at = lane; at < (hidden / 8 + 31 & ~31); at += 32) {
    const bool exists = at < hidden / 8;
#if QUANTISED
    if (exists) largest = max(largest, (uint32_t)scales[at >> 2]);
#else
    uint4 v = make_uint4(0, 0, 0, 0);
    if (exists) v = ((const uint4*)row)[at];
    const uint32_t scale = input_scale(largest_of_block(largest_of_pairs(v)));
    if (exists) largest = max(largest, scale);
#endif
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
  return largest;
}

DEVICE void rebase_row(const RowsParams& p, size_t token, int lane) {
  const char* row = p.input + token * p.hidden * (QUANTISED ? 1 : 2);
  const uint8_t* scales = p.scales + token * (p.hidden / 32);
  const uint32_t largest = largest_scale(row, scales, p.hidden, lane);
  for (int at = lane; at < (p.hidden / 8 + 31 & ~31); at += 32) {
    const bool exists = at < p.hidden / 8;
    const Eight e = quantise_eight(row, scales, at, exists);
    const uint32_t shift = largest - e.scale;
    uint2 v = make_uint2(e.codes[0], e.codes[1]);
    if (shift) {
      v.x = shift_codes(v.x & 0xffff, shift) | shift_codes(v.x >> 16, shift) << 16;
      v.y = shift_codes(v.y & 0xffff, shift) | shift_codes(v.y >> 16, shift) << 16;
    }
    if (exists) ((uint2*)(p.rows + token * p.hidden))[at] = v;
  }
  if (lane == 0) p.row_scale[token] = (uint8_t)largest;
}
DEVICE uint32_t widen(uint32_t codes, float scale) {
  const uint32_t halves = e4m3x2_to_halves((uint16_t)codes);
  return to_bf16x2(half_low(halves) * scale, half_high(halves) * scale);
}
DEVICE void widen_row(const RowsParams& p, size_t token, int lane) {
  const char* row = p.input + token * p.hidden * (QUANTISED ? 1 : 2);
  const uint8_t* scales = p.scales + token * (p.hidden / 32);
  for (int at = lane; at < (p.hidden / 8 + 31 & ~31); at += 32) {
    const bool exists = at < p.hidden / 8;
    const Eight e = quantise_eight(row, scales, at, exists);
    const float scale = e.scale ? power_of_two(e.scale) : __uint_as_float(0x00400000u);
    if (exists)
      ((uint4*)(p.rows + token * p.hidden * 2))[at] = make_uint4(widen(e.codes[0] & 0xffff, scale), widen(e.codes[0] >> 16, scale),
                                                                 widen(e.codes[1] & 0xffff, scale), widen(e.codes[1] >> 16, scale));
  }
}

// Rows first, first + step, ..: one warp.
DEVICE void make_rows(const RowsParams& p, int first, int step) {
  for (int token = first; token < p.tokens; token += step) {
#if BODY == EXACT
    widen_row(p, token, threadIdx.x & 31);
#else
    rebase_row(p, token, threadIdx.x & 31);
#endif
  }
}
