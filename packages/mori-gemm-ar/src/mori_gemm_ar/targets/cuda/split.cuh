// What the host hands to the kernels of split.cu. split_params.py holds the same struct.
#pragma once
#include "params.cuh"

struct SplitParams {
  unsigned nbytes;            // sizeof(SplitParams)
  int n, world, rank;
  int start[MAX_RANKS + 1];   // owner r has rows start[r] .. start[r + 1]
  int row_scale, groups;      // fp8: 1: a scale a row, 0: one for every 128 columns of it; how many that are
  const char* c[MAX_RANKS];   // every rank's partial sums, bf16 [rows, n]
  char* out[MAX_RANKS];       // every rank's output, bf16 [rows, n]
  char* codes[MAX_RANKS];     // fp8: every rank's codes [rows, n] ...
  char* scales[MAX_RANKS];    // ... and fp32 scales [rows, groups]
  unsigned* tell_c[MAX_RANKS];      // my word in rank r's part: "my partial sums are there", an epoch
  unsigned* tell_slice[MAX_RANKS];  // the same: "my slice is summed, and I have read yours of C"
  const unsigned* heard_c;          // [world] what the ranks have told me
  const unsigned* heard_slice;      // [world]
  unsigned* step;             // calls so far
  unsigned* exits;            // 0 between kernels
  Fault* fault;
  uint64_t timeout_ns;
};
