// One step of 128 along k: matrix instructions of a consumer warpgroup, promoted to fp32.
#pragma once
#include "scales.cuh"
#include "wgmma.cuh"

// sum[half] += one step's products. `product` is the only wgmma accumulator: it leaves room for 128 sums a thread.
// `next`, the scales of the step after, are on their way from here on.
DEVICE void multiply_step(float (&sum)[HALVES][64], float (&product)[64], uint32_t stage, uint32_t empty, int wg, const Scales& scales, Scales& next,
                          ScaleSource& from, bool more, const Tile& tile, const Params& p) {
  const int thread = threadIdx.x & 127;
  uint64_t a = operand(stage + wg * (WG_ROWS * 128));
  const uint64_t b = operand(stage + A_BYTES);
  const Scales now = times_b(scales);
#pragma unroll
  for (int h = 0; h < HALVES; ++h, a += 64 * 128 / 16) {
#if SCALES == MXFP8
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WGMMA_FENCE();
      wgmma_64x128x32(product, a + 2 * k, b + 2 * k, 0);
      WGMMA_COMMIT();
      WGMMA_WAIT(0);
      if (h == HALVES - 1 && k == 3 && thread < 2) barrier_arrive_cluster(empty, thread);
      const float a0 = from_e8m0(now.a[2 * h] >> (8 * k) & 255), a1 = from_e8m0(now.a[2 * h + 1] >> (8 * k) & 255);
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float bg = from_e8m0(now.b[g] >> (8 * k) & 255), c0 = a0 * bg, c1 = a1 * bg;
#pragma unroll
        for (int i = 16 * g; i < 16 * g + 16; i += 4) {
          sum[h][i] += product[i] * c0, sum[h][i + 1] += product[i + 1] * c0;
          sum[h][i + 2] += product[i + 2] * c1, sum[h][i + 3] += product[i + 3] * c1;
        }
      }
    }
    if (h == HALVES - 1 && more) load_scales(next, from, tile, p);  // into this step's registers: there are not enough for two sets
#else
    WGMMA_FENCE();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_64x128x32(product, a + 2 * k, b + 2 * k, k > 0);
    WGMMA_COMMIT();
    if (h == 0 && more) load_scales(next, from, tile, p);  // behind the wgmma: it need not wait for their addresses
    WGMMA_WAIT(0);
    if (h == HALVES - 1 && thread < 2) barrier_arrive_cluster(empty, thread);
#if SCALES == BLOCKSCALE
    const float c0 = now.a[2 * h], c1 = now.a[2 * h + 1];  // times that of b
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      sum[h][i] += product[i] * c0, sum[h][i + 1] += product[i + 1] * c0;
      sum[h][i + 2] += product[i + 2] * c1, sum[h][i + 3] += product[i + 3] * c1;
    }
#else
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[h][i] += product[i];
#endif
#endif
  }
}
