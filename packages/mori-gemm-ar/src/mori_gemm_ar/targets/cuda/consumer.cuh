// Warpgroups 1 and 2: multiply, scale, finish, tile after tile.
#pragma once
#include "epilogue.cuh"
#include "mainloop.cuh"

DEVICE void consume(int wg, uint32_t shared, uint32_t bars, int cta, const Params& p) {
  const int num_steps = (p.k + 127) / 128, tiles = num_tiles(p);
  int stage = 0;
  uint32_t full_parity = 0, parity = 0;
  float sum[HALVES][64], product[64];
  int i = 0, t = number_of(0, bars);
  Tile tile = tile_at(min(t, tiles - 1), cta, p);
  ScaleSource from = scales_of(tile, wg, p);
  Scales even = {}, odd = {};
  load_scales(even, from, tile, p);
  auto multiply_next = [&](const Scales& scales, Scales& next, bool more) {
    barrier_wait(FULL(stage), full_parity);
    multiply_step(sum, product, shared + stage * STAGE_BYTES, EMPTY(stage), wg, scales, next, from, more, tile, p);
    if (++stage == STAGES) stage = 0, full_parity ^= 1;
  };
  while (t < tiles) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int j = 0; j < 64; ++j) sum[h][j] = 0.f;
    // Two steps a turn, each with scales of its own: with one set ptxas moves the loaded ones over before the next wgmma,
    // and so waits for the load in every step (1.17 times slower).
    for (int step = 0;;) {
      multiply_next(even, SCALES == MXFP8 ? even : odd, step + 1 < num_steps);
      if (++step == num_steps) break;
      multiply_next(SCALES == MXFP8 ? even : odd, even, step + 1 < num_steps);
      if (++step == num_steps) break;
    }
#if SCALES == PTPC
    scale_rows_and_columns(sum, scales_of(tile, wg, p), tile, p);
#endif
    const Tile done = tile;  // the scales of the next tile travel during the epilogue
    t = number_of(++i, bars);
    tile = tile_at(min(t, tiles - 1), cta, p);
    from = scales_of(tile, wg, p);
    load_scales(even, from, tile, p);
    finish_tile(sum, done, wg, shared, bars, parity, p);
  }
}
