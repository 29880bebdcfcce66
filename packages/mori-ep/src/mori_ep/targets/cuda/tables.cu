// What callers ask for beside a dispatch: how many rows each of my experts has got, and a copy of the routing.
#include "protocol.cuh"

#define EXPERTS_AT_ONCE 4096

// One block. counts[e] = pairs of (row, slot) that name my e-th expert.
extern "C" __global__ void __launch_bounds__(1024) count_experts(const int* ids, const int* count, int top_k, int first_expert, int num_experts, int* counts) {
  __shared__ int here[EXPERTS_AT_ONCE];
  const long long slots = (long long)*count * top_k;
  for (int begin = 0; begin < num_experts; begin += EXPERTS_AT_ONCE) {
    const int size = min(EXPERTS_AT_ONCE, num_experts - begin);
    for (int i = threadIdx.x; i < size; i += blockDim.x) here[i] = 0;
    __syncthreads();
    for (long long i = threadIdx.x; i < slots; i += blockDim.x) {
      const int expert = ids[i] - first_expert - begin;
      if (expert >= 0 && expert < size) atomicAdd(here + expert, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) counts[begin + i] = here[i];
    __syncthreads();
  }
}

// copy: table [entries] | source [capacity] | count | meta [32], with the rows from each rank in place of META_FIRST
extern "C" __global__ void __launch_bounds__(256) copy_routing(const int* table, int entries, const int* source, int capacity, const int* count, const int* meta, int world,
                                                              int* copy) {
  const int begin = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int i = begin; i < entries; i += step) copy[i] = table[i];
  copy += entries;
  for (int i = begin; i < *count; i += step) copy[i] = source[i];
  copy += capacity;
  if (begin == 0) *copy = *count;
  copy += 1;
  if (begin < 32) copy[begin] = begin < world ? meta[META_FIRST + begin + 1] - meta[META_FIRST + begin] : meta[begin];
}
