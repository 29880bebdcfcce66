// The packet processor of mori-shmem, loaded when the first queue is made. There is one in the repository: what its
// encoder writes and what this node executes cannot drift apart.
#pragma once
#include <mori_sdma.h>

namespace mori_sim {

struct PacketLibrary {
  decltype(&mori_sdma_abi_version) abi_version;
  decltype(&mori_sdma_reason_name) reason_name;
  decltype(&mori_sdma_op_name) op_name;
  decltype(&mori_sdma_decode) decode;
  decltype(&mori_sdma_execute) execute;
  decltype(&mori_sdma_ring_next) ring_next;
  decltype(&mori_sdma_ring_retire) ring_retire;
  decltype(&mori_sdma_fault_dwords) fault_dwords;

  // Throws std::runtime_error saying which library or symbol is missing.
  static const PacketLibrary& get();
};

}  // namespace mori_sim
