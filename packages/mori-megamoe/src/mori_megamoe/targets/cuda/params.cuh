// Arguments of the kernels, by value. params.py has the same fields in the same order; sizes are compared on loading.
// A rank has `experts` local experts. Tiles are runs of TILE_ROWS rows of one expert; an item is a tile times a pair of
// 256-row blocks of the expert's weights, which is what a cluster of two CTAs computes at a time.
#pragma once
#include "words.cuh"

#define MAX_RANKS 8
#define MAX_EXPERTS 1024  // of all ranks

// What a wait was for; faults.py has the words
#define WAIT_COUNTS 0xD0001u  // a peer's counts of this call
#define WAIT_ROWS 0xD0002u    // rows of a source for an expert
#define WAIT_TILE 0xD0003u    // any tile to become ready
#define TOO_MANY_ROWS 0xD0004u
#define WAIT_PARTIALS 0xD0005u  // weighted rows of a rank's experts for my tokens
#define WAIT_SLOT 0xD0006u      // a slot that a source's copy engine carries

// Words of Tiles::counts
#define NUM_ITEMS 0
#define NUM_TILES 1
#define NUM_ROWS 2   // with padding
#define NUM_UNITS 3  // units that this rank sends
#define SEND_HEAD 4  // units taken; 0 when Stage1 starts
#define TICKETS 5    // items drawn; 0 when Stage1 starts
#define EPOCH 6      // calls so far, this one included
#define NUM_MOVES 7  // runs of rows that come here in slots
#define MOVE_HEAD 8  // moves taken; 0 when Stage1 starts

// The first fault of a rank wins.
DEVICE void write_fault(Fault* f, int rank, int peer, unsigned what, int index, unsigned seen, unsigned wanted) {
  if (atomicCAS(&f->code, 0u, 0x80000000u) != 0u) return;
  f->rank = rank, f->peer = peer, f->what = what, f->index = index, f->seen = seen, f->wanted = wanted, f->block = blockIdx.x;
  store_release_sys(&f->code, 1);
}

struct Tiles {             // the plan of a call on its receiving side, written by plan.cu (or by the host)
  unsigned* counts;        // [16]
  unsigned* items;         // [NUM_ITEMS] tile | pair << 20: experts ascending, in an expert the tile fastest
  int *expert;             // [NUM_TILES] local
  int *row_base;           // first row of the tile in headers and outputs
  int *input_base;         // first row of the tile in the operand rows
  unsigned* sources;       // bit s: rows of source s are in the tile
};

struct Arrivals {          // how a GEMM that runs while rows arrive knows what is there
  const unsigned* arrived; // [experts][world] rows of source s for expert e that have come, since the beginning
  const unsigned* due;     // [experts][world] what that will be when this call's have come
  uint64_t* ready;         // [tiles] epoch << 32 | tile, in the order of readiness
  uint64_t timeout_ns;
  Fault* fault;
  int world, rank, experts;
};

struct Gemm1Params {
  unsigned nbytes;
  int num_steps;           // K / 128
  int width;               // weight rows of an expert: 2 I
  unsigned pairs, pairs_inverse;  // width / 512; 2^32 / pairs, rounded up (0 for one pair)
  unsigned sixteen;        // 16, which the compiler does not know: see decode.cuh
  float limit;             // of SwiGLU; <= 0: none
  const uint8_t* weights;  // [experts][width / 256][num_steps][WEIGHT_BYTES], see weights.py
  const float* base;       // [experts][width] a power of two a row
  const uint8_t* row_scale;  // body R: e8m0 of each operand row
  Tiles tiles;
  uint8_t *scales, *shuffled_scales;  // e8m0 of the output: [row][I / 32], and as Stage2 reads them; either may be null
  float* sums;             // -DSUMS=1: fp32 [row][width], gate first
  Arrivals arrivals;
};

struct alignas(64) Gemm1Maps {
  TensorMap rows;          // operand rows: R fp8 [rows, K], box 128 x TILE_ROWS / 2; A bf16, box 64 x TILE_ROWS / 2; 128-byte swizzle
  TensorMap out;           // e4m3 [rows, I], box 64 x TILE_ROWS, not swizzled
};

// Offsets (`at_`) are bytes in the window and equal on all ranks (layout.py); pointers are this rank's own memory.
struct Landing {           // where routed rows land, on every rank: [rows] of each, tiles of experts one after the other
  char* window[MAX_RANKS]; // each rank's part as mapped here
  uint64_t at_rows, at_row_scale;   // operand rows; body R: e8m0
  uint64_t at_source, at_weight;    // u32 source rank * max_tokens + token | slot << 24 (padding: world * max_tokens); fp32
  uint64_t at_arrived;     // u32 [experts][world], see Arrivals
  uint64_t at_counts;      // u32 [2][world][world * experts + 1]: rows of source s for each expert of all, then Slots::rows, by parity of the epoch
  uint64_t at_told;        // u32 [world]: epoch of source s whose counts are here
  uint64_t at_returned;    // u32 [world]: epoch whose weighted rows of rank s's experts are here
  uint64_t at_partials;    // [max_tokens * top_k] weighted rows for token * top_k + slot, `pitch` bytes apart
};

#define UNIT_ROWS 16
struct Unit {              // rows that a warp sends in one go: of one expert of one rank
  unsigned first;          // in SendParams::order
  unsigned rows;
  unsigned expert;         // global
  unsigned to;             // first row at its rank
  unsigned slot_row;       // first row in the slot that takes them there, or NO_SLOT
};
#define NO_SLOT 0xffffffffu

struct Move {              // rows that a warp moves out of a slot to where they land
  unsigned source, expert; // local
  unsigned slot_row, rows;
  unsigned to;             // first row in my landing
};

struct Slots {             // what copy engines carry: slots.cuh. Without them all 0, and rows are stored where they land
  int experts;             // of a rank that share a slot
  int per_rank, number;    // slots from one rank to another; to all of them
  int rank;                // mine: the other ranks' slots are next to each other
  unsigned most_rows;      // that a slot has memory for
  unsigned rows;           // that each copy of this rank carries in this call
  char *outgoing, *incoming;  // [number][most_rows] operand rows: by destination; by source
  unsigned* left;          // [number] units of an outgoing slot that are not packed yet
  uint64_t *packed, *came; // [number] 1: may be copied, by destination; has come, by source
};

struct SendParams {
  unsigned nbytes;
  int blocks, threads;     // of the grid that send, and of each of them
  int world, rank, experts, max_tokens, top_k;
  int row_units;           // 16 bytes each
  int has_scales;          // body R: a scale a row
  const char* rows;        // operand rows of my tokens
  const uint8_t* row_scale;
  const float* weights;    // [tokens][top_k]
  const unsigned* order;   // routes token * top_k + slot by (expert, token, slot)
  const Unit* units;       // [NUM_UNITS], in the order in which they go
  unsigned* counts;        // Tiles::counts
  Landing landing;
  Slots slots;
  const Move* moves;       // [NUM_MOVES], in the order in which they come
  const unsigned* due;     // Arrivals::due, for a dispatch that waits
  Fault* fault;
  uint64_t timeout_ns;
};

struct PlanParams {
  unsigned nbytes;
  int world, rank, experts, max_tokens, top_k;
  int tokens;              // of this call
  int tile_rows, pairs;    // pairs: width / 512
  int capacity;            // rows that a rank's landing has
  const int* ids;          // [tokens][top_k] global expert ids; others name no route
  Tiles tiles;
  unsigned* due;           // [experts][world]
  unsigned* order;         // [tokens * top_k]
  Unit* units;
  Landing landing;
  Slots slots;
  Move* moves;
  Fault* fault;
  uint64_t timeout_ns;
};

struct HiddenParams {      // what comes before GEMM2
  unsigned nbytes;
  int pairs;               // of GEMM2: 512 columns each
  Tiles tiles;             // GEMM1's
  unsigned *counts, *items;  // GEMM2's
};

struct BackParams {        // where GEMM2's rows go
  unsigned nbytes;
  int world, rank, max_tokens, top_k, model_dim;
  unsigned pitch;          // bytes from one weighted row to the next
  Landing landing;
};

struct CombineParams {
  unsigned nbytes;
  int world, rank, num_experts, top_k, model_dim;
  int tokens;              // of this call
  unsigned pitch;
  const int* ids;          // [tokens][top_k]
  char* out;               // bf16 [tokens][model_dim]
  const unsigned* counts;  // Tiles::counts
  Landing landing;
  Fault* fault;
  uint64_t timeout_ns;
};

struct RowsParams {        // operand rows out of what a caller has
  unsigned nbytes;
  int tokens, hidden;
  const char* input;       // bf16 [tokens][hidden], or e4m3
  const uint8_t* scales;   // of e4m3 input: e8m0 [tokens][hidden / 32]
  char* rows;              // R: e4m3 [tokens][hidden]; A: bf16
  uint8_t* row_scale;      // R: e8m0 [tokens]
};
