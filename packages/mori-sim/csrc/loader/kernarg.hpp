// The kernel-argument segment of one launch: explicit arguments copied from the caller's list, hidden ones filled.
#pragma once
#include <cstdint>
#include <vector>

#include "loader/code_object.hpp"

namespace mori_sim {

struct LaunchShape {
  uint32_t grid[3];   // workgroups
  uint32_t block[3];  // work items
  uint32_t dynamic_lds_nbytes = 0;
};

// `parameters` holds one pointer for each explicit argument, in metadata order.
std::vector<uint8_t> build_kernarg(const KernelInfo& kernel, const LaunchShape& shape, void* const* parameters,
                                   uint64_t queue_address);
// The caller packed the explicit arguments itself (HIP_LAUNCH_PARAM_BUFFER_POINTER): `packed` covers the front.
std::vector<uint8_t> build_kernarg(const KernelInfo& kernel, const LaunchShape& shape, const void* packed,
                                   size_t packed_nbytes, uint64_t queue_address);

}  // namespace mori_sim
