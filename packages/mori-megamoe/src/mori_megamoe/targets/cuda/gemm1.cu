// GEMM1 of the layer on Hopper (sm_90a): h = SwiGLU(x w1^T) of routed rows, requantised, over a list of items.
//
// An item is a tile (TILE_ROWS rows of one expert) times 512 rows of the expert's weights, 256 for each CTA of a cluster of
// two. The weights are the A operand, the rows the B operand: fp4 codes then decode in registers straight into fragments, and
// one thread holds gate and up of an output. Persistent, one CTA an SM.
//
// Roles of the 384 threads:
//   warp 0               loader: operand rows (each CTA half of them, multicast) and weights, through STAGES stages
//   warp 1 of one CTA    WAIT == QUEUE: publishes tiles as they become ready (the first CTA that does not send, if there is one)
//   warpgroups 1 and 2   consumers: decode, multiply, finish
// No wait traps: with a trap in it ptxas ignores setmaxnreg, and the sums are spilled. A wait that is late goes on.
//
// In files: tile.cuh (what is fixed, shared memory)   schedule.cuh (which item, arrivals)   loader.cuh   decode.cuh, mainloop.cuh,
//           sums.cuh, swiglu.cuh, epilogue.cuh, consumer.cuh (what a consumer does)   params.cuh (from the host)   weights.py (the weights' order)
// Where it stands: ran on one H200 on 1 December 2026 (tests/test_cuda_*.py with one rank, and with two that shared it;
// compute-sanitizer's memcheck over test_cuda_gemm1.py found nothing), and was measured there (README.md).
// With WAIT, this is the fused Stage1: the first `send.blocks` CTAs send this rank's rows (send.cuh), or pack them for copy
// engines and move in what these bring (slots.cuh), then join.
#include "consumer.cuh"
#include "epilogue.cuh"
#include "loader.cuh"
#if WAIT != NEVER
#include "moves.cuh"
#endif

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
#if WAIT == NEVER
    gemm1(const __grid_constant__ Gemm1Maps maps, const __grid_constant__ Gemm1Params p) {
#else
    stage1(const __grid_constant__ Gemm1Maps maps, const __grid_constant__ Gemm1Params p, const __grid_constant__ SendParams send) {
#endif
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = shared_address(dynamic_shared);
  const int cta = cluster_rank(), thread = threadIdx.x;
  const int group = __shfl_sync(~0u, thread >> 7, 0);  // uniform, so that descriptors stay in uniform registers
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(FULL(s), 1), barrier_init(EMPTY(s), 16);
    for (int i = 0; i < RING; ++i) barrier_init(DRAWN(i), 1), barrier_init(KNOWN(i), 1);
    barrier_init_fence();
  }
#if WAIT != NEVER
  if ((int)blockIdx.x < send.blocks && thread < send.threads) send_units(send), move_rows(send);
#endif
  cluster_sync();
  if (group == 0) {
    GIVE_REGISTERS(LOADER_REGISTERS);
    if (thread < 32) load_items(shared, cta, maps, p);
#if WAIT == QUEUE
    else if (thread < 64 && (int)blockIdx.x == min(send.blocks, (int)gridDim.x - 1)) publish_ready_tiles(thread & 31, p);
#endif
  } else {
    TAKE_REGISTERS(CONSUMER_REGISTERS);
    consume_items(group - 1, shared, cta, p, [&](float(&sum)[2][TILE_ROWS / 2], const float(&gate)[2], const float(&up)[2], const Target& to,
                                                 const Thread& t) { finish_item(sum, gate, up, to, t, shared, maps, p); });
  }
  cluster_sync();
}
