// What comes before GEMM2, in one launch: block 0 lists its items (GEMM1's tiles, other widths), the others bring hidden rows into
// the form that the GEMM's body reads (rows.cuh), padding too. How many rows there are is known on the device only.
#define QUANTISED 1
#include "rows.cuh"

extern "C" __device__ const unsigned hidden_params_bytes = sizeof(HiddenParams);

// All threads of a block: experts in order, in an expert the tile fastest, as in plan.cuh.
DEVICE void list_items(const HiddenParams& p) {
  __shared__ unsigned first[MAX_EXPERTS], end[MAX_EXPERTS];  // tiles of an expert
  const unsigned tiles = p.tiles.counts[NUM_TILES];
  const int* expert = p.tiles.expert;
  for (unsigned t = threadIdx.x; t < tiles; t += blockDim.x) {
    if (t == 0 || expert[t - 1] != expert[t]) first[expert[t]] = t;
    if (t + 1 == tiles || expert[t + 1] != expert[t]) end[expert[t]] = t + 1;
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < tiles * p.pairs; i += blockDim.x) {
    const int e = expert[i / p.pairs];
    const unsigned number = end[e] - first[e], of_expert = i - first[e] * p.pairs, pair = of_expert / number;
    p.items[i] = (first[e] + of_expert - pair * number) | pair << 20;
  }
  if (threadIdx.x == 0) p.counts[NUM_ITEMS] = tiles * p.pairs, p.counts[NUM_TILES] = tiles;
}

extern "C" __global__ void __launch_bounds__(256) hidden(const __grid_constant__ HiddenParams p, const __grid_constant__ RowsParams rows) {
  if (blockIdx.x == 0) return list_items(p);
  RowsParams r = rows;
  r.tokens = p.tiles.counts[NUM_ROWS];
  make_rows(r, (blockIdx.x - 1) * (blockDim.x >> 5) + (threadIdx.x >> 5), (gridDim.x - 1) * (blockDim.x >> 5));
}
