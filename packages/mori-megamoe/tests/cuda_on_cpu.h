// What mori-ep's fibers.h lacks for this package's kernels: clusters of two blocks, their shared memory by 32-bit address,
// mbarriers, the bulk copy engine, matrix instructions. Included in front of a kernel's source, in place of async.cuh and
// mma.cuh. A bulk copy happens where it is issued; a matrix instruction computes where it is issued: what is checked is
// what is computed and who waits for whom, not what may still be under way.
#pragma once
#include "fibers.h"

#include <atomic>
#include <mutex>

#define DEVICE inline
#define __cluster_dims__(...)
#define __align__(n)
struct float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(64) TensorMap {  // filled by cuda_emulator.py
  uint64_t address, columns, rows, pitch_bytes, item_bytes, box_columns, box_rows, swizzled, unused[8];
};

// ---- clusters and shared memory
const uint32_t SHARED_START = 1024, SHARED_END = 256 << 10;
struct Cta {
  std::unique_ptr<uint8_t[]> memory{new uint8_t[SHARED_END + 1024]};
  uint8_t* at(uint32_t address) {
    uint8_t* aligned = (uint8_t*)(((uintptr_t)memory.get() + 1023) & ~(uintptr_t)1023);
    return aligned + address;
  }
};
inline std::vector<Cta> ctas;  // of the grid
inline std::vector<std::atomic<unsigned>> met;  // threads that have come to cluster_sync, by cluster
inline std::mutex barriers_mutex;
inline void new_grid(unsigned blocks) {
  ctas = std::vector<Cta>(blocks);
  for (Cta& cta : ctas) memset(cta.memory.get(), 0xCD, SHARED_END);
  met = std::vector<std::atomic<unsigned>>(blocks / 2 + 1);
}
inline uint8_t* shared_at(uint32_t address) { return ctas[blockIdx.x].at(address); }
inline uint8_t* shared_at(uint32_t address, uint32_t cta) { return ctas[(blockIdx.x & ~1u) + cta].at(address); }
inline uint8_t* shared_base() { return shared_at(SHARED_START); }
inline uint32_t shared_address(const void* p) { return (uint32_t)((const uint8_t*)p - shared_at(0)); }
inline int cluster_rank() { return blockIdx.x & 1; }
inline void cluster_sync() {
  std::atomic<unsigned>& here_now = met[blockIdx.x >> 1];
  const unsigned all = 2 * blockDim.x, mine = here_now++;
  while (here_now < (mine / all + 1) * all) yield();
}

// ---- warps and blocks
inline void __syncwarp(unsigned = ~0u) { warp_meets(0); }
inline bool __any_sync(unsigned, bool vote) { return __ballot_sync(~0u, vote) != 0; }
inline unsigned __match_any_sync(unsigned, unsigned value) {
  Meeting& m = warp_meets(value);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; lane++) same |= (unsigned)((unsigned)m.shown[lane] == value) << lane;
  return same;
}
inline bool __syncthreads_and(bool vote) {
  static thread_local unsigned against[2], turn[1024];
  const unsigned t = turn[threadIdx.x]++ & 1;  // two counts in turn, so that a fast thread's next vote is another count
  if (!vote) against[t]++;
  __syncthreads();
  const bool all = against[t] == 0;
  __syncthreads();
  if (threadIdx.x == 0) against[t] = 0;
  return all;
}
inline void warpgroup_sync(int wg) {
  static thread_local Meeting meetings[2];
  meet(meetings[wg], 128);
}
template <typename T>
T __ldg(const T* p) { return *p; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = (uint64_t)y << 32 | x;
  unsigned v = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selector >> 4 * i & 15, byte = bytes >> 8 * (s & 7) & 255;
    v |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return v;
}
inline uint64_t look_long(const void* p) {
  yield();
  return __atomic_load_n((const uint64_t*)p, __ATOMIC_ACQUIRE);
}

// ---- mbarriers
struct Barrier {  // 8 bytes
  uint8_t count, pending, phase, unused;
  int32_t bytes;
};
inline Barrier* barrier_at(uint32_t bar, uint32_t cta) { return (Barrier*)shared_at(bar, cta); }
inline void settle(Barrier* b) {
  if (b->pending == 0 && b->bytes == 0) b->pending = b->count, __atomic_fetch_xor(&b->phase, 1, __ATOMIC_RELEASE);
}
inline void barrier_init(uint32_t bar, uint32_t count) { *barrier_at(bar, cluster_rank()) = {(uint8_t)count, (uint8_t)count, 0, 0, 0}; }
inline void arrive_at(uint32_t bar, uint32_t cta, int nbytes) {
  const std::lock_guard<std::mutex> lock(barriers_mutex);
  Barrier* b = barrier_at(bar, cta);
  if (b->pending == 0) fprintf(stderr, "barrier %u: one arrival too many\n", bar), abort();
  b->bytes += nbytes, b->pending--, settle(b);
}
inline void bytes_come(uint32_t bar, uint32_t cta, int nbytes) {
  const std::lock_guard<std::mutex> lock(barriers_mutex);
  Barrier* b = barrier_at(bar, cta);
  b->bytes -= nbytes, settle(b);
}
inline void barrier_arrive(uint32_t bar) { arrive_at(bar, cluster_rank(), 0); }
inline void barrier_arrive_expect(uint32_t bar, uint32_t nbytes) { arrive_at(bar, cluster_rank(), nbytes); }
inline void barrier_arrive_cluster(uint32_t bar, uint32_t cta) { arrive_at(bar, cta, 0); }
inline void barrier_wait(uint32_t bar, uint32_t parity) {
  while (__atomic_load_n(&barrier_at(bar, cluster_rank())->phase, __ATOMIC_ACQUIRE) == parity) yield();
}
inline void store_async_cluster(uint32_t address, uint32_t value, uint32_t bar, uint32_t cta) {
  *(uint32_t*)shared_at(address, cta) = value;
  bytes_come(bar, cta, 4);
}
inline void barrier_init_fence() {}
inline void fence_async() {}
inline void fence_async_shared() {}
inline void stores_commit() {}
inline void stores_wait() {}
inline void stores_wait_read() {}

// ---- bulk copies
inline uint32_t swizzle(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline void load_box(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y, uint32_t cta) {
  const uint64_t row_bytes = map->box_columns * map->item_bytes;
  for (uint64_t r = 0; r < map->box_rows; r++)
    for (uint64_t b = 0; b < row_bytes; b += 16) {
      const uint32_t address = dst + r * row_bytes + b;
      uint8_t* to = shared_at(map->swizzled ? swizzle(address) : address, cta);
      const uint64_t row = y + r, column = x * map->item_bytes + b;
      if (row < map->rows && column < map->columns * map->item_bytes) memcpy(to, (const uint8_t*)map->address + row * map->pitch_bytes + column, 16);
      else memset(to, 0, 16);
    }
  bytes_come(bar, cta, map->box_rows * row_bytes);
}
inline void tensor_load_multicast(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y, uint16_t to) {
  for (uint32_t cta = 0; cta < 2; cta++)
    if (to >> cta & 1) load_box(dst, map, bar, x, y, cta);
}
inline void bulk_load(uint32_t dst, const void* src, uint32_t nbytes, uint32_t bar) {
  if (nbytes % 16 || dst % 16 || (uintptr_t)src % 16) fprintf(stderr, "bulk load not aligned\n"), abort();
  memcpy(shared_at(dst), src, nbytes);
  bytes_come(bar, cluster_rank(), nbytes);
}
inline void tensor_store(const TensorMap* map, uint32_t src, int x, int y) {
  const uint64_t row_bytes = map->box_columns * map->item_bytes;
  for (uint64_t r = 0; r < map->box_rows; r++)
    if (y + r < map->rows) memcpy((uint8_t*)map->address + (y + r) * map->pitch_bytes + x * map->item_bytes, shared_at(src + r * row_bytes), row_bytes);
}

// ---- number formats
inline float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float sign = code & 128 ? -1.f : 1.f;
  if (exponent == 15 && mantissa == 7) return __uint_as_float(0x7fffffff);
  return sign * (exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9));
}
inline uint8_t e4m3_code(float f) {  // nearest, ties to even, saturating
  const uint8_t sign = __float_as_uint(f) >> 24 & 128;
  const float m = fabsf(f);
  if (m != m) return 0x7f;
  if (m >= 448.f) return sign | 0x7e;
  if (m < 0.015625f) return sign | (uint8_t)nearbyintf(m * 512.f);  // below 2^-6
  const unsigned v = __float_as_uint(m), rounded = (v + 0x7ffff + (v >> 20 & 1)) >> 20;
  return sign | (uint8_t)(rounded - (120 << 3));
}
inline uint16_t two_e4m3(float low, float high) { return e4m3_code(low) | e4m3_code(high) << 8; }
inline unsigned halves_of(uint16_t codes) { return two_halves(e4m3_value(codes & 255), e4m3_value(codes >> 8)); }
inline unsigned times_bf16(unsigned x, unsigned y) {
  return two_bf16(__uint_as_float(x << 16) * __uint_as_float(y << 16), __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u));
}
inline float larger_or_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffff) : a < b ? b : a; }
inline float about_reciprocal(float x) {  // off by up to one unit in the last place, as the instruction is
  const unsigned v = __float_as_uint(x);
  const float r = 1.f / x;
  return r == 0.f || fabsf(r) > 1e38f ? r : __uint_as_float(__float_as_uint(r) + (int)(v * 2654435761u >> 30 & 3) % 3 - 1);
}
inline float power_by_sums(float x) {  // mori_megamoe.arithmetic.exp2, operation for operation
  static const float c[7] = {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 0.240226507f, 0.693147182f, 1.0f};
  x = x < -126.f ? -126.f : x > 127.f ? 127.f : x;
  const float whole = nearbyintf(x), fraction = x - whole;
  float power = c[0];
  for (int i = 1; i < 7; i++) power = power * fraction + c[i];
  return power * __uint_as_float((unsigned)((int)whole + 127) << 23);
}

// ---- matrix instructions
#define WGMMA_FENCE()
#define WGMMA_COMMIT()
#define WGMMA_WAIT(groups)
#define GIVE_REGISTERS(n)
#define TAKE_REGISTERS(n)
inline uint64_t operand(uint32_t address) { return (uint64_t)((address & 0x3FFFF) >> 4); }
inline const uint8_t* operand_bytes(uint64_t b, uint32_t offset) { return shared_at(swizzle((uint32_t)(b << 4) + offset)); }

// Rows g and g + 8 of the warp's 16 x 32-byte slice of A, out of all lanes' registers (K runs over bytes).
inline void rows_of_a(const uint32_t* a, uint8_t (&row)[2][32]) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  for (int i = 0; i < 4; i++) {
    Meeting& m = warp_meets(a[i]);
    for (int c = 0; c < 4; c++) {
      const uint32_t v = (uint32_t)m.shown[4 * g + c];
      memcpy(&row[i & 1][(i >> 1) * 16 + 4 * c], &v, 4);
    }
    warp_meets(0);
  }
}
template <int N>
void multiply(float (&d)[N / 2], const float (&a)[2][32], int k, uint64_t b, int accumulate, bool fp8) {
  const int c = threadIdx.x & 3;
  for (int j = 0; j < N / 8; j++)
    for (int h = 0; h < 2; h++) {
      const int n = 8 * j + 2 * c + h;
      double sum[2] = {0, 0};
      for (int piece = 0; piece < 2; piece++) {
        const uint8_t* bytes = operand_bytes(b, n * 128 + piece * 16);
        for (int i = 0; i < k / 2; i++) {
          float v;
          if (fp8) v = e4m3_value(bytes[i]);
          else {
            uint16_t bits;
            memcpy(&bits, bytes + 2 * i, 2);
            v = __uint_as_float((unsigned)bits << 16);
          }
          sum[0] += (double)a[0][piece * k / 2 + i] * v, sum[1] += (double)a[1][piece * k / 2 + i] * v;
        }
      }
      for (int r = 0; r < 2; r++) {
        float& to = d[4 * j + 2 * r + h];
        to = (float)((accumulate ? (double)to : 0.0) + sum[r]);
      }
    }
}
template <int R>
void mma_fp8(float (&d)[R], const uint32_t* a, uint64_t b, int accumulate) {
  uint8_t row[2][32];
  rows_of_a(a, row);
  float values[2][32];
  for (int r = 0; r < 2; r++)
    for (int i = 0; i < 32; i++) values[r][i] = e4m3_value(row[r][i]);
  multiply<2 * R>(d, values, 32, b, accumulate, true);
}
template <int R>
void mma_bf16(float (&d)[R], const uint32_t* a, uint64_t b, int accumulate) {
  uint8_t row[2][32];
  rows_of_a(a, row);
  float values[2][32];
  for (int r = 0; r < 2; r++)
    for (int i = 0; i < 16; i++) {
      uint16_t bits;
      memcpy(&bits, &row[r][2 * i], 2);
      values[r][i] = __uint_as_float((unsigned)bits << 16);
    }
  multiply<2 * R>(d, values, 16, b, accumulate, false);
}

// ---- shared memory by address
inline float load_shared(uint32_t a) { return *(float*)shared_at(a); }
inline float2 load_shared_2(uint32_t a) { return *(float2*)shared_at(a); }
inline void store_shared(uint32_t a, float v) { *(float*)shared_at(a) = v; }
inline uint32_t load_shared_word(uint32_t a) { return *(uint32_t*)shared_at(a); }
inline void store_shared_word(uint32_t a, uint32_t v) { *(uint32_t*)shared_at(a) = v; }
template <int N>
void load_words(uint32_t (&r)[N], uint32_t a) { memcpy(r, shared_at(a), 4 * N); }
// Matrix i's rows are at the addresses of lanes 8 i .. 8 i + 7; transposed: lane l's pair is (row 2 (l % 4) + {0, 1}, column l / 4).
inline void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; i++)
    for (int h = 0; h < 2; h++) {
      const uint32_t row = from_lane(address, 8 * i + 2 * (lane & 3) + h);
      const uint16_t element = r[i] >> 16 * h;
      memcpy(shared_at(row + 2 * (lane >> 2)), &element, 2);
    }
}
