// A finished item of GEMM2: rows times their weights, rounded, stored at the ranks of their tokens.
//
// A thread holds, for rows 8 j + 2 c + {0, 1} of the tile, columns 2 g + f (sum[f][4 j + {0, 1}]) and 16 + 2 g + f (.. + {2, 3})
// of its warp's 32. So a scale of 32 columns is one warp's, and its maximum goes by shuffles.
// A quarter of the rows at a time goes through shared memory (the place of GEMM1's codes), so that what a warpgroup has of a row,
// 128 columns, leaves in one run. 16-byte units of a row are swapped by its number: no two lanes meet in a bank.
//
// A weighted row:  bf16  [D] bf16      fp8  [D] e4m3, then [D / 32] e8m0     (arithmetic.partial_rows)
#pragma once
#include "sums.cuh"

#define BF16 0
#define BLOCKWISE 1
#ifndef PARTIALS
#define PARTIALS BF16
#endif
#define CHUNK_ROWS (TILE_ROWS / 4)
#define RUN_BYTES (PARTIALS == BF16 ? 256 : 128)
#define RUN_UNITS (RUN_BYTES / 16)

DEVICE void weigh_rows(float (&sum)[2][TILE_ROWS / 2], const float (&low)[2], const float (&high)[2], const float* weight, int c) {
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j) {
    const float2 w = *(const float2*)(weight + 8 * j + 2 * c);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      sum[f][4 * j] = sum[f][4 * j] * low[f] * w.x, sum[f][4 * j + 1] = sum[f][4 * j + 1] * low[f] * w.y;
      sum[f][4 * j + 2] = sum[f][4 * j + 2] * high[f] * w.x, sum[f][4 * j + 3] = sum[f][4 * j + 3] * high[f] * w.y;
    }
  }
}

// Where a row goes; null for padding.
DEVICE char* partial_of(int row, const BackParams& b) {
  const unsigned word = __ldcg((const unsigned*)(b.landing.window[b.rank] + b.landing.at_source) + row);
  const unsigned source = word & 0xffffffu, rank = source / b.max_tokens, token = source - rank * b.max_tokens;
  if (rank >= (unsigned)b.world) return nullptr;
  return b.landing.window[rank] + b.landing.at_partials + (size_t)(token * b.top_k + (word >> 24)) * b.pitch;
}

DEVICE uint32_t unit_of(uint32_t out, int row, int unit) {
  return out + row * RUN_BYTES + ((unit ^ (row & (PARTIALS == BF16 ? 6 : 7))) << 4);
}

#if PARTIALS == BLOCKWISE
// The factor 2^(127 - e8) of each row's 32 columns, for all lanes of the warp and, after a sync, of the warpgroup.
DEVICE void find_factors(const float (&sum)[2][TILE_ROWS / 2], uint32_t factors, const Thread& t) {
  const int g = t.lane >> 2, c = t.lane & 3;
  float largest[TILE_ROWS / 4];
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      largest[2 * j + h] = max_nan(max_nan(fabsf(sum[0][4 * j + h]), fabsf(sum[1][4 * j + h])),
                                   max_nan(fabsf(sum[0][4 * j + 2 + h]), fabsf(sum[1][4 * j + 2 + h])));
  const int first = share_largest(largest, g);
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 32; ++i) {
    const int x = first + i;
    const uint32_t e8 = rounded_up_scale(largest[i]);
    store_shared(factors + (t.warp * TILE_ROWS + 8 * (x >> 1) + 2 * c + (x & 1)) * 4, e8 == 255 ? not_a_number() : power_of_two(254 - e8));
  }
}
DEVICE void store_scales(uint32_t factors, const Target& to, const Thread& t, const BackParams& b) {
  const int row = t.warp * 32 + t.lane;
  if (row >= TILE_ROWS) return;
  uint32_t scales = 0;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) scales |= (254u - (load_shared_word(factors + (warp * TILE_ROWS + row) * 4) >> 23) & 255u) << 8 * warp;
  if (char* there = partial_of(to.row + row, b)) *(uint32_t*)(there + b.model_dim + to.block * 8 + t.wg * 4) = scales;
}
// Lanes whose columns are neighbours swap, so that each has four columns of one row: the even one of the first row.
DEVICE void store_codes(uint32_t out, int row, const float (&sum)[2][TILE_ROWS / 2], int j, float2 factor, const Thread& t) {
  const int g = t.lane >> 2;
  uint32_t codes[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float s = h ? factor.y : factor.x;
    codes[h] = to_e4m3x2(sum[0][4 * j + h] * s, sum[1][4 * j + h] * s) |
               (uint32_t)to_e4m3x2(sum[0][4 * j + 2 + h] * s, sum[1][4 * j + 2 + h] * s) << 16;
  }
  const uint32_t mine = g & 1 ? codes[1] : codes[0], other = __shfl_xor_sync(~0u, g & 1 ? codes[0] : codes[1], 4);
  const uint32_t left = g & 1 ? other : mine, right = g & 1 ? mine : other;
  store_shared_word(unit_of(out, row + (g & 1), t.warp * 2) + (g >> 1) * 4, __byte_perm(left, right, 0x5410));
  store_shared_word(unit_of(out, row + (g & 1), t.warp * 2 + 1) + (g >> 1) * 4, __byte_perm(left, right, 0x7632));
}
#else
DEVICE void store_pairs(uint32_t out, int row, const float (&sum)[2][TILE_ROWS / 2], int j, const Thread& t) {
  const int g = t.lane >> 2;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_shared_word(unit_of(out, row + h, t.warp * 4 + half * 2 + (g >> 2)) + (g & 3) * 4,
                        to_bf16x2(sum[0][4 * j + 2 * half + h], sum[1][4 * j + 2 * half + h]));
}
#endif

DEVICE void bring_back(float (&sum)[2][TILE_ROWS / 2], const float (&low)[2], const float (&high)[2], const Target& to, const Thread& t,
                       uint32_t shared, const BackParams& b) {
  if (to.block * 256 >= b.model_dim) return;  // zeros that fill an item
  const int c = t.lane & 3, thread = t.warp * 32 + t.lane;
  const uint32_t out = shared + OUT_AT(t.wg);
  weigh_rows(sum, low, high, (const float*)(b.landing.window[b.rank] + b.landing.at_weight) + to.row, c);
#if PARTIALS == BLOCKWISE
  const uint32_t factors = shared + MAXIMA_AT(t.wg);
  find_factors(sum, factors, t);
  warpgroup_sync(t.wg);
  store_scales(factors, to, t, b);
#endif
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    warpgroup_sync(t.wg);  // the rows before have been read
#pragma unroll
    for (int x = 0; x < CHUNK_ROWS / 8; ++x) {
      const int j = chunk * (CHUNK_ROWS / 8) + x, row = 8 * x + 2 * c;
#if PARTIALS == BLOCKWISE
      store_codes(out, row, sum, j, load_shared_2(factors + (t.warp * TILE_ROWS + 8 * j + 2 * c) * 4), t);
#else
      store_pairs(out, row, sum, j, t);
#endif
    }
    warpgroup_sync(t.wg);
#pragma unroll 1
    for (int i = thread; i < CHUNK_ROWS * RUN_UNITS; i += 128) {
      const int row = i / RUN_UNITS, unit = i % RUN_UNITS;
      if (char* there = partial_of(to.row + chunk * CHUNK_ROWS + row, b)) {
        uint32_t v[4];
        load_words(v, unit_of(out, row, unit));
        *(uint4*)(there + (to.block * 2 + t.wg) * RUN_BYTES + unit * 16) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}
