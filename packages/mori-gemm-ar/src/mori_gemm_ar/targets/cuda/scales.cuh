// Scales on their way from memory to the sums: plain loads a step of k ahead.
#pragma once
#include "order.cuh"

// Read anew, so that addresses made from it are not kept in registers through the main loop.
DEVICE int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The scales that a thread needs for one step of k: of its rows (2 a half) and of its columns. Loaded a step ahead.
struct Scales {
#if SCALES == BLOCKSCALE
  float a[2 * HALVES], b;
#elif SCALES == MXFP8
  uint32_t a[2 * HALVES], b[4];
#endif
};

// Where they lie. Registers are short: one 32-bit distance from a uniform pointer.
struct ScaleSource {
  const char* a;   // this step
  uint32_t first;  // distance of the thread's first row in bytes
  int room;        // rows after it
  const char* b;
};

DEVICE ScaleSource scales_of(const Tile& tile, int wg, const Params& p) {
  const int thread = fresh_thread();
  const int first = p.start[tile.owner] + tile.block * ROWS + wg * WG_ROWS + ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2);
  const int block = SCALES == MXFP8 ? tile.column * 4 : min(tile.column, (p.n - 1) / 128);
  return {(const char*)p.a_scale, 4u * first, p.start[p.world] - 1 - first, (const char*)p.b_scale + 4 * p.b_scale_pitch * block};
}

DEVICE void load_word(uint32_t& to, const void* from) { asm volatile("ld.global.nc.u32 %0, [%1];" : "+r"(to) : "l"(from)); }
DEVICE void load_word(float& to, const void* from) { asm volatile("ld.global.nc.f32 %0, [%1];" : "+f"(to) : "l"(from)); }
template <typename T>
DEVICE void load_scale_of_row(T& to, const ScaleSource& from, int i) {
  const int distance = (i >> 1) * 64 + (i & 1) * 8;
  if (distance <= from.room) load_word(to, from.a + from.first + 4 * distance);  // past the end: any scale will do
}

DEVICE void load_scales(Scales& to, ScaleSource& from, const Tile& tile, const Params& p) {
#if SCALES != PTPC
  // 0, which the compiler cannot know: it would keep the scales of b in uniform registers, and wait for their loads at once
  uint32_t zero;
  asm volatile("shr.u32 %0, %1, 31;" : "=r"(zero) : "r"(from.first));
#pragma unroll
  for (int i = 0; i < 2 * HALVES; ++i) load_scale_of_row(to.a[i], from, i);
#endif
#if SCALES == BLOCKSCALE
  load_word(to.b, from.b + zero);
#elif SCALES == MXFP8
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const int inside = min(tile.column * 4 + g, (p.n - 1) / 32) - tile.column * 4;
    load_word(to.b[g], from.b + 4 * inside * p.b_scale_pitch + zero);
  }
#endif
  from.a += 4 * p.a_scale_pitch, from.b += 4;
}

// blockscale: what the products of a row are multiplied by.
DEVICE Scales times_b(Scales scales) {
#if SCALES == BLOCKSCALE
#pragma unroll
  for (int i = 0; i < 2 * HALVES; ++i) scales.a[i] *= scales.b;
#endif
  return scales;
}

// ptpc: the scales factor out of the sum.
DEVICE void scale_rows_and_columns(float (&sum)[HALVES][64], const ScaleSource& from, const Tile& tile, const Params& p) {
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float a0 = 0.f, a1 = 0.f;
    load_scale_of_row(a0, from, 2 * h), load_scale_of_row(a1, from, 2 * h + 1);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int x = tile.column * 128 + 8 * j + 2 * (threadIdx.x & 3);
      const float2 b = x < p.n ? __ldg((const float2*)((const float*)p.b_scale + x)) : make_float2(0.f, 0.f);
      sum[h][4 * j] = sum[h][4 * j] * a0 * b.x, sum[h][4 * j + 1] = sum[h][4 * j + 1] * a0 * b.y;
      sum[h][4 * j + 2] = sum[h][4 * j + 2] * a1 * b.x, sum[h][4 * j + 3] = sum[h][4 * j + 3] * a1 * b.y;
    }
  }
}
