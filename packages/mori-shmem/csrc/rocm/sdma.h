// Queues of a copy engine, as the driver hands them out, and which engine to ask for.
//
// There are two ways to one, behind the same interface; both name the engine:
//   rocr     hsa_amd_queue_create of libhsa-runtime64, public since its interface 1.31 (ROCm 10)
//   hsakmt   hsaKmtCreateQueueExt of libhsakmt, where that is a shared library
// A way that this machine lacks throws "missing_library", a driver that refuses throws "driver"; neither leaves a queue
// behind. That a queue was made does not mean that its engine runs: Queue::probe (queue.h) finds out.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "rocm/device.h"

namespace mori::rocm {

enum class Way { kRocr, kHsakmt };

// The words of a queue; they live as long as the object. All pointers can be used by the host and by kernels of the device.
class HardwareQueue {
 public:
  virtual ~HardwareQueue() = default;

  void* ring = nullptr;
  uint64_t nbytes = 0;
  uint64_t *read_pointer = nullptr, *write_pointer = nullptr, *doorbell = nullptr;
};

// in_device_memory: the ring lies where kernels of the device reach it fast; else where the host does.
std::unique_ptr<HardwareQueue> create_hardware_queue(Way way, const Device& device, uint32_t engine, uint64_t nbytes,
                                                     bool in_device_memory);

// The engines that the driver recommends for copies from the device to a peer, one bit each; 0 if it recommends none.
uint32_t recommended_engines(Way way, const Device& device, const std::string& peer_bus_id);

}  // namespace mori::rocm
