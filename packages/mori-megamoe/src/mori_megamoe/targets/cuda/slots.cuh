// Rows by copy engines: slots of a fixed size, whose copies are queued before anybody knows what is in them.
//
// A GPU's copy engines are driven by the host, which does not see the router's choice: what it enqueues has a size that does not
// depend on it. So my rows for one rank and `Slots::experts` of its experts share a slot: rows without gaps, expert after expert,
// each in the order of (token, slot of the router). A slot has room for `Slots::rows` rows in a call. Units that do not fit as
// a whole are stored where they land, as all are without slots (send.cuh): any routing is right, a skewed one is slower. The
// receiver knows from the counts, and from the sender's `rows` that come with them, which rows come in a slot (fitting_rows).
//
// Protocol of a call, for each slot from rank s to rank d. Words are 0 or 1, so that the same copies can be replayed in a graph:
//   1. s, prepare: packed[d][slot] = 0, or 1 where no unit is to come (also when the plan has failed). d, prepare: came[s][slot]
//      = 0, before it tells its counts.
//   2. s, on its queue to d, enqueued behind prepare and before what packs: wait until packed is 1; copy the slot; came = 1 at d.
//   3. s, packing: a warp stores a unit's rows in the slot and its headers at d, then takes 1 off left[d][slot]; who takes the
//      last sets packed = 1. All that the warps have stored is there by then, at d too (system fences).
//   4. d, moving (moves.cuh): a warp waits for came, copies rows from the slot to where they land, adds them to arrived.
//      From there on everything is as with stores: the GEMM, its waits, and its bytes.
// Why nothing is overwritten too early. s packs again after its stream has joined its queues; a copy into d starts after s has
//   heard d's next counts, which d tells behind the kernel that moves. Before that kernel ends it has seen all words `came`,
//   also of slots without rows, so none is set after it was cleared.
// Why nobody waits for ever. Blocks pack all they have before they move anything, and packing waits for nobody; so each slot is
//   released, its copy needs no SM, and movers wait for copies only, up to the deadline.
//
// What it costs. Wire: slots travel whole, `slot_slack` (1.25 unless said otherwise) times what an even router would send. Memory
// traffic: a row is written and read twice more than with stores, once on each side. Movers keep their SMs until the last slot
// has come. On the host: three operations a slot, which a captured graph makes once.
// Landing without moving, each source's rows of an expert in a part of their own of every tile, would leave holes in the tiles: at
// 25 % room a fifth of GEMM1 would be computed for nothing, which is more than the moving costs.
#pragma once
#include "params.cuh"

// Of another rank and a local expert; and which rank that is.
DEVICE int slot_of(int rank, int expert, const Slots& s) { return (rank - (rank > s.rank)) * s.per_rank + expert / s.experts; }
DEVICE int rank_of_slot(int slot, const Slots& s) { return slot / s.per_rank + (slot / s.per_rank >= s.rank); }
DEVICE int first_of_slot(int expert, const Slots& s) { return expert - expert % s.experts; }

// Rows of an expert that go by slot, of `rows`, with `before` of other experts in front: whole units.
DEVICE unsigned fitting_rows(unsigned before, unsigned rows, unsigned room) {
  if (before + rows <= room) return rows;
  return before < room ? (room - before) / UNIT_ROWS * UNIT_ROWS : 0;
}

// One thread, behind all that its warp has stored.
DEVICE void unit_is_packed(int slot, const Slots& s) {
  fence_sys();
  if (atomicAdd(s.left + slot, ~0u) != 1) return;
  fence_sys();  // what the other units' warps have stored
  set_word<SYSTEM>(s.packed + slot, 1);
}
