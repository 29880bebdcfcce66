// Matrix instructions with the A operand in registers, and the few other instructions that C++ has no name for.
// (tests/cuda_mma_on_cpu.h says in C++ what each does.)
#pragma once
#include "async.cuh"

#define WGMMA_FENCE() asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define WGMMA_COMMIT() asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WGMMA_WAIT(groups) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory")
#define GIVE_REGISTERS(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))
#define TAKE_REGISTERS(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))

// Shared-memory operand: rows of 128 bytes with the 128-byte swizzle. Adding 2 moves on by 32 bytes, one instruction's K.
DEVICE uint64_t operand(uint32_t address) { return (uint64_t)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }

#define REGS_0_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_0_31 REGS_0_15 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_32_63                                                                                                                       \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63"
#define OUT8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OUT16(i) OUT8(i), OUT8(i + 8)
#define OUT32(i) OUT16(i), OUT16(i + 16)
#define MMA_IN(a, b, accumulate) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)
#define MMA(shape, regs, a, b, predicate, tail) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " predicate ", 0;\nwgmma.mma_async.sync.aligned." shape " {" regs "}, {" a "}, " b ", p, " tail ";\n}\n"

// d (+)= a[64, K] . b[N, K]^T, N = 2 d's size. Thread t of the warpgroup holds, for j = 0 .. N / 8 - 1, columns
// 8 j + 2 (t % 4) + {0, 1}: d[4 j + {0, 1}] in row 16 (t / 32) + t % 32 / 4, and d[4 j + {2, 3}] eight rows below. Of a it
// holds 4 consecutive bytes a register: a[0], a[1] of these two rows at bytes 4 (t % 4), a[2], a[3] 16 bytes further on.
DEVICE void mma_fp8(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {  // K = 32
  asm volatile(MMA("m64n128k32.f32.e4m3.e4m3", REGS_0_31 ", " REGS_32_63, "%64, %65, %66, %67", "%68", "%69", "1, 1")
               : OUT32(0), OUT32(32)
               : MMA_IN(a, b, accumulate));
}
DEVICE void mma_fp8(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(MMA("m64n64k32.f32.e4m3.e4m3", REGS_0_31, "%32, %33, %34, %35", "%36", "%37", "1, 1") : OUT32(0) : MMA_IN(a, b, accumulate));
}
DEVICE void mma_fp8(float (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(MMA("m64n32k32.f32.e4m3.e4m3", REGS_0_15, "%16, %17, %18, %19", "%20", "%21", "1, 1") : OUT16(0) : MMA_IN(a, b, accumulate));
}
DEVICE void mma_bf16(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {  // K = 16
  asm volatile(MMA("m64n128k16.f32.bf16.bf16", REGS_0_31 ", " REGS_32_63, "%64, %65, %66, %67", "%68", "%69", "1, 1, 0")
               : OUT32(0), OUT32(32)
               : MMA_IN(a, b, accumulate));
}
DEVICE void mma_bf16(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(MMA("m64n64k16.f32.bf16.bf16", REGS_0_31, "%32, %33, %34, %35", "%36", "%37", "1, 1, 0") : OUT32(0) : MMA_IN(a, b, accumulate));
}
DEVICE void mma_bf16(float (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(MMA("m64n32k16.f32.bf16.bf16", REGS_0_15, "%16, %17, %18, %19", "%20", "%21", "1, 1, 0") : OUT16(0) : MMA_IN(a, b, accumulate));
}

// ---- shared memory by address
DEVICE float load_shared(uint32_t a) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
  return v;
}
DEVICE float2 load_shared_2(uint32_t a) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory");
  return v;
}
DEVICE void store_shared(uint32_t a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
DEVICE uint32_t load_shared_word(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
DEVICE void store_shared_word(uint32_t a, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEVICE void load_words(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void load_words(uint32_t (&r)[2], uint32_t a) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory");
}
DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
DEVICE void warpgroup_sync(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory"); }
