// Rows that have come in slots, to where they land. The protocol: slots.cuh.
#pragma once
#include "send.cuh"

// All lanes. A slot that is late has been written down, and what it holds is moved all the same: the call ends, and is refused.
DEVICE void await_slot(int slot, const SendParams& p) {
  const Limits limits = {p.fault, p.timeout_ns, (uint32_t)p.rank};
  wait_word<SYSTEM>(p.slots.came + slot, 1, limits, rank_of_slot(slot, p.slots), WAIT_SLOT, slot % p.slots.per_rank);
}

DEVICE void move_unit(const Move& move, int lane, const SendParams& p) {
  const int slot = slot_of(move.source, move.expert, p.slots);
  if (lane == 0) await_slot(slot, p);
  __syncwarp();
  const uint4* from = (const uint4*)p.slots.incoming + ((size_t)slot * p.slots.most_rows + move.slot_row) * p.row_units;
  char* here = p.landing.window[p.rank];
  uint4* to = (uint4*)(here + p.landing.at_rows) + (size_t)move.to * p.row_units;
  for (int r = 0; r < (int)move.rows; ++r, from += p.row_units, to += p.row_units) copy_row(to, from, p.row_units, lane);
  __syncwarp();
  if (lane == 0) add_release_sys((unsigned*)(here + p.landing.at_arrived) + move.expert * p.world + move.source, move.rows);
}

// All warps of the blocks that send, when they have sent.
DEVICE void move_rows(const SendParams& p) {
  if (!p.slots.experts) return;
  const int lane = threadIdx.x & 31;
  const unsigned count = __ldg(p.counts + NUM_MOVES);
  for (;;) {
    unsigned i = 0;
    if (lane == 0) i = atomicAdd(p.counts + MOVE_HEAD, 1u);
    i = __shfl_sync(~0u, i, 0);
    if (i >= count) break;
    move_unit(p.moves[i], lane, p);
  }
  if (blockIdx.x) return;
  for (int slot = threadIdx.x; slot < p.slots.number; slot += p.threads) await_slot(slot, p);
}
