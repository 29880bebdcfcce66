// A rank's routed rows into their owners' landing memory, by 16-byte stores.
//
// Units (at most UNIT_ROWS rows of one expert of one rank) are listed in the order in which the receivers multiply: expert by
// expert, in an expert the ranks behind mine first. A warp takes a unit, stores headers and rows at the owner, then adds the
// unit's rows to arrived[expert][source] there. The add releases what the warp has stored: who has seen the sum, sees the
// rows. Units of a segment may end in any order, as a sum knows none.
// A unit that has a place in a slot has its rows stored there, in this rank's memory, for a copy engine to take (slots.cuh);
// its headers are stored at the owner all the same.
// Senders wait for nobody: the counts that the plan is made of also say that the receivers' landing memory is free (plan.cuh).
#pragma once
#include "slots.cuh"

#ifndef ROW_BATCH
#define ROW_BATCH 16  // loads of a lane that are under way before the first store
#endif

DEVICE void add_release_sys(unsigned* p, unsigned v) { asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

DEVICE uint4 load_row_unit(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void copy_row(uint4* to, const uint4* from, int units, int lane) {
  for (int u0 = lane; u0 < units; u0 += 32 * ROW_BATCH) {
    uint4 v[ROW_BATCH];
#pragma unroll
    for (int i = 0; i < ROW_BATCH; ++i)
      if (u0 + 32 * i < units) v[i] = load_row_unit(from + u0 + 32 * i);
#pragma unroll
    for (int i = 0; i < ROW_BATCH; ++i)
      if (u0 + 32 * i < units) to[u0 + 32 * i] = v[i];
  }
}

DEVICE void send_unit(const Unit& unit, int lane, const SendParams& p) {
  const int owner = unit.expert / p.experts;
  char* there = p.landing.window[owner];
  unsigned token = 0;
  if (lane < (int)unit.rows) {
    const unsigned route = p.order[unit.first + lane], row = unit.to + lane;
    token = route / p.top_k;
    const unsigned slot = route - token * p.top_k;
    ((unsigned*)(there + p.landing.at_source))[row] = (p.rank * p.max_tokens + token) | slot << 24;
    ((float*)(there + p.landing.at_weight))[row] = p.weights[route];
    if (p.has_scales) ((uint8_t*)(there + p.landing.at_row_scale))[row] = p.row_scale[token];
  }
  const unsigned expert = unit.expert - owner * p.experts;
  const bool packs = p.slots.experts && unit.slot_row != NO_SLOT;
  const int slot = packs ? slot_of(owner, expert, p.slots) : 0;
  uint4* to = packs ? (uint4*)p.slots.outgoing + ((size_t)slot * p.slots.most_rows + unit.slot_row) * p.row_units
                    : (uint4*)(there + p.landing.at_rows) + (size_t)unit.to * p.row_units;
  for (int r = 0; r < (int)unit.rows; ++r, to += p.row_units) {
    const unsigned from = __shfl_sync(~0u, token, r);
    copy_row(to, (const uint4*)p.rows + (size_t)from * p.row_units, p.row_units, lane);
  }
  __syncwarp();
  if (lane == 0) {
    if (packs) unit_is_packed(slot, p.slots);
    else add_release_sys((unsigned*)(there + p.landing.at_arrived) + expert * p.world + p.rank, unit.rows);
  }
}

// All warps of the blocks that send.
DEVICE void send_units(const SendParams& p) {
  const int lane = threadIdx.x & 31;
  const unsigned count = __ldg(p.counts + NUM_UNITS);
  for (;;) {
    unsigned u = 0;
    if (lane == 0) u = atomicAdd(p.counts + SEND_HEAD, 1u);
    u = __shfl_sync(~0u, u, 0);
    if (u >= count) return;
    send_unit(p.units[u], lane, p);
  }
}
