// The baseline's dispatch: all blocks send (send.cuh); then the first waits until everything has come here, so that what follows
// on the stream finds all rows. And `pack`: all send, nobody waits.
#include "send.cuh"

extern "C" __device__ const unsigned send_params_bytes = sizeof(SendParams);

extern "C" __global__ void __launch_bounds__(256, 2) dispatch(const __grid_constant__ SendParams p) {
  if ((int)blockIdx.x < p.blocks && (int)threadIdx.x < p.threads) send_units(p);
  if (blockIdx.x) return;
  const unsigned* arrived = (const unsigned*)(p.landing.window[p.rank] + p.landing.at_arrived);
  for (int i = threadIdx.x; i < p.experts * p.world; i += blockDim.x)
    wait_flag(arrived + i, p.due[i], p.fault, p.timeout_ns, p.rank, i % p.world, WAIT_ROWS, i / p.world);
}

extern "C" __global__ void __launch_bounds__(256, 2) pack(const __grid_constant__ SendParams p) { send_units(p); }
