// One fp8 GEMM whose epilogue is the all-reduce (sm_90a, persistent, one CTA an SM, clusters of two along n).
//
// A tile is ROWS x 128 of the sum over k; a rank computes every tile, its rows belong to an owner:
//   remote tile (owner is another rank): rounded to bf16 and sent to the owner's inbox;
//   local tile: rounded to bf16 too, then the inboxes are added in fp32 in rank order, rounded once, and sent to all outputs.
// Tiles come in bands (`band` row blocks over all of n). Remote bands go first; local ones follow `lag` bands behind.
//
// Roles of the 384 threads:
//   warp 0, one thread     loads stages: a (half by each CTA of the pair, multicast) and b
//   warps 1 and 2, a thread each   the courier of one consumer warpgroup: inbox tiles in, finished tiles out, flags
//   warp 3                 widens arrived fp8 blocks to bf16 in the output (fp8 gather), or waits for the last arrivals
//   warpgroups 1 and 2     HALVES x 64 rows each: wgmma, promotion to fp32 every 128 of k, epilogue into shared memory
// Consumers touch neither flags nor global memory: a flag costs 5 us from the store on, a tile takes 6.
//
// Protocol, for one band of owner o from source s:
//   1. each courier stores its part of each tile, waits until the stores are done, counts itself in count[o][band] (of s);
//      the last one, by then nobody's stores are missing, signals `scatter_flag[o][band]`; the counter has wrapped to 0.
//   2. the courier of o waits for arrived[s][band] of every s, loads the inbox tiles, the consumer adds, the result is
//      stored to all outputs; counted in count[o][band] of o; the last one signals every listener's gather flag.
//   3. warp 3 of CTA 0 (fp8: of every CTA) sees gathered[s][band] of all s before the kernel ends.
// Why nothing needs a barrier or a reset: a rank ends call e only after all gather flags of e have come, so all inboxes of
// e have been read; nobody stores a gathered band of e + 1 before this rank, whose kernel e + 1 starts behind the readers of
// its output on its stream, has sent its part of that band. Flags carry the epoch e, kept in `step` on the device, so a
// captured graph stays right. Bands are per call, epochs are not: any m may follow any other.
// No cycle: a courier never blocks on an inbox with a count of its own outstanding, and what it waits for stands earlier
// in every rank's order than what it holds up; all CTAs are resident.
//
// In files: smem.cuh (tile, shared memory)   order.cuh (which tile is whose, and when)   loader.cuh   courier.cuh
//           arrivals.cuh   scales.cuh, mainloop.cuh, epilogue.cuh, consumer.cuh (what a consumer does)   params.cuh (from the host)
#include "arrivals.cuh"
#include "consumer.cuh"
#include "courier.cuh"
#include "loader.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    gemm_allreduce(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = shared_address(dynamic_shared), bars = shared + BARRIERS;
  const int cta = cluster_rank(), thread = threadIdx.x;
  const int group = __shfl_sync(~0u, thread >> 7, 0);  // uniform, so that descriptors stay in uniform registers
  const unsigned epoch = p.toggles ? 1 : load_relaxed_gpu(p.step) + 1;
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(FULL(s), 1), barrier_init(EMPTY(s), 4);
    for (int i = 0; i < 4; ++i) barrier_init(OFFERED(i >> 1, i & 1), 1), barrier_init(TAKEN(i >> 1, i & 1), 4);
    for (int i = 0; i < NUMBERS; ++i) barrier_init(DRAWN(i), 1);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(TICKET), "r"(0) : "memory");
    barrier_init_fence();
  }
  cluster_sync();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (thread == 0) load_stages(shared, bars, cta, maps, p);
    else if (thread == 32 || thread == 64) run_courier(thread / 32 - 1, shared, bars, cta, epoch, maps, p);
    else if (thread >= 96 && p.world > 1) {
      if (FP8_GATHER && p.widens) widen(TICKET, epoch, p);
      else if (blockIdx.x == 0) await_gathered(epoch, p);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    consume(group - 1, shared, bars, cta, p);
    if (FP8_GATHER && p.widens && p.world > 1) widen(TICKET, epoch, p);
  }
  cluster_sync();
  if (thread == 0 && last_to_leave(p.exits, gridDim.x)) {
    store_relaxed_sys(p.tickets, 0);
    if (p.toggles)
      for (int i = 0; i < p.world * p.bands; ++i)
        if (i / p.bands != p.rank) store_relaxed_sys(p.gathered[i / p.bands] + i % p.bands, 0);
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p.step) : "memory");
  }
}
