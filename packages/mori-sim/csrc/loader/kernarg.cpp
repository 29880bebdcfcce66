#include "loader/kernarg.hpp"

#include <algorithm>
#include <cstring>

namespace mori_sim {
namespace {

// A hidden argument this node has no service for (hostcall, device heap, multigrid) stays zero: a kernel that uses
// it faults on address 0 and names itself.
uint64_t hidden_value(const std::string& kind, const LaunchShape& shape, uint64_t queue_address) {
  const auto axis = [&kind] { return kind.back() - 'x'; };
  const auto starts = [&kind](const char* prefix) { return kind.rfind(prefix, 0) == 0; };
  if (starts("hidden_block_count_")) return shape.grid[axis()];
  if (starts("hidden_group_size_")) return shape.block[axis()];
  if (starts("hidden_remainder_")) return 0;  // HIP grids are whole workgroups
  if (starts("hidden_global_offset_")) return 0;
  if (kind == "hidden_grid_dims") return shape.grid[2] * shape.block[2] > 1 ? 3 : shape.grid[1] * shape.block[1] > 1 ? 2 : 1;
  if (kind == "hidden_dynamic_lds_size") return shape.dynamic_lds_nbytes;
  if (kind == "hidden_queue_ptr") return queue_address;
  if (kind == "hidden_private_base") return 0x20000;  // high halves of the two apertures
  if (kind == "hidden_shared_base") return 0x10000;
  return 0;
}

void fill_hidden(std::vector<uint8_t>& segment, const KernelInfo& kernel, const LaunchShape& shape, uint64_t queue_address) {
  for (const auto& argument : kernel.arguments) {
    if (!argument.hidden()) continue;
    const uint64_t value = hidden_value(argument.kind, shape, queue_address);
    std::memcpy(segment.data() + argument.offset, &value, std::min<size_t>(argument.nbytes, sizeof value));
  }
}

}  // namespace

std::vector<uint8_t> build_kernarg(const KernelInfo& kernel, const LaunchShape& shape, void* const* parameters,
                                   uint64_t queue_address) {
  std::vector<uint8_t> segment(kernel.kernarg_nbytes);
  size_t next = 0;
  for (const auto& argument : kernel.arguments)
    if (!argument.hidden()) std::memcpy(segment.data() + argument.offset, parameters[next++], argument.nbytes);
  fill_hidden(segment, kernel, shape, queue_address);
  return segment;
}

std::vector<uint8_t> build_kernarg(const KernelInfo& kernel, const LaunchShape& shape, const void* packed,
                                   size_t packed_nbytes, uint64_t queue_address) {
  std::vector<uint8_t> segment(kernel.kernarg_nbytes);
  std::memcpy(segment.data(), packed, std::min<size_t>(packed_nbytes, segment.size()));
  fill_hidden(segment, kernel, shape, queue_address);
  return segment;
}

}  // namespace mori_sim
