// What is fixed when the GEMM is compiled, and what lies where in shared memory.
//
//   [0, STAGING)        STAGES stages: operand rows of a K block of 128 (R: 128 bytes a row; A: two halves of 64 columns), then
//                       the weights of this CTA's 256 rows as weights.py prepared them: codes, deltas
//   [STAGING, BARS)     for each consumer warpgroup: 64 output columns of a tile, then what the epilogue reduces
//   [BARS, ..)          mbarriers, then the words of the two rings of items (schedule.cuh)
#pragma once
#include "mma.cuh"
#include "params.cuh"

#define EXACT 0    // body A: bf16 products of exact operands
#define REBASED 1  // body R: fp8 products, summed in fp32 every 128 of K
#ifndef BODY
#define BODY REBASED
#endif
#ifndef TILE_ROWS
#define TILE_ROWS 128  // or 64 or 32, for few rows an expert: limits.py
#endif
#define NEVER 0    // everything is there
#define SIGNALS 1  // items in the order of experts, each when its sources' rows have come
#define QUEUE 2    // tiles in the order in which they become ready
#ifndef WAIT
#define WAIT NEVER
#endif
#ifndef SUMS
#define SUMS 0     // 1: the fp32 sums too, for tests
#endif

#define OPERAND_BYTES (TILE_ROWS * 128 * (BODY == EXACT ? 2 : 1))
#define CODE_BYTES 16384
#define WEIGHT_BYTES (CODE_BYTES + 1024)
#define STAGE_BYTES (OPERAND_BYTES + WEIGHT_BYTES)
#define STAGES (BODY == EXACT ? 4 : 6)
// R holds 128 sums, 64 products and 32 of fragments a thread; all three warpgroups have 504 together.
#define CONSUMER_REGISTERS (BODY == REBASED && TILE_ROWS == 128 ? 240 : 232)
#define LOADER_REGISTERS (504 - 2 * CONSUMER_REGISTERS)
#define RING 8     // items under way in a cluster: its CTAs are never more than STAGES K blocks apart

#define OUT_BYTES (TILE_ROWS * 64)
#define MAXIMA_BYTES (4 * TILE_ROWS * 4)   // of each warp
#define FACTOR_BYTES (2 * TILE_ROWS * 4)   // of each 32 columns
#define STAGING (STAGES * STAGE_BYTES)
#define OUT_AT(wg) (STAGING + (wg) * OUT_BYTES)
#define MAXIMA_AT(wg) (STAGING + 2 * OUT_BYTES + (wg) * MAXIMA_BYTES)
#define FACTORS_AT(wg) (STAGING + 2 * OUT_BYTES + 2 * MAXIMA_BYTES + (wg) * FACTOR_BYTES)
#define BARS (STAGING + 2 * (OUT_BYTES + MAXIMA_BYTES + FACTOR_BYTES))
#define FULL(stage) (shared + BARS + 8 * (stage))
#define EMPTY(stage) (shared + BARS + 8 * (STAGES + (stage)))
#define DRAWN(slot) (shared + BARS + 8 * (2 * STAGES + (slot)))         // a ticket has come to this CTA's loader
#define KNOWN(slot) (shared + BARS + 8 * (2 * STAGES + RING + (slot)))  // the loader has told this CTA's consumers an item
#define TICKET(slot) (shared + BARS + 8 * (2 * STAGES + 2 * RING) + 4 * (slot))
#define ITEM(slot) (shared + BARS + 8 * (2 * STAGES + 2 * RING) + 4 * RING + 4 * (slot))
#define SHARED_BYTES (BARS + 8 * (2 * STAGES + 2 * RING) + 8 * RING)

extern "C" __device__ const unsigned shared_bytes = SHARED_BYTES;  // read by the host from the loaded module
extern "C" __device__ const unsigned params_bytes = sizeof(Gemm1Params);

DEVICE int tile_of(unsigned item) { return item & 0xfffffu; }
DEVICE int pair_of(unsigned item) { return item >> 20; }

// A ring of stages as one of its users sees it.
struct Stage {
  int number = 0;
  uint32_t parity;
  DEVICE Stage(uint32_t first_parity) : parity(first_parity) {}
  DEVICE void next() {
    if (++number == STAGES) number = 0, parity ^= 1;
  }
};
