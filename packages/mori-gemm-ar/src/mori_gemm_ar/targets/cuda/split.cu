// The all-reduce after the GEMM, by loads: what the split modes do behind the product, and what small calls of a fused op may
// do instead of it. One kernel a phase, any number of blocks; a thread handles 8 columns at a time.
//
//   sum_slice, sum_slice_quantised    my slice of everybody's C, added in rank order in fp32, rounded once (then, fp8: quantised)
//   quantise                          the same quantisation of a slice that is summed already
//   sum_all                           every row of everybody's C: one stage, nothing to gather, (world - 1) times the bytes
//   pull, pull_codes                  peers' finished slices into my output (fp8: widened on the way)
//   widen                             codes that copy engines have brought into my part
//
// Protocol of call e on rank r (`step` counts calls on the device, so a captured graph stays right):
//   1. the first block of sum_* tells every peer c = e; every block waits until all peers have told it, then reads their C
//   2. the last block to leave sum_* tells every peer slice = e and sets step to e
//   3. pull waits for a peer's slice = e, then reads the peer's slice. (By copy engine instead: split.py.)
// Why nothing is overwritten too early: r's C of e + 1 is written behind r's pull of e (sum_all: behind its own last wait),
// which has heard slice = e from everybody, and a peer says that after its last load of r's C. r's slice of e + 1 is written
// once all peers have told c = e + 1, which they do behind their own pulls of e.
// A block whose wait runs out of time ends at once, so its kernel has no last block and tells nobody: peers run out of time, too.
#include "split.cuh"
#include "wgmma.cuh"

extern "C" __device__ const unsigned split_params_bytes = sizeof(SplitParams);

DEVICE uint4 load16(const char* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// ---- telling and hearing: all threads of a block
DEVICE bool hear(const unsigned* heard, int from, unsigned epoch, unsigned what, const SplitParams& p) {
  return from == p.rank || wait_flag(heard + from, epoch, p.fault, p.timeout_ns, p.rank, from, what, 0);
}
DEVICE bool partials_are_here(unsigned epoch, const SplitParams& p) {
  const int peer = threadIdx.x;
  bool came = true;
  if (peer < p.world) {
    if (blockIdx.x == 0 && peer != p.rank) fence_sys(), store_release_sys(p.tell_c[peer], epoch);
    came = hear(p.heard_c, peer, epoch, 3, p);
  }
  return __syncthreads_and(came);
}
DEVICE void tell_slice(unsigned epoch, bool wait, const SplitParams& p) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = last_of(p.exits, gridDim.x);
  __syncthreads();
  if (!last) return;
  if (threadIdx.x < p.world && threadIdx.x != p.rank) store_release_sys(p.tell_slice[threadIdx.x], epoch);
  if (threadIdx.x == 0) store_relaxed_sys(p.step, epoch);
  if (wait && threadIdx.x < p.world) hear(p.heard_slice, threadIdx.x, epoch, 4, p);
}

// ---- sums
struct Sources {
  const char* at[MAX_RANKS];
  int count;
};
DEVICE Sources partials(const SplitParams& p) {
  Sources from;
#pragma unroll
  for (int s = 0; s < MAX_RANKS; ++s) from.at[s] = p.c[s];
  from.count = p.world;
  return from;
}
// Eight columns of all sources, `offset` bytes into each: all loads are under way before the first is added.
DEVICE void add_up(float (&sum)[8], const Sources& from, int64_t offset) {
  uint4 v[MAX_RANKS];
#pragma unroll
  for (int s = 0; s < MAX_RANKS; ++s)
    if (s < from.count) v[s] = load16(from.at[s] + offset);
#pragma unroll
  for (int s = 0; s < MAX_RANKS; ++s) {
    if (s >= from.count) break;
    const uint32_t words[4] = {v[s].x, v[s].y, v[s].z, v[s].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = s ? sum[2 * i] + bf16_low(words[i]) : bf16_low(words[i]);
      sum[2 * i + 1] = s ? sum[2 * i + 1] + bf16_high(words[i]) : bf16_high(words[i]);
    }
  }
}
DEVICE uint4 rounded(const float (&f)[8]) {
  return make_uint4(to_bf16x2(f[0], f[1]), to_bf16x2(f[2], f[3]), to_bf16x2(f[4], f[5]), to_bf16x2(f[6], f[7]));
}
DEVICE void sum_rows(int first, int last, const SplitParams& p) {
  const Sources from = partials(p);
  const int64_t row_bytes = 2ll * p.n, end = last * row_bytes;
  for (int64_t at = first * row_bytes + 16ll * (blockIdx.x * blockDim.x + threadIdx.x); at < end; at += 16ll * gridDim.x * blockDim.x) {
    float sum[8];
    add_up(sum, from, at);
    *(uint4*)(p.out[p.rank] + at) = rounded(sum);
  }
}

// ---- fp8: a block takes a row at a time
DEVICE float largest_of_block(float mine) {  // all threads
  __shared__ float of_warp[32];
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) mine = max_nan(mine, __shfl_xor_sync(~0u, mine, lane));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = mine;
  __syncthreads();
  for (int w = 0; w < blockDim.x >> 5; ++w) mine = max_nan(mine, of_warp[w]);
  return mine;
}
// Writes codes, scales, and what the codes stand for, of rows that `from` adds up to.
DEVICE void quantise_rows(const Sources& from, const SplitParams& p) {
  char *out = p.out[p.rank], *codes = p.codes[p.rank];
  float* scales = (float*)p.scales[p.rank];
  const int steps = (p.n / 8 + blockDim.x - 1) / blockDim.x;
  for (int row = p.start[p.rank] + blockIdx.x; row < p.start[p.rank + 1]; row += gridDim.x) {
    float largest = 0.f;
    for (int pass = p.row_scale ? 0 : 1; pass < 2; ++pass) {  // one scale a row: the first pass finds it
      for (int step = 0; step < steps; ++step) {                // every thread goes through every step: lanes exchange
        const int x = 8 * (step * blockDim.x + threadIdx.x);
        const int64_t at = 2 * ((int64_t)row * p.n + x);
        float v[8] = {};
        if (x < p.n) add_up(v, from, at);
        const uint4 sum = rounded(v);
        const uint32_t words[4] = {sum.x, sum.y, sum.z, sum.w};
        float of_mine = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[2 * i] = bf16_low(words[i]), v[2 * i + 1] = bf16_high(words[i]);
          of_mine = max_nan(of_mine, max_nan(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
        }
        if (pass == 0) {
          largest = max_nan(largest, of_mine);
          continue;
        }
        if (!p.row_scale) {  // 16 lanes hold the 128 columns of a scale
#pragma unroll
          for (int lane = 8; lane; lane >>= 1) of_mine = max_nan(of_mine, __shfl_xor_sync(~0u, of_mine, lane));
          largest = of_mine;
        }
        if (x >= p.n) continue;
        // As the fused kernel does where a scale has 128 columns; as every other target where it has a row.
        const float scale = p.row_scale ? max_nan(largest / 448.f, 1.1754944e-38f) : largest / 448.f, inverse = inverse_of(scale);
        uint16_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &low = v[2 * i], &high = v[2 * i + 1];
          if (p.row_scale) pairs[i] = to_e4m3x2(low / scale, high / scale);
          else pairs[i] = to_e4m3x2(low * inverse, high * inverse);
          from_e4m3x2(pairs[i], low, high);
          low *= scale, high *= scale;
        }
        *(uint4*)(out + at) = rounded(v);
        *(uint2*)(codes + at / 2) = make_uint2(pairs[0] | (uint32_t)pairs[1] << 16, pairs[2] | (uint32_t)pairs[3] << 16);
        if (p.row_scale ? x == 0 : x % 128 == 0) scales[(int64_t)row * p.groups + (p.row_scale ? 0 : x / 128)] = scale;
      }
      if (pass == 0) largest = largest_of_block(largest);
    }
  }
}

// Rows [first, last) of `holder`'s codes into my output.
DEVICE void widen_rows(int first, int last, int holder, const SplitParams& p) {
  const int64_t end = (int64_t)last * p.n;
  for (int64_t at = (int64_t)first * p.n + 8ll * (blockIdx.x * blockDim.x + threadIdx.x); at < end; at += 8ll * gridDim.x * blockDim.x) {
    uint32_t low4, high4;
    float scale;
    const int row = (int)(at / p.n), x = (int)(at - (int64_t)row * p.n);
    const char* scales = p.scales[holder] + 4 * ((int64_t)row * p.groups + (p.row_scale ? 0 : x / 128));
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(low4), "=r"(high4) : "l"(p.codes[holder] + at) : "memory");
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(scales) : "memory");
    float v[8];
    from_e4m3x2((uint16_t)low4, v[0], v[1]), from_e4m3x2((uint16_t)(low4 >> 16), v[2], v[3]);
    from_e4m3x2((uint16_t)high4, v[4], v[5]), from_e4m3x2((uint16_t)(high4 >> 16), v[6], v[7]);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= scale;
    *(uint4*)(p.out[p.rank] + 2 * at) = rounded(v);
  }
}

// ---- kernels
#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)

KERNEL sum_slice(const __grid_constant__ SplitParams p) {
  const unsigned epoch = load_relaxed_gpu(p.step) + 1;
  if (!partials_are_here(epoch, p)) return;
  sum_rows(p.start[p.rank], p.start[p.rank + 1], p);
  tell_slice(epoch, false, p);
}
KERNEL sum_slice_quantised(const __grid_constant__ SplitParams p) {
  const unsigned epoch = load_relaxed_gpu(p.step) + 1;
  if (!partials_are_here(epoch, p)) return;
  quantise_rows(partials(p), p);
  tell_slice(epoch, false, p);
}
KERNEL sum_slice_quietly(const __grid_constant__ SplitParams p) {  // `quantise` follows, and tells
  if (partials_are_here(load_relaxed_gpu(p.step) + 1, p)) sum_rows(p.start[p.rank], p.start[p.rank + 1], p);
}
KERNEL quantise(const __grid_constant__ SplitParams p) {
  const unsigned epoch = load_relaxed_gpu(p.step) + 1;
  if (__syncthreads_or(threadIdx.x == 0 && load_relaxed_gpu(&p.fault->code))) return;  // the sum before this has failed
  Sources mine;
  mine.at[0] = p.out[p.rank], mine.count = 1;
  quantise_rows(mine, p);
  tell_slice(epoch, false, p);
}
KERNEL sum_all(const __grid_constant__ SplitParams p) {
  const unsigned epoch = load_relaxed_gpu(p.step) + 1;
  if (!partials_are_here(epoch, p)) return;
  sum_rows(0, p.start[p.world], p);
  tell_slice(epoch, true, p);
}
KERNEL pull(const __grid_constant__ SplitParams p) {
  const unsigned epoch = load_relaxed_gpu(p.step);
  for (int d = 1; d < p.world; ++d) {
    const int peer = (p.rank + d) % p.world;
    if (!__syncthreads_and(threadIdx.x || hear(p.heard_slice, peer, epoch, 4, p))) return;
    const int64_t end = 2ll * p.start[peer + 1] * p.n;
    for (int64_t at = 2ll * p.start[peer] * p.n + 16ll * (blockIdx.x * blockDim.x + threadIdx.x); at < end; at += 16ll * gridDim.x * blockDim.x)
      *(uint4*)(p.out[p.rank] + at) = load16(p.out[peer] + at);
  }
}
KERNEL pull_codes(const __grid_constant__ SplitParams p) {
  const unsigned epoch = load_relaxed_gpu(p.step);
  for (int d = 1; d < p.world; ++d) {
    const int peer = (p.rank + d) % p.world;
    if (!__syncthreads_and(threadIdx.x || hear(p.heard_slice, peer, epoch, 4, p))) return;
    widen_rows(p.start[peer], p.start[peer + 1], peer, p);
  }
}
KERNEL widen(const __grid_constant__ SplitParams p) {
  for (int d = 1; d < p.world; ++d) {
    const int peer = (p.rank + d) % p.world;
    widen_rows(p.start[peer], p.start[peer + 1], p.rank, p);
  }
}
