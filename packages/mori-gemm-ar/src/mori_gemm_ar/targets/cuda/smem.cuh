// What is fixed when the kernel is compiled: the kind of scales, the tile, and what lies where in shared memory.
//
//   [0, STAGING)        STAGES stages, each a's rows and b's rows of one 128-byte step along k
//   [STAGING, BARRIERS) staging: HALVES halves of a tile for each of the two consumer warpgroups
//   [BARRIERS, ..)      mbarriers, then the numbers of the tiles under way, then the widening warps' ticket
#pragma once
#include "params.cuh"

#define BLOCKSCALE 0
#define PTPC 1
#define MXFP8 2
#ifndef SCALES
#define SCALES BLOCKSCALE
#endif
#ifndef HALVES
#define HALVES 2  // 64-row halves of a consumer warpgroup: 2 is the 256x128 tile, 1 the 128x128 tile
#endif
#ifndef STAGES
#define STAGES (HALVES == 2 ? 3 : 5)
#endif
#ifndef FP8_GATHER
#define FP8_GATHER 0
#endif
#define NUMBERS 8         // tiles that may be under way in a CTA, see `number_of`
#ifndef PIECE_ROWS
#define PIECE_ROWS 16 // rows of 256 bytes that leave at a time
#endif
#ifndef PIECES_FLYING
#define PIECES_FLYING 1
#endif
#define PIECE_BYTES (PIECE_ROWS * 256)

#define ROWS (128 * HALVES)
#define WG_ROWS (64 * HALVES)
#define A_BYTES (ROWS * 128)
#define B_BYTES (128 * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define HALF_BYTES (64 * 128 * 2)                  // 64 rows x 128 columns of bf16, as two swizzled boxes of 64 columns
#define Q_BYTES (64 * 128 + 64 * 4)                // the same as fp8 codes, then a scale a row
#define STAGING (STAGES * STAGE_BYTES)
#define BARRIERS (STAGING + 2 * HALVES * HALF_BYTES)
#define FULL(stage) (bars + 8 * (stage))
#define EMPTY(stage) (bars + 8 * (STAGES + (stage)))
#define OFFERED(wg, half) (bars + 8 * (2 * STAGES + 2 * (wg) + (half)))        // staging is free, or holds an inbox tile
#define TAKEN(wg, half) (bars + 8 * (2 * STAGES + 4 + 2 * (wg) + (half)))      // the consumer has read it, or written the result
#define DRAWN(slot) (bars + 8 * (2 * STAGES + 8 + (slot)))                      // the number of a tile has come
#define NUMBER(slot) (bars + 8 * (2 * STAGES + 8 + NUMBERS) + 4 * (slot))
#define TICKET (bars + 8 * (2 * STAGES + 8 + NUMBERS) + 4 * NUMBERS)
#define SHARED_BYTES (BARRIERS + 8 * (2 * STAGES + 9 + NUMBERS) + 4 * NUMBERS)

extern "C" __device__ const unsigned shared_bytes = SHARED_BYTES;   // read by the host from the loaded module
extern "C" __device__ const unsigned params_bytes = sizeof(Params);
extern "C" __device__ const unsigned piece_rows = PIECE_ROWS;
