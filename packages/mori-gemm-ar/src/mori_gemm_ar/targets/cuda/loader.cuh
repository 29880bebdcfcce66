// Warp 0, one thread: keeps the stages full, and draws the tiles of its cluster.
#pragma once
#include "order.cuh"

DEVICE void load_stages(uint32_t shared, uint32_t bars, int cta, const Maps& maps, const Params& p) {
  const int num_steps = (p.k + 127) / 128, tiles = num_tiles(p), drawing_step = max(0, num_steps - 8);
  int stage = 0, drawn = 0;
  uint32_t parity = 1;
  send_number(0, blockIdx.x >> 1, bars, cta, p);
  for (int i = 0;; ++i) {
    const int t = number_of(i, bars);
    if (t >= tiles) return;
    const Tile tile = tile_at(t, cta, p);
    const int row = p.start[tile.owner] + tile.block * ROWS + cta * (ROWS / 2);
    for (int step = 0; step < num_steps; ++step) {
      if (step == drawing_step && cta == 0) drawn = draw(p);  // on its way for a few steps: a loader that waits starves the consumers
      if (step == min(drawing_step + 3, num_steps - 1)) send_number(i + 1, drawn, bars, cta, p);
      barrier_wait(EMPTY(stage), parity);
      const uint32_t to = shared + stage * STAGE_BYTES;
      barrier_arrive_expect(FULL(stage), STAGE_BYTES);
      tensor_load_multicast(to + cta * (A_BYTES / 2), &maps.a, FULL(stage), step * 128, row, 3);
      tensor_load(to + A_BYTES, &maps.b, FULL(stage), step * 128, tile.column * 128);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}
