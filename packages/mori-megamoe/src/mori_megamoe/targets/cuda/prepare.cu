// What comes before Stage1, in one launch: block 0 makes the plan (plan.cuh), the others make the operand rows (rows.cuh).
// And the rows alone, for a GEMM without a layer around it.
#include "plan.cuh"
#include "rows.cuh"

extern "C" __device__ const unsigned plan_params_bytes = sizeof(PlanParams);
extern "C" __device__ const unsigned rows_params_bytes = sizeof(RowsParams);
extern "C" __device__ const unsigned plan_memory_bytes = sizeof(PlanMemory);  // and 4 * PLAN_WARPS for each expert of all

extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    prepare(const __grid_constant__ PlanParams plan, const __grid_constant__ RowsParams rows) {
  extern __shared__ __align__(16) uint8_t dynamic_shared[];
  if (blockIdx.x == 0) make_plan(plan, *(PlanMemory*)dynamic_shared);
  else make_rows(rows, (blockIdx.x - 1) * PLAN_WARPS + (threadIdx.x >> 5), (gridDim.x - 1) * PLAN_WARPS);
}

extern "C" __global__ void __launch_bounds__(256) operand_rows(const __grid_constant__ RowsParams rows) {
  make_rows(rows, blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), gridDim.x * (blockDim.x >> 5));
}
