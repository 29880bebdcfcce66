// What peers gather into this rank: widened here where it came as fp8, else only waited for.
#pragma once
#include "order.cuh"
#include "signal.cuh"
#include "wgmma.cuh"

// All warps that come here share the CTA's part of the work by a ticket; a unit is 16 rows x 128 columns of codes.
DEVICE void widen(uint32_t ticket, unsigned epoch, const Params& p) {
  const int lane = threadIdx.x & 31, columns = (p.n + 255) / 256 * 2;
  const int units = p.band * columns * 2 * HALVES * 4, per_cta = (units + gridDim.x - 1) / gridDim.x;
  const int slots = p.bands * (p.world - 1);
  int awaited = -1;
  for (;;) {
    int mine = 0;
    if (lane == 0) asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(mine) : "r"(ticket) : "memory");
    mine = __shfl_sync(~0u, mine, 0);
    const int slot = mine / per_cta, unit = (mine - slot * per_cta) * gridDim.x + blockIdx.x;
    if (slot >= slots) return;
    const int band = slot / (p.world - 1);
    int source = p.rank + 1 + slot - band * (p.world - 1);
    source -= source >= p.world ? p.world : 0;
    const int rows = p.start[source + 1] - p.start[source];
    const int quarter = unit & 3, half = (unit >> 2) % (2 * HALVES), tile = (unit >> 2) / (2 * HALVES);
    const int block = band * p.band + tile / columns, column = tile % columns;
    const int row = block * ROWS + half * 64 + quarter * 16 + (lane >> 3), x = column * 128 + (lane & 7) * 16;
    if (unit >= units || block * ROWS >= rows) continue;
    if (slot != awaited) {
      if (lane == 0) wait_flag(p.gathered[source] + band, epoch, p.fault, p.timeout_ns, p.rank, source, 2, band);
      __syncwarp();
      awaited = slot;
    }
    const char* codes = p.q_inbox[source] + (((int64_t)block * columns + column) * 2 * HALVES + half) * Q_BYTES;
    uint4 v[4];
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = quarter * 16 + i * 4 + (lane >> 3);
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "l"(codes + r * 128 + (((lane & 7) ^ (r & 7)) << 4))
                   : "memory");
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale[i]) : "l"(codes + 64 * 128 + r * 4) : "memory");
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + 4 * i >= rows) break;
      uint16_t* to = p.out + (int64_t)(p.start[source] + row + 4 * i) * p.n + x;
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        uint32_t wide[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float low, high;
          from_e4m3x2((uint16_t)(words[2 * g + (j >> 1)] >> (16 * (j & 1))), low, high);
          wide[j] = to_bf16x2(low * scale[i], high * scale[i]);
        }
        if (x + 8 * g < p.n) *(uint4*)(to + 8 * g) = make_uint4(wide[0], wide[1], wide[2], wide[3]);
      }
    }
  }
}

// One warp: the kernel may end only when everything has come.
DEVICE void await_gathered(unsigned epoch, const Params& p) {
  for (int i = threadIdx.x & 31; i < p.bands * p.world; i += 32) {
    const int source = i / p.bands, band = i - source * p.bands;
    if (source != p.rank && band * p.band * ROWS < p.start[source + 1] - p.start[source])
      wait_flag(p.gathered[source] + band, epoch, p.fault, p.timeout_ns, p.rank, source, 2, band);
  }
}
