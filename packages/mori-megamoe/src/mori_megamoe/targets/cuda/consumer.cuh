// Warpgroups 1 and 2: item after item, multiply and finish: finish(sum, gate, up, target, thread). Each has 128 of the CTA's 256
// weight rows.
#pragma once
#include "sums.cuh"

template <typename Finish>
DEVICE void consume_items(int wg, uint32_t shared, int cta, const Gemm1Params& p, Finish finish) {
  const Thread t(wg, threadIdx.x & 127);
  const unsigned count = num_items(p);
  Stage stage(0);
  float sum[2][TILE_ROWS / 2];
  unsigned item;
  for (int i = 0; (item = item_of(i, count, shared, p)) != NO_ITEM; ++i) {
    const int tile = tile_of(item), block = pair_of(item) * 2 + cta;
#pragma unroll
    for (int j = 0; j < TILE_ROWS / 2; ++j) sum[0][j] = 0.f, sum[1][j] = 0.f;
    multiply_item(sum, stage, t, shared, p);
    const float* base = p.base + (int64_t)__ldg(p.tiles.expert + tile) * p.width + block * 256 + wg * 128 + t.warp * 16 + (t.lane >> 2);
    const float gate[2] = {__ldg(base), __ldg(base + 64)}, up[2] = {__ldg(base + 8), __ldg(base + 72)};
    const Target to = {block, __ldg(p.tiles.row_base + tile)};
    if (BODY == REBASED) scale_rows(sum, __ldg(p.tiles.input_base + tile), t.lane & 3, p);
    if (SUMS) store_sums(sum, gate, up, to, t, p);
    finish(sum, gate, up, to, t);
  }
  if ((threadIdx.x & 127) == 0) stores_wait();
}
