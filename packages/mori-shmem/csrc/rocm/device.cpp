#include "rocm/device.h"

#include <cstring>
#include <mutex>
#include <set>

namespace mori::rocm {

namespace {

constexpr int kHostToDevice = 1;
constexpr unsigned kAtLeast = 0;

void* as_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Once for each device of the process; what somebody else has allowed already is fine.
void allow_peers(int ordinal) {
  static std::mutex mutex;
  static std::set<int> done;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!done.insert(ordinal).second) return;
  for (int peer = 0; peer < device_count(); ++peer) {
    int can = 0;
    if (peer == ordinal || hip().hipDeviceCanAccessPeer(&can, ordinal, peer) != kHipSuccess || !can) continue;
    const int code = hip().hipDeviceEnablePeerAccess(peer, 0);
    if (code == kHipPeerAlreadyEnabled) hip().hipGetLastError();  // torch would report it as its own, later
    else check_hip(code, "hipDeviceEnablePeerAccess");
  }
}

}  // namespace

int device_count() {
  int count = 0;
  check_hip(hip().hipGetDeviceCount(&count), "hipGetDeviceCount");
  return count;
}

OnDevice::OnDevice(int ordinal) {
  check_hip(hip().hipGetDevice(&before_), "hipGetDevice");
  if (before_ != ordinal) check_hip(hip().hipSetDevice(ordinal), "hipSetDevice");
}

OnDevice::~OnDevice() { hip().hipSetDevice(before_); }

Words::Words(int ordinal, uint64_t nbytes_, Place place) : nbytes(nbytes_), ordinal_(ordinal), place_(place) {
  const OnDevice on(ordinal);
  if (place == Place::kHost) {
    check_hip(hip().hipHostMalloc(&memory_, nbytes, 0), "hipHostMalloc");
    std::memset(memory_, 0, nbytes);
    return;
  }
  const unsigned flags = place == Place::kSignal ? kSignalMemory : kDeviceUncached;
  check_hip(hip().hipExtMallocWithFlags(&memory_, nbytes, flags), "hipExtMallocWithFlags");
  const std::vector<char> zeros(nbytes);
  check_hip(hip().hipMemcpy(memory_, zeros.data(), nbytes, kHostToDevice), "hipMemcpy");
}

Words::~Words() {
  const OnDevice on(ordinal_);
  if (place_ == Place::kHost) hip().hipHostFree(memory_);
  else hip().hipFree(memory_);
}

Device::Device(int ordinal_) : ordinal(ordinal_) {
  const OnDevice on(ordinal);
  char text[64] = {};
  check_hip(hip().hipDeviceGetPCIBusId(text, sizeof text, ordinal), "hipDeviceGetPCIBusId");
  bus_id = text;
  allow_peers(ordinal);
}

void Device::write(uint64_t to, const void* from, uint64_t nbytes) const {
  const OnDevice on(ordinal);
  check_hip(hip().hipMemcpy(as_pointer(to), from, nbytes, kHostToDevice), "hipMemcpy");
}

bool Device::is_idle(uint64_t stream) const {
  const OnDevice on(ordinal);
  const int code = hip().hipStreamQuery(as_pointer(stream));
  if (code == kHipNotReady) {
    hip().hipGetLastError();
    return false;
  }
  check_hip(code, "hipStreamQuery");
  return true;
}

bool Device::is_capturing(uint64_t stream) const {
  const OnDevice on(ordinal);
  int status = 0;
  check_hip(hip().hipStreamIsCapturing(as_pointer(stream), &status), "hipStreamIsCapturing");
  return status != 0;
}

void Device::write_value(uint64_t stream, uint64_t where, uint64_t value) const {
  const OnDevice on(ordinal);
  check_hip(hip().hipStreamWriteValue64(as_pointer(stream), as_pointer(where), value, 0), "hipStreamWriteValue64");
}

void Device::wait_value(uint64_t stream, uint64_t where, uint64_t at_least) const {
  const OnDevice on(ordinal);
  check_hip(hip().hipStreamWaitValue64(as_pointer(stream), as_pointer(where), at_least, kAtLeast, UINT64_MAX),
            "hipStreamWaitValue64");
}

void Device::synchronize(uint64_t stream) const {
  const OnDevice on(ordinal);
  check_hip(hip().hipStreamSynchronize(as_pointer(stream)), "hipStreamSynchronize");
}

}  // namespace mori::rocm
