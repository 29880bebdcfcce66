// The number formats: conversions that the hardware does, one instruction a function.
#pragma once
#include "types.cuh"

DEVICE float exp2_approx(float x) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE uint32_t mul_bf16x2(uint32_t x, uint32_t y) {  // subnormals stay
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
DEVICE uint32_t to_bf16x2(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE uint16_t to_e4m3x2(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE uint32_t e4m3x2_to_halves(uint16_t codes) {  // exact
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
  return r;
}
DEVICE float half_low(uint32_t pair) {
  float r;
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(r) : "r"(pair));
  return r;
}
DEVICE float half_high(uint32_t pair) {
  float r;
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(r) : "r"(pair));
  return r;
}
DEVICE float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float power_of_two(uint32_t e8) { return __uint_as_float(e8 << 23); }  // 2^(e8 - 127) for 1..254; 0: 0
DEVICE float max_nan(float a, float b) {                                      // NaN if either is
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DEVICE float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

// The scale of 32 values whose largest magnitude is given: the least power of two that brings it to 448 at most; 255, a NaN,
// if it is infinite or NaN: then all their codes are NaN.
DEVICE uint32_t rounded_up_scale(float largest) {
  const uint32_t bits = __float_as_uint(__fmul_rn(largest, __uint_as_float(0x3B124925u)));  // just above 1 / 448
  return min((bits >> 23) + ((bits & 0x7fffffu) != 0), 255u);
}
