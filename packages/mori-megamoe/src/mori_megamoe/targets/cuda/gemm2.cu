// GEMM2 of the layer on Hopper (sm_90a): y = h w2^T of the rows that Stage1 has left, times the router's weight, each row stored
// at its token's rank. Main loop, tile, loader and the order of items are GEMM1's (gemm1.cu); the epilogue is its own (back.cuh).
//
// w2 is prepared as w1 is (weights.py): of 32 columns, 16 stand where GEMM1 has gates, 16 where it has ups. An item is a tile
// times 512 columns; where the layer's width is an odd multiple of 256, the last item's second CTA multiplies by zeros and
// stores nothing.
// Everything is there when it starts, and it waits for nobody: a rank's memory for partials is free once its counts of this call
// have been heard (combine.cu). That the rows are all there is said by what comes after it on the stream, `combine`.
// Where it stands: ran on one H200 on 1 December 2026, with one rank and with two that shared it; not measured by itself.
#include "back.cuh"
#include "consumer.cuh"
#include "loader.cuh"

extern "C" __device__ const unsigned back_params_bytes = sizeof(BackParams);

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    gemm2(const __grid_constant__ Gemm1Maps maps, const __grid_constant__ Gemm1Params p, const __grid_constant__ BackParams back) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = shared_address(dynamic_shared);
  const int cta = cluster_rank(), thread = threadIdx.x;
  const int group = __shfl_sync(~0u, thread >> 7, 0);  // uniform, so that descriptors stay in uniform registers
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(FULL(s), 1), barrier_init(EMPTY(s), 16);
    barrier_init_fence();
  }
  cluster_sync();
  if (group == 0) {
    GIVE_REGISTERS(LOADER_REGISTERS);
    if (thread < 32) load_items(shared, cta, maps, p);
  } else {
    TAKE_REGISTERS(CONSUMER_REGISTERS);
    consume_items(group - 1, shared, cta, p, [&](float(&sum)[2][TILE_ROWS / 2], const float(&low)[2], const float(&high)[2], const Target& to,
                                                 const Thread& t) { bring_back(sum, low, high, to, t, shared, back); });
  }
  cluster_sync();
}
