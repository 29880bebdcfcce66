// A finished item of GEMM1: SwiGLU, e4m3 with a scale for 32 columns, stored.
//
// A thread holds, for rows 8 j + 2 c + {0, 1} of the tile, gate (sum[f][4 j + {0, 1}]) and up (.. + {2, 3}) of output
// 16 warp + 2 g + f of its warpgroup's 64. So the codes of two neighbouring outputs make a 16-bit pair, which is what a
// transposing stmatrix takes. Each scale belongs to the 32 outputs of two warps: the maximum over g goes by shuffles,
// over the two warps through shared memory.
#pragma once
#include "sums.cuh"
#include "swiglu.cuh"

DEVICE void finish_item(float (&sum)[2][TILE_ROWS / 2], const float (&gate)[2], const float (&up)[2], const Target& to, const Thread& t,
                        uint32_t shared, const Gemm1Maps& maps, const Gemm1Params& p) {
  const int g = t.lane >> 2, c = t.lane & 3, thread = t.warp * 32 + t.lane;
  const uint32_t out = shared + OUT_AT(t.wg), maxima = shared + MAXIMA_AT(t.wg), factors = shared + FACTORS_AT(t.wg);
  float largest[TILE_ROWS / 4];
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int f = 0; f < 2; ++f) sum[f][4 * j + h] = swiglu(sum[f][4 * j + h] * gate[f], sum[f][4 * j + 2 + h] * up[f], p.limit);
      largest[2 * j + h] = max_nan(fabsf(sum[0][4 * j + h]), fabsf(sum[1][4 * j + h]));
    }
  const int first = share_largest(largest, g);
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 32; ++i) {
    const int x = first + i;
    store_shared(maxima + (t.warp * TILE_ROWS + 8 * (x >> 1) + 2 * c + (x & 1)) * 4, largest[i]);
  }
  if (thread == 0) stores_wait_read();  // of the item before: its codes have left `out`
  warpgroup_sync(t.wg);
  if (thread < TILE_ROWS) {
    const int row = to.row + thread, column = to.block * 4 + t.wg * 2, columns = p.width / 64;
    uint32_t e8[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const uint32_t pair = maxima + (2 * q * TILE_ROWS + thread) * 4;  // of two warps
      e8[q] = output_scale(max_nan(load_shared(pair), load_shared(pair + TILE_ROWS * 4)));
      store_shared(factors + (q * TILE_ROWS + thread) * 4, output_factor(e8[q]));
    }
    if (p.scales) *(uint16_t*)(p.scales + (int64_t)row * columns + column) = (uint16_t)(e8[0] | e8[1] << 8);
    if (p.shuffled_scales) {
      uint8_t* at = p.shuffled_scales + shuffled_at(row, column, columns);
      at[0] = (uint8_t)e8[0], at[64] = (uint8_t)e8[1];
    }
  }
  warpgroup_sync(t.wg);
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 32; ++i) {
    uint32_t codes[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int j = 4 * i + x;
      const float2 s = load_shared_2(factors + ((t.warp >> 1) * TILE_ROWS + 8 * j + 2 * c) * 4);
      codes[x] = to_e4m3x2(sum[0][4 * j] * s.x, sum[1][4 * j] * s.x) | (uint32_t)to_e4m3x2(sum[0][4 * j + 1] * s.y, sum[1][4 * j + 1] * s.y) << 16;
    }
    store_matrix_x4_transposed(out + (32 * i + t.lane) * 64 + t.warp * 16, codes);  // a lane's address is that of one row
  }
  fence_async_shared();
  warpgroup_sync(t.wg);
  if (thread == 0) tensor_store(&maps.out, out, to.block * 128 + t.wg * 64, to.row), stores_commit();
}
