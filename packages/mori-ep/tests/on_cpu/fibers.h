// CUDA C++ on a CPU, for tests of what kernels compute and how ranks meet (not of memory order: a CPU's is stronger).
// A block is a thread of the host, and its threads are fibers of that: they change at barriers, warp operations and
// looks at flags, in a fixed order. Included in front of a kernel's source, whose inline assembly has been replaced
// (emulator.py).
#pragma once
#include <emmintrin.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct Index {
  unsigned x;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Block;
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread;
  bool done = false;
};
struct Meeting {  // of a warp or a block
  unsigned arrived = 0, generation = 0;
  uint64_t values[32] = {}, shown[32] = {};
};
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  Meeting all;
  unsigned live = 0, votes = 0, vote = 0;
  std::vector<unsigned> live_in_warp;
  ucontext_t host;
  Fiber* running = nullptr;
  void (*kernel)(const void*);
  const void* params;
};
inline thread_local Block* here;
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

inline void yield() {
  Fiber* self = here->running;
  swapcontext(&self->context, &here->host);
  threadIdx.x = self->thread;
}
inline void meet(Meeting& m, unsigned live) {
  const unsigned generation = m.generation;
  if (++m.arrived == live) {
    m.arrived = 0, m.generation++;
    memcpy(m.shown, m.values, sizeof m.shown);
  } else {
    while (m.generation == generation) yield();
  }
}
inline void __syncthreads() { meet(here->all, here->live); }
inline Meeting& warp_meets(uint64_t value) {
  const unsigned warp = threadIdx.x >> 5;
  Meeting& m = here->warps[warp];
  m.values[threadIdx.x & 31] = value;
  meet(m, here->live_in_warp[warp]);
  return m;
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  Meeting& m = warp_meets(vote);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; lane++) bits |= (unsigned)(m.shown[lane] & 1) << lane;
  return bits;
}
template <typename T>
T from_lane(T value, int lane) {
  uint64_t raw = 0;
  memcpy(&raw, &value, sizeof value);
  raw = warp_meets(raw).shown[lane & 31];
  memcpy(&value, &raw, sizeof value);
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) { return from_lane(value, lane); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) { return from_lane(value, (threadIdx.x & 31) ^ mask); }
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = threadIdx.x & 31;
  return from_lane(value, lane < by ? lane : lane - by);
}

inline void fiber_body() {
  Block* block = here;
  block->kernel(block->params);
  Fiber* self = block->running;
  self->done = true;
  block->live--, block->live_in_warp[self->thread >> 5]--;
  // Those who wait for this thread at a barrier need not any more.
  if (block->live && block->all.arrived == block->live) block->all.arrived = 0, block->all.generation++;
  swapcontext(&self->context, &block->host);
}
inline void run_block(void (*kernel)(const void*), const void* params, unsigned index, unsigned grid, unsigned size) {
  Block block;
  here = &block;
  block.kernel = kernel, block.params = params, block.live = size;
  block.fibers.resize(size), block.warps.resize((size + 31) / 32), block.live_in_warp.assign((size + 31) / 32, 0);
  blockIdx.x = index, gridDim.x = grid, blockDim.x = size;
  const size_t stack_bytes = 64 << 10;
  for (unsigned t = 0; t < size; t++) {
    Fiber& f = block.fibers[t];
    f.thread = t, f.stack.reset(new char[stack_bytes]), block.live_in_warp[t >> 5]++;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = stack_bytes, f.context.uc_link = &block.host;
    makecontext(&f.context, fiber_body, 0);
  }
  while (block.live) {
    for (Fiber& f : block.fibers)
      if (!f.done) {
        block.running = &f, threadIdx.x = f.thread;
        swapcontext(&block.host, &f.context);
      }
    sched_yield();  // whoever is waited for may be on another thread
  }
}
// All blocks of one launch; returns when they have ended.
inline void run_grid(void (*kernel)(const void*), const void* params, unsigned grid, unsigned size) {
  std::vector<std::thread> blocks;
  for (unsigned b = 0; b < grid; b++) blocks.emplace_back(run_block, kernel, params, b, grid, size);
  for (std::thread& b : blocks) b.join();
}

// ---- what the kernels call ----
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <typename T>
T __ldcg(const T* p) { return *(const volatile T*)p; }
inline void __nanosleep(unsigned) { yield(); }
inline unsigned atomicCAS(unsigned* p, unsigned wanted, unsigned v) {
  __atomic_compare_exchange_n(p, &wanted, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return wanted;
}
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline unsigned atomicInc(unsigned* p, unsigned most) {
  unsigned old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(p, &old, old >= most ? 0 : old + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return old;
}
template <typename A, typename B>
auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B>
auto max(A a, B b) { return a < b ? b : a; }
inline unsigned __float_as_uint(float f) {
  unsigned v;
  memcpy(&v, &f, 4);
  return v;
}
inline float __uint_as_float(unsigned v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline unsigned __float2uint_rn(float f) { return (unsigned)nearbyintf(f); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// ---- what the inline assembly did ----
inline unsigned look(const void* p) {  // a load that may be waiting for someone
  yield();
  return __atomic_load_n((const unsigned*)p, __ATOMIC_ACQUIRE);
}
inline uint64_t look_64(const void* p) {
  yield();
  return __atomic_load_n((const uint64_t*)p, __ATOMIC_ACQUIRE);
}
inline uint64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
inline void store_16(void* to, uint64_t low, uint64_t high) { _mm_store_si128((__m128i*)to, _mm_set_epi64x((long long)high, (long long)low)); }
inline void load_16(const void* from, uint64_t& low, uint64_t& high) {
  yield();
  const __m128i v = _mm_load_si128((const __m128i*)from);
  low = (uint64_t)_mm_cvtsi128_si64(v), high = (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(v, v));
}
inline unsigned bf16_bits(float f) {
  const unsigned v = __float_as_uint(f);
  if ((v & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline unsigned two_bf16(float low, float high) { return bf16_bits(high) << 16 | bf16_bits(low); }
inline unsigned half_bits(float f) {  // nearest, ties to even
  const unsigned v = __float_as_uint(f), sign = v >> 16 & 0x8000, m = v & 0x7fffffff;
  if (m > 0x7f800000) return 0x7fff;
  if (m >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (m < 0x38800000) return sign | (unsigned)nearbyintf(__uint_as_float(m) * 16777216.0f);  // below 2^-14: units of 2^-24
  return sign | ((m + 0xfff + (m >> 13 & 1)) >> 13) - (112 << 10);
}
inline unsigned two_halves(float low, float high) { return half_bits(high) << 16 | half_bits(low); }
inline float half_value(unsigned bits) {
  const unsigned sign = (bits & 0x8000) << 16, m = bits & 0x7fff;
  if (m >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (m & 0x3ff) << 13);
  if (m < 0x400) return (sign ? -1.0f : 1.0f) * (float)m / 16777216.0f;
  return __uint_as_float(sign | ((m << 13) + (112 << 23)));
}
