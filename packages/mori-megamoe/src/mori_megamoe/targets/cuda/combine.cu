// The end of a call: each token's weighted rows, added in the order of its slots.
//
// Protocol of call e (Tiles::counts[EPOCH]):
//   1. GEMM2 has stored weighted rows at their tokens' ranks; behind it on the stream, returned[me] = e at every rank (release).
//   2. When returned[s] of all s is e here (acquire), my tokens' rows have come, and are added up.
// Why nothing is overwritten too early. A rank stores weighted rows of e + 1 here after it has heard my counts of e + 1, which I
//   tell behind this kernel. A call that ends after Stage1 leaves `returned` as it was; the next one says e + 1.
// Only slots that name an expert are read: to the others nothing was ever written.
#include "numbers.cuh"
#include "params.cuh"

#define BF16 0
#define BLOCKWISE 1
#ifndef PARTIALS
#define PARTIALS BF16
#endif

extern "C" __device__ const unsigned combine_params_bytes = sizeof(CombineParams);

DEVICE bool all_have_returned(const CombineParams& p) {
  const unsigned epoch = p.counts[EPOCH];
  bool came = true;
  if (threadIdx.x < p.world) {
    if (blockIdx.x == 0) {
      fence_sys();
      store_release_sys((unsigned*)(p.landing.window[threadIdx.x] + p.landing.at_returned) + p.rank, epoch);
    }
    const unsigned* returned = (const unsigned*)(p.landing.window[p.rank] + p.landing.at_returned) + threadIdx.x;
    came = wait_flag(returned, epoch, p.fault, p.timeout_ns, p.rank, threadIdx.x, WAIT_PARTIALS, epoch);
  }
  return __syncthreads_and(came);
}

// Eight values of a weighted row.
DEVICE void read_eight(float (&value)[8], const char* row, int unit, const CombineParams& p) {
#if PARTIALS == BF16
  const uint4 v = ((const uint4*)row)[unit];
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) value[2 * i] = bf16_low(words[i]), value[2 * i + 1] = bf16_high(words[i]);
#else
  const uint2 v = ((const uint2*)row)[unit];
  const uint32_t e8 = ((const uint8_t*)row)[p.model_dim + (unit >> 2)];
  const float factor = e8 == 255 ? not_a_number() : power_of_two(e8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t halves = e4m3x2_to_halves((uint16_t)((i < 2 ? v.x : v.y) >> 16 * (i & 1)));
    value[2 * i] = half_low(halves) * factor, value[2 * i + 1] = half_high(halves) * factor;
  }
#endif
}

DEVICE uint4 sum_of_slots(const int* ids, const char* rows, int unit, const CombineParams& p) {
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
  for (int slot = 0; slot < p.top_k; ++slot) {
    if ((unsigned)ids[slot] >= (unsigned)p.num_experts) continue;
    float value[8];
    read_eight(value, rows + (size_t)slot * p.pitch, unit, p);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = slot ? sum[i] + value[i] : value[i];
  }
  return make_uint4(to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]), to_bf16x2(sum[4], sum[5]), to_bf16x2(sum[6], sum[7]));
}

extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineParams p) {
  if (!all_have_returned(p)) return;
  const char* partials = p.landing.window[p.rank] + p.landing.at_partials;
  for (int token = blockIdx.x; token < p.tokens; token += gridDim.x)
    for (int unit = threadIdx.x; unit < p.model_dim / 8; unit += blockDim.x)
      ((uint4*)p.out)[(size_t)token * (p.model_dim / 8) + unit] =
          sum_of_slots(p.ids + token * p.top_k, partials + (size_t)token * p.top_k * p.pitch, unit, p);
}
