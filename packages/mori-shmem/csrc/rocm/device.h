// A GPU as one communicator uses it, and memory on it that is not part of a window.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "host/memory.h"
#include "rocm/vendor.h"

namespace mori::rocm {

int device_count();

// Makes a device current for HIP calls of this thread, and the former one again.
class OnDevice {
 public:
  explicit OnDevice(int ordinal);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

enum class Place { kHost, kUncachedDevice, kSignal };

// Memory for words: host memory that the GPU reaches, uncached device memory, or 8 bytes a stream can wait for. Zeroed.
class Words {
 public:
  Words(int ordinal, uint64_t nbytes, Place place);
  ~Words();
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(memory_); }
  uint64_t* word(uint64_t index) const { return static_cast<uint64_t*>(memory_) + index; }
  const uint64_t nbytes;

 private:
  const int ordinal_;
  const Place place_;
  void* memory_ = nullptr;
};

class Device {
 public:
  explicit Device(int ordinal);  // peers that can be reached may be accessed from now on

  const int ordinal;
  std::string bus_id;  // domain:bus:device.function
  AddressSpace space;  // the windows that packets may touch

  void write(uint64_t to, const void* from, uint64_t nbytes) const;  // into device memory, done on return
  bool is_idle(uint64_t stream) const;
  bool is_capturing(uint64_t stream) const;
  void write_value(uint64_t stream, uint64_t where, uint64_t value) const;  // in the order of the stream
  void wait_value(uint64_t stream, uint64_t where, uint64_t at_least) const;
  void synchronize(uint64_t stream) const;
};

}  // namespace mori::rocm
