// Received rows laid out by expert, and back: packed[e][i] is the i-th received row that my e-th expert wants, in the
// order of the rows. A row that several of my experts want is there for each of them.
//   place_by_expert   a warp an expert: numbers its rows
//   spread_rows       a warp a (row, slot): copies the row to where it was numbered
//   gather_rows       a warp a row: the sum over its slots of weight * packed row, in fp32, rounded once
#include "elements.cuh"
#include "protocol.cuh"
#include "rows.cuh"

struct ExpertParams {
  const int* ids;       // [rows][top_k] of the rows received: global expert ids
  const int* count;     // rows received
  const int* positions; // [rows] where they are from
  int top_k, first_expert, num_experts, capacity;
  int* slots;           // [rows][top_k]: number among the rows of the slot's expert, where that is mine
  int* counts;          // [experts]
  int* packed_positions;  // [experts][capacity]
  const char *payload, *scales;  // [rows][...]
  char *packed, *packed_scales;  // [experts][capacity][...]
  int payload_units, scale_bytes;
  const float* weights; // [rows][top_k] or null
  char* into;           // [rows][payload_units]
};
extern "C" __device__ const unsigned expert_params_bytes = sizeof(ExpertParams);

// My expert that slot k of a row names, unless an earlier slot has; else -1.
DEVICE int expert_of(const ExpertParams& p, size_t row, int k) {
  const int* ids = p.ids + row * p.top_k;
  const int e = ids[k] - p.first_expert;
  if (e < 0 || e >= p.num_experts) return -1;
  for (int j = 0; j < k; j++)
    if (ids[j] == ids[k]) return -1;
  return e;
}

extern "C" __global__ void __launch_bounds__(256, 1) place_by_expert(const __grid_constant__ ExpertParams p) {
  const int lane = threadIdx.x & 31, count = *p.count;
  const int e = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (e >= p.num_experts) return;
  int placed = 0;
  for (int row0 = 0; row0 < count; row0 += 32) {
    const int row = row0 + lane;
    int slot = -1;
    if (row < count)
      for (int k = p.top_k - 1; k >= 0; k--)
        if (p.ids[(size_t)row * p.top_k + k] == p.first_expert + e) slot = k;
    const unsigned wanted = __ballot_sync(~0u, slot >= 0);
    if (slot >= 0) {
      const int number = placed + __popc(wanted & ((1u << lane) - 1));
      p.slots[(size_t)row * p.top_k + slot] = number;
      p.packed_positions[(size_t)e * p.capacity + number] = p.positions[row];
    }
    placed += __popc(wanted);
  }
  if (lane == 0) p.counts[e] = placed;
}

extern "C" __global__ void __launch_bounds__(256, 1) spread_rows(const __grid_constant__ ExpertParams p) {
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const long long pairs = (long long)*p.count * p.top_k;
  for (long long i = (long long)blockIdx.x * warps + (threadIdx.x >> 5); i < pairs; i += (long long)gridDim.x * warps) {
    const size_t row = i / p.top_k;
    const int e = expert_of(p, row, i % p.top_k);
    if (e < 0) continue;
    const size_t to = (size_t)e * p.capacity + p.slots[i];
    const uint4* from = (const uint4*)p.payload + row * p.payload_units;
    for (int u = lane; u < p.payload_units; u += 32) ((uint4*)p.packed)[to * p.payload_units + u] = load_once(from + u);
    for (int b = lane; b < p.scale_bytes; b += 32) p.packed_scales[to * p.scale_bytes + b] = p.scales[row * p.scale_bytes + b];
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) gather_rows(const __grid_constant__ ExpertParams p) {
  typedef Element<ELEMENT> Rows;
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, count = *p.count;
  for (size_t row = blockIdx.x * warps + (threadIdx.x >> 5); row < count; row += (size_t)gridDim.x * warps)
    for (int u = lane; u < p.payload_units; u += 32) {
      float sum[Rows::PER_UNIT] = {};
      bool first = true;
      for (int k = 0; k < p.top_k; k++) {
        const int e = expert_of(p, row, k);
        if (e < 0) continue;
        const size_t at = (size_t)e * p.capacity + p.slots[row * p.top_k + k];
        float term[Rows::PER_UNIT];
        Rows::unpack(term, load_once((const uint4*)p.packed + at * p.payload_units + u));
        const float weight = p.weights ? p.weights[row * p.top_k + k] : 1.0f;
#pragma unroll
        for (int i = 0; i < Rows::PER_UNIT; i++) {
          const float weighted = __fmul_rn(term[i], weight);
          sum[i] = first ? weighted : __fadd_rn(sum[i], weighted);
        }
        first = false;
      }
      ((uint4*)p.into)[row * p.payload_units + u] = Rows::pack(sum);
    }
}
