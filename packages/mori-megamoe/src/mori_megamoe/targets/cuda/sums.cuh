// What both epilogues do with an item's sums.
//
// A thread holds, for rows 8 j + 2 c + {0, 1} of the tile, sum[f][4 j + {0, 1}] and, in a second row of weights, sum[f][4 j +
// {2, 3}]. What these rows of weights are to each other, gate and up or columns 16 apart, is the epilogue's affair.
#pragma once
#include "mainloop.cuh"

struct Target {  // where an item's results go
  int block;     // of 256 weight rows, 128 outputs
  int row;       // first row of the output
};

DEVICE void scale_rows(float (&sum)[2][TILE_ROWS / 2], int first_row, int c, const Gemm1Params& p) {
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j) {
    const uint32_t e8 = *(const uint16_t*)(p.row_scale + first_row + 8 * j + 2 * c);
    const float s0 = power_of_two(e8 & 255), s1 = power_of_two(e8 >> 8);
#pragma unroll
    for (int f = 0; f < 2; ++f) sum[f][4 * j] *= s0, sum[f][4 * j + 1] *= s1, sum[f][4 * j + 2] *= s0, sum[f][4 * j + 3] *= s1;
  }
}

DEVICE void store_sums(const float (&sum)[2][TILE_ROWS / 2], const float (&gate)[2], const float (&up)[2], const Target& to, const Thread& t,
                       const Gemm1Params& p) {
  const int g = t.lane >> 2, c = t.lane & 3, column = to.block * 128 + t.wg * 64 + t.warp * 16 + 2 * g;
#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int j = 0; j < TILE_ROWS / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* row = p.sums + (int64_t)(to.row + 8 * j + 2 * c + h) * p.width + column + f;
        row[0] = sum[f][4 * j + h] * gate[f], row[p.width >> 1] = sum[f][4 * j + 2 + h] * up[f];
      }
}

// largest[i] of the 8 lanes that share c, each halving of which keeps one half of the rows.
template <int N>
DEVICE void halve(float (&largest)[TILE_ROWS / 4], bool high, int lanes) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float keep = high ? largest[i + N] : largest[i], send = high ? largest[i] : largest[i + N];
    largest[i] = max_nan(keep, __shfl_xor_sync(~0u, send, lanes));
  }
}
// All of them: the maxima of TILE_ROWS / 32 rows are this lane's, in largest[0] and on. Returns the first of these rows.
DEVICE int share_largest(float (&largest)[TILE_ROWS / 4], int g) {
  halve<TILE_ROWS / 8>(largest, g & 1, 4);
  halve<TILE_ROWS / 16>(largest, g >> 1 & 1, 8);
  halve<TILE_ROWS / 32>(largest, g >> 2, 16);
  return (g & 1) * (TILE_ROWS / 8) + (g >> 1 & 1) * (TILE_ROWS / 16) + (g >> 2) * (TILE_ROWS / 32);
}
