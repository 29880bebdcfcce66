// One output of GEMM1 in fp32, and how 32 of them are rounded to e4m3. The same on every device, bit for bit, but for exp2.
#pragma once
#include "numbers.cuh"

// 1 / (1 + e) as IEEE division rounds it, without division's branch: one Newton step on the approximation; beyond 2^126 the
// quotient is a subnormal number or 0, and 0 here. (Compared on a GPU with division: no byte of the output differed.)
DEVICE float reciprocal(float x) {
  float r = reciprocal_approx(x);
  r = fmaf(fmaf(-x, r, 1.f), r, r);
  return x < 8.5e37f ? r : 0.f;
}
DEVICE float swiglu(float gate, float up, float limit) {
  if (limit > 0.f) gate = min_nan(gate, limit), up = min_nan(max_nan(up, -limit), limit);
  return gate * reciprocal(1.f + exp2_approx(-1.4426950408889634f * gate)) * up;
}
// The scale of outputs whose largest magnitude is given: rounded up to a power of two from 1.5 on; codes stay below 384. If
// one of them is infinite or NaN it is 255, and all their codes are NaN.
DEVICE uint32_t output_scale(float largest) {
  if (!(largest <= 3.4028235e38f)) return 255;
  const int e8 = (int)(((__float_as_uint(largest) + 0x00400000u) & 0xFF800000u) >> 23) - 8;
  return e8 < 0 ? 0 : e8;
}
DEVICE float output_factor(uint32_t e8) { return e8 == 255 ? not_a_number() : power_of_two(254 - e8); }
// Where the scale of (row, column of 32) lies in the form that Stage2 reads; `columns` a multiple of 8.
DEVICE int64_t shuffled_at(int row, int column, int columns) {
  return (int64_t)(row >> 5) * 32 * columns + (column >> 3) * 256 + (column & 3) * 64 + (row & 15) * 4 + (column >> 2 & 1) * 2 + (row >> 4 & 1);
}
