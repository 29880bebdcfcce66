// fp4 weights to A fragments, in registers, exactly.
//
// Body R: a row of weights has one power of two (the base), and each 32 columns a delta d above it; a code v (0, .5, 1, 1.5,
// 2, 3, 4, 6 with a sign) becomes e4m3(v * 2^(d - 5)), a normal number for d = 0 .. 11. As 2^d adds 8 d to a normal e4m3
// code, the eight magnitudes are a table in two registers plus d * 0x08080808 (the zero stays), and a byte permute looks up
// four codes at a time. base = 2^(smallest e8 - 127 + 5).
// Body A: v * 2^(d - 16) in bf16: the code's bits, put where bf16 has exponent and mantissa, are v * 2^-126, times 2^(110 + d)
// in one exact multiplication; d = 0 .. 17. base = 2^(smallest e8 - 127 + 16).
//
// Words of eight codes are packed at load time (weights.py) so that this needs few operations:
//   R  magnitude i of half h at bit 16 h + 4 i, its sign at bit 8 i + 3 + 4 h
//   A  pair p (K 2 p', 2 p' + 1 of the fragment's register p) as decode_bf16 takes it apart
#pragma once
#include "numbers.cuh"

#define MAX_DELTA_REBASED 11
#define MAX_DELTA_EXACT 17

// `sixteen` is 16, unknown to the compiler: the shift then runs on the multiplier pipe instead of the busier logic pipe.
DEVICE void decode_fp8(uint32_t word, uint32_t table_low, uint32_t table_high, uint32_t& first, uint32_t& second, uint32_t sixteen) {
  const uint32_t magnitudes = word & 0x77777777u;
  first = __byte_perm(table_low, table_high, magnitudes) | ((word * sixteen) & 0x80808080u);
  second = __byte_perm(table_low, table_high, magnitudes >> 16) | (word & 0x80808080u);
}
// One K step of 32 of an m64 fragment: rows g and g + 8, whose deltas of the four steps of a K block are bytes of `deltas`.
DEVICE void decode_step_fp8(uint32_t (&a)[8], int half, uint32_t word_low, uint32_t word_high, const uint32_t (&deltas)[2], int step,
                            uint32_t sixteen) {
  const uint32_t d0 = __byte_perm(deltas[0], 0, 0x4440 + step), d1 = __byte_perm(deltas[1], 0, 0x4440 + step);
  uint32_t* to = a + 4 * half;
  decode_fp8(word_low, 0x14100800u + d0 * 0x08080800u, 0x24201C18u + d0 * 0x08080808u, to[0], to[2], sixteen);
  decode_fp8(word_high, 0x14100800u + d1 * 0x08080800u, 0x24201C18u + d1 * 0x08080808u, to[1], to[3], sixteen);
}
// One K step of 32 of one row is registers of two K steps of 16.
DEVICE void decode_bf16(uint32_t word, uint32_t delta, uint32_t& p0, uint32_t& p1, uint32_t& p2, uint32_t& p3) {
  const uint32_t factor = ((237u + delta) << 7) * 0x10001u;  // 2^(110 + delta), twice
  p0 = mul_bf16x2(word & 0x81C081C0u, factor);
  p1 = mul_bf16x2((word << 3) & 0x81C081C0u, factor);
  p2 = mul_bf16x2((word << 6) & 0x81C081C0u, factor);
  p3 = mul_bf16x2(((word << 1) & 0x80008000u) | ((word >> 5) & 0x01000100u) | ((word >> 4) & 0x00C000C0u), factor);
}
