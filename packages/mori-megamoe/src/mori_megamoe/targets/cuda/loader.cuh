// Warp 0: keeps the stages full. Lane 0 issues; the other lanes help to wait for rows.
#pragma once
#include "schedule.cuh"

// One item's K blocks: the cluster shares the operand rows (each CTA loads half of them for both), each has its own weights.
DEVICE void load_item(unsigned item, Stage& stage, uint32_t shared, int cta, const Gemm1Maps& maps, const Gemm1Params& p) {
  const int tile = tile_of(item), block = pair_of(item) * 2 + cta;
  const int row = __ldg(p.tiles.input_base + tile) + cta * (TILE_ROWS / 2);
  const uint8_t* weights =
      p.weights + ((int64_t)__ldg(p.tiles.expert + tile) * (p.width >> 8) + block) * p.num_steps * WEIGHT_BYTES;
#pragma unroll 1  // there are 24 registers
  for (int step = 0; step < p.num_steps; ++step, weights += WEIGHT_BYTES) {
    barrier_wait(EMPTY(stage.number), stage.parity);
    const uint32_t to = shared + stage.number * STAGE_BYTES, full = FULL(stage.number), half = cta * (TILE_ROWS * 64);
    barrier_arrive_expect(full, STAGE_BYTES);
    tensor_load_multicast(to + half, &maps.rows, full, step * 128, row, 3);
    if (BODY == EXACT) tensor_load_multicast(to + TILE_ROWS * 128 + half, &maps.rows, full, step * 128 + 64, row, 3);
    bulk_load(to + OPERAND_BYTES, weights, WEIGHT_BYTES, full);
    stage.next();
  }
}

DEVICE void load_items(uint32_t shared, int cta, const Gemm1Maps& maps, const Gemm1Params& p) {
  Stage stage(1);
#if WAIT == NEVER
  if (threadIdx.x) return;
  const unsigned count = num_items(p);
  unsigned item;
  for (int i = 0; (item = item_of(i, count, shared, p)) != NO_ITEM; ++i) load_item(item, stage, shared, cta, maps, p);
#else
  const int lane = threadIdx.x;
  if (lane == 0) send_ticket(0, cta ? 0 : draw(p), shared, cta);
  for (int i = 0;; ++i) {
    const unsigned ticket = ticket_of(i, shared);
    unsigned item = NO_ITEM;
    if (ticket < num_items(p)) {
#if WAIT == SIGNALS
      item = __ldg(p.tiles.items + ticket);
      await_rows(tile_of(item), lane, p);
#else
      item = await_ready(ticket, p);
#endif
    }
    if (lane == 0) tell_item(i, item, shared);
    if (item == NO_ITEM) return;
    if (lane == 0) {
      fence_async();  // the rows were stored by threads, and are loaded by the bulk copy engine
      load_item(item, stage, shared, cta, maps, p);
      send_ticket(i + 1, cta ? 0 : draw(p), shared, cta);  // the stages loaded ahead hide the atomic's microsecond
    }
    __syncwarp();
  }
#endif
}
