// A finished tile: rounded, summed with what the peers sent, quantised where the gather is fp8, left in staging.
#pragma once
#include "courier.cuh"
#include "scales.cuh"
#include "wgmma.cuh"

// Thread's address in a staged half for the 16 columns `group` (0..7): what ldmatrix.x4 and stmatrix.x4 take.
DEVICE uint32_t matrix_address(uint32_t half, int group, int thread) {
  const int lane = thread & 31, q = lane >> 3;
  const int row = ((thread >> 5) & 3) * 16 + (q & 1) * 8 + (lane & 7);
  return half + (group >> 2) * (HALF_BYTES / 2) + row * 128 + (((2 * (group & 3) + (q >> 1)) ^ (lane & 7)) << 4);
}

// values (+)= the staged half
template <bool ADD>
DEVICE void read_half(float (&values)[64], uint32_t half) {
  const int thread = fresh_thread();
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    uint32_t v[4];
    load_matrix_x4(matrix_address(half, group, thread), v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* to = values + group * 8 + 2 * i;
      to[0] = (ADD ? to[0] : 0.f) + bf16_low(v[i]), to[1] = (ADD ? to[1] : 0.f) + bf16_high(v[i]);
    }
  }
}
DEVICE void write_half(const float (&values)[64], uint32_t half) {
  const int thread = fresh_thread();
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    const float* f = values + group * 8;
    store_matrix_x4(matrix_address(half, group, thread), to_bf16x2(f[0], f[1]), to_bf16x2(f[2], f[3]), to_bf16x2(f[4], f[5]), to_bf16x2(f[6], f[7]));
  }
}

// A half through e4m3: `values` become what their codes stand for, so that all ranks hold the same output. A row and 128
// columns share a scale, largest / 448, NaN where they hold a NaN; scale[i] is that of the thread's row i. The codes themselves
// are not kept, registers are short: value * (1 / scale) rounds to the same code again.
DEVICE void quantise_half(float (&scale)[2], float (&values)[64]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float &low = values[4 * j + 2 * i], &high = values[4 * j + 2 * i + 1];
      const uint32_t pair = to_bf16x2(low, high);  // the sum is a bf16 number before it is quantised
      low = bf16_low(pair), high = bf16_high(pair);
      largest = max_nan(largest, max_nan(fabsf(low), fabsf(high)));
    }
    largest = max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    scale[i] = largest / 448.f;
    const float inverse = inverse_of(scale[i]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float &low = values[4 * j + 2 * i], &high = values[4 * j + 2 * i + 1];
      from_e4m3x2(to_e4m3x2(low * inverse, high * inverse), low, high);
      low *= scale[i], high *= scale[i];
    }
  }
}
// Rows of 128 bytes, the 16-byte pieces of row r at piece ^ (r & 7); after them a scale a row.
DEVICE void write_codes(const float (&scale)[2], const float (&values)[64], uint32_t half) {
  const int thread = fresh_thread(), lane = thread & 31;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = ((thread >> 5) & 3) * 16 + (lane >> 2) + 8 * i;
    const float inverse = inverse_of(scale[i]);
    if ((lane & 3) == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(half + 64 * 128 + 4 * r), "f"(scale[i]) : "memory");
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint16_t codes = to_e4m3x2(values[4 * j + 2 * i] * inverse, values[4 * j + 2 * i + 1] * inverse);
      const uint32_t address = half + r * 128 + (((j >> 1) ^ (r & 7)) << 4) + (j & 1) * 8 + (lane & 3) * 2;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(codes) : "memory");
    }
  }
}

DEVICE void give_back(int wg, int& buffer, uint32_t& parity, uint32_t bars) {  // all threads of the warpgroup
  fence_async_shared();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(TAKEN(wg, buffer));
  if (++buffer == HALVES) buffer = 0, parity ^= 1;
}

// All threads of the warpgroup: the staged half to my rows of the output, 256 bytes of a row side by side.
DEVICE void copy_half_out(uint32_t half, const Tile& tile, int wg, int h, const Params& p) {
  const int thread = fresh_thread() & 127, piece = thread & 15, x = tile.column * 128 + piece * 8;
  const int first = tile.block * ROWS + wg * WG_ROWS + h * 64, height = p.start[p.rank + 1] - p.start[p.rank];
  asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = i * 8 + (thread >> 4);
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(half + (piece >> 3) * (HALF_BYTES / 2) + r * 128 + (((piece & 7) ^ (r & 7)) << 4))
                 : "memory");
    if (first + r < height && x < p.n) *(uint4*)(p.out + (int64_t)(p.start[p.rank] + first + r) * p.n + x) = v;
  }
  asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
}

DEVICE void finish_tile(float (&sum)[HALVES][64], const Tile& tile, int wg, uint32_t shared, uint32_t bars, uint32_t& parity, const Params& p) {
  const Items items = items_of(tile, p);
  const uint32_t staging = shared + STAGING + wg * HALVES * HALF_BYTES;
  int buffer = 0;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    uint32_t own[32];  // my partial, rounded. Always set: set under a condition, it would hold registers through the main loop
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      own[i] = to_bf16x2(sum[h][2 * i], sum[h][2 * i + 1]);
      sum[h][2 * i] = bf16_low(own[i]), sum[h][2 * i + 1] = bf16_high(own[i]);
    }
    for (int round = 0; round < items.rounds; ++round) {
      const uint32_t half = staging + buffer * HALF_BYTES;
      barrier_wait(OFFERED(wg, buffer), parity);
      if (items.reduces) {
        if (round == 0 && p.rank > 1) read_half<false>(sum[h], half);  // ranks 0 and 1: two addends have no order
        else read_half<true>(sum[h], half);
        if (round == p.rank - 1 && p.rank > 1) {
#pragma unroll
          for (int i = 0; i < 32; ++i) sum[h][2 * i] += bf16_low(own[i]), sum[h][2 * i + 1] += bf16_high(own[i]);
        }
      }
      if (round == items.rounds - 1) {
#if FP8_GATHER
        if (items.reduces) {
          float scale[2];
          quantise_half(scale, sum[h]);
          write_half(sum[h], half);
          copy_half_out(half, tile, wg, h, p);
          write_codes(scale, sum[h], half);
        } else {
          write_half(sum[h], half);
        }
#else
        write_half(sum[h], half);
#endif
      }
      give_back(wg, buffer, parity, bars);
    }
  }
}
