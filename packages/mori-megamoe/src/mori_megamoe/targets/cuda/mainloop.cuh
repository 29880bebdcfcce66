// All K blocks of an item in one consumer warpgroup: two fragments of 64 weight rows times the tile's rows.
//
// A fragment's codes lie in a stage as each thread wants them: 16 bytes a thread for 64 of K, twice; a row's four deltas are a
// word. Fragments are decoded while the tensor cores work on the one before. Each warp releases a stage for itself (16
// arrivals, from both CTAs of the cluster), since all its lanes read it with ordinary loads.
//
// No gain for body R (H200, v4_pro, 8192 tokens, December 2026; us of single launches / in a loop, this 4153 / 4765): warpgroups
// that take turns at the tensor cores 4182 / 4854, halves of the rows in turn, one promoted while the other is multiplied
// 4156 / 4788. All gave the same bytes.
#pragma once
#include "decode.cuh"
#include "schedule.cuh"

struct Thread {              // of a consumer warpgroup
  int wg, warp, lane;        // lane = 4 g + c
  uint32_t codes, deltas;    // where in a stage its codes and deltas lie
  DEVICE Thread(int wg, int thread) : wg(wg), warp(thread >> 5), lane(thread & 31) {
    codes = OPERAND_BYTES + wg * 8192 + thread * 16;
    deltas = OPERAND_BYTES + CODE_BYTES + (wg * 64 + warp * 8 + (lane >> 2)) * 8;
  }
};

DEVICE void release(int stage, int lane, uint32_t shared) {
  __syncwarp();
  if (lane < 2) barrier_arrive_cluster(EMPTY(stage), lane);
}

#if BODY == REBASED
// Four K steps of 32. `product` is summed by the tensor cores over 128 of K only: they keep fewer bits than fp32.
DEVICE void decode_fragment(uint32_t (&a)[2][8], uint32_t stage, const Thread& t, int fragment, uint32_t sixteen) {
  uint32_t codes[4], deltas[2];
  load_words(deltas, stage + t.deltas + fragment * 256);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    load_words(codes, stage + t.codes + fragment * 4096 + half * 2048);
    decode_step_fp8(a[half], 0, codes[0], codes[1], deltas, 2 * half, sixteen);
    decode_step_fp8(a[half], 1, codes[2], codes[3], deltas, 2 * half + 1, sixteen);
  }
}
DEVICE void multiply_fragment(float (&product)[TILE_ROWS / 2], const uint32_t (&a)[2][8], uint64_t rows) {
  WGMMA_FENCE();
  mma_fp8(product, a[0], rows, 0);
  mma_fp8(product, a[0] + 4, rows + 2, 1);
  mma_fp8(product, a[1], rows + 4, 1);
  mma_fp8(product, a[1] + 4, rows + 6, 1);
  WGMMA_COMMIT();
}
DEVICE void promote(float (&sum)[TILE_ROWS / 2], const float (&product)[TILE_ROWS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; ++i) sum[i] += product[i];
}
DEVICE void multiply_item(float (&sum)[2][TILE_ROWS / 2], Stage& stage, const Thread& t, uint32_t shared, const Gemm1Params& p) {
  const uint32_t sixteen = p.sixteen;
  uint32_t even[2][8], odd[2][8];
  float product[TILE_ROWS / 2];
  barrier_wait(FULL(stage.number), stage.parity);
  decode_fragment(even, shared + stage.number * STAGE_BYTES, t, 0, sixteen);
  for (int step = 0; step < p.num_steps; ++step) {
    const uint64_t rows = operand(shared + stage.number * STAGE_BYTES);
    multiply_fragment(product, even, rows);
    decode_fragment(odd, shared + stage.number * STAGE_BYTES, t, 1, sixteen);
    WGMMA_WAIT(0);
    promote(sum[0], product);
    multiply_fragment(product, odd, rows);
    const int used = stage.number;
    stage.next();
    if (step + 1 < p.num_steps) {
      barrier_wait(FULL(stage.number), stage.parity);
      decode_fragment(even, shared + stage.number * STAGE_BYTES, t, 0, sixteen);
    }
    WGMMA_WAIT(0);
    release(used, t.lane, shared);
    promote(sum[1], product);
  }
}
#else
// Half a K block, two K steps of 32, is four steps of 16. The tensor cores sum all of K.
DEVICE void decode_half(uint32_t (&a)[16], const uint32_t (&codes)[4], const uint32_t (&deltas)[2], int half) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int shift = 8 * (2 * half + s);
    uint32_t* to = a + 8 * s;
    decode_bf16(codes[2 * s], (deltas[0] >> shift) & 255, to[0], to[2], to[4], to[6]);
    decode_bf16(codes[2 * s + 1], (deltas[1] >> shift) & 255, to[1], to[3], to[5], to[7]);
  }
}
DEVICE void multiply_half(float (&sum)[TILE_ROWS / 2], const uint32_t (&a)[16], uint64_t rows) {
  WGMMA_FENCE();
#pragma unroll
  for (int i = 0; i < 4; ++i) mma_bf16(sum, a + 4 * i, rows + 2 * i, 1);
  WGMMA_COMMIT();
}
DEVICE void multiply_item(float (&sum)[2][TILE_ROWS / 2], Stage& stage, const Thread& t, uint32_t shared, const Gemm1Params& p) {
  uint32_t first[16], second[16], codes[4], deltas[2];
  const auto load_first = [&] {
    barrier_wait(FULL(stage.number), stage.parity);
    const uint32_t at = shared + stage.number * STAGE_BYTES;
    load_words(deltas, at + t.deltas);
    load_words(codes, at + t.codes);
    decode_half(first, codes, deltas, 0);
  };
  load_first();
  for (int step = 0; step < p.num_steps; ++step) {
    const uint32_t at = shared + stage.number * STAGE_BYTES;
    const uint64_t rows = operand(at), rows_64 = rows + ((TILE_ROWS * 128) >> 4);
    multiply_half(sum[0], first, rows);
    load_words(codes, at + t.codes + 2048);
    decode_half(second, codes, deltas, 1);
    multiply_half(sum[0], second, rows_64);
    load_words(deltas, at + t.deltas + 256);
    load_words(codes, at + t.codes + 4096);
    WGMMA_WAIT(1);
    decode_half(first, codes, deltas, 0);
    multiply_half(sum[1], first, rows);
    load_words(codes, at + t.codes + 4096 + 2048);
    WGMMA_WAIT(1);
    decode_half(second, codes, deltas, 1);
    multiply_half(sum[1], second, rows_64);
    const int used = stage.number;
    stage.next();
    WGMMA_WAIT(1);
    if (step + 1 < p.num_steps) load_first();
    WGMMA_WAIT(0);
    release(used, t.lane, shared);
  }
}
#endif
