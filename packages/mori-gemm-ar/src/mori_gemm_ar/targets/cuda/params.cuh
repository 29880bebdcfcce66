// What the host hands to the GEMM kernel. params.py holds the same struct; the kernel checks its size (`nbytes`).
#pragma once
#include "signal.cuh"

#define MAX_RANKS 8
#define MAX_BANDS 128  // of one owner

// Division by a number that the host knows: x / d for 0 <= x < 2^31 (params.py makes them).
struct Divisor {
  unsigned multiplier, shift;
};
DEVICE int divide(int x, Divisor d) { return d.shift == 32 ? x : (int)(__umulhi((unsigned)x, d.multiplier) >> d.shift); }

struct Params {
  unsigned nbytes;            // sizeof(Params)
  int n, k;                   // columns of the output; bytes of a row of a and b
  int world, rank;
  int start[MAX_RANKS + 1];   // owner r has rows start[r] .. start[r + 1]
  int band, bands, lag;       // row blocks in a band; bands of the longest owner; local bands follow remote ones by `lag`
  Divisor by_band_tiles, by_band, by_others, by_world;  // cluster tiles in a band, band, world - 1, world
  int toggles;                // 0: flags carry the epoch; 1: flags go 0 -> 1, and who has used one clears it
  int num_outs;               // outputs that a finished local tile goes to (maps.out[0] is mine)
  int num_q_sinks;            // fp8 gather: places for the blocks of codes
  int num_listeners;          // who hears of my finished bands: gather_flag[0 .. num_listeners)
  int widens;                 // fp8 gather: 1: this kernel also widens what arrives
  const void* a_scale;        // blockscale: fp32 [k / 128, a_scale_pitch]; ptpc: fp32 [rows]; mxfp8: 4 bytes a word [k / 128, a_scale_pitch]
  const void* b_scale;        // blockscale: fp32 [n / 128, b_scale_pitch]; ptpc: fp32 [n]; mxfp8: 4 bytes a word [n / 32, b_scale_pitch]
  int64_t a_scale_pitch, b_scale_pitch;
  char* sink[MAX_RANKS];      // partial tiles for owner r: its inbox for me, or staging of mine that a copy engine sends
  const char* inbox[MAX_RANKS];   // partial tiles that came from source s
  char* q_sink[MAX_RANKS];
  const char* q_inbox[MAX_RANKS];
  uint16_t* out;              // my output, bf16 [rows, n]
  unsigned* scatter_flag[MAX_RANKS];  // [bands]: all my tiles of this band for owner r are in its inbox
  unsigned* gather_flag[MAX_RANKS];   // [bands]: my band is in a listener's output (or q inbox)
  unsigned* arrived[MAX_RANKS];       // [bands]: what source s has announced to me
  unsigned* gathered[MAX_RANKS];      // [bands]
  unsigned* count;            // [world][MAX_BANDS], 0 between calls
  unsigned* step;             // calls so far
  unsigned* exits;            // 0 between calls
  unsigned* tickets;          // tiles drawn, beyond one a cluster; 0 between calls
  Fault* fault;
  uint64_t timeout_ns;
};

struct alignas(64) Maps {
  TensorMap a, b;             // fp8 [rows, k], [n, k]; box 128 x 128
  TensorMap out[MAX_RANKS];   // bf16, my rows of a rank's output; box 64 x 64
};
