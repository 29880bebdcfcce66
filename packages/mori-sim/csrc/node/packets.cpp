#include "node/packets.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace mori_sim {
namespace {

template <class Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("libmori_sdma.so has no ") + name);
}

PacketLibrary load() {
  const char* asked = std::getenv("MORI_SIM_PACKET_LIBRARY");
  // Without a path the run path of this library leads to mori-shmem's folder beside it.
  void* library = dlopen(asked != nullptr ? asked : "libmori_sdma.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("mori-shmem's packet processor cannot be loaded: ") + dlerror());
  PacketLibrary loaded{};
  find(library, loaded.abi_version, "mori_sdma_abi_version");
  if (loaded.abi_version() != MORI_SDMA_ABI_VERSION)
    throw std::runtime_error("libmori_sdma.so speaks version " + std::to_string(loaded.abi_version()) + ", mori-sim was built for " +
                             std::to_string(MORI_SDMA_ABI_VERSION) + ": install mori-shmem and mori-sim of one release");
  find(library, loaded.reason_name, "mori_sdma_reason_name");
  find(library, loaded.op_name, "mori_sdma_op_name");
  find(library, loaded.decode, "mori_sdma_decode");
  find(library, loaded.execute, "mori_sdma_execute");
  find(library, loaded.ring_next, "mori_sdma_ring_next");
  find(library, loaded.ring_retire, "mori_sdma_ring_retire");
  find(library, loaded.fault_dwords, "mori_sdma_fault_dwords");
  return loaded;
}

}  // namespace

const PacketLibrary& PacketLibrary::get() {
  static const PacketLibrary library = load();
  return library;
}

}  // namespace mori_sim
