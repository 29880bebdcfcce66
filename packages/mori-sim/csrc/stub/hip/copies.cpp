// Copies and fills: queued on a stream, and waited for where HIP does.
#include "stub/hip/door.hpp"

using namespace mori_sim;

extern "C" {

int hipMemcpyAsync(void* to, const void* from, size_t nbytes, int, void* stream) {
  HIP("hipMemcpyAsync", { node().copy(node().known(stream), at(to), at(from), nbytes); });
}
int hipMemcpy(void* to, const void* from, size_t nbytes, int) {
  HIP("hipMemcpy", {
    Stream* stream = node().known(nullptr);
    node().copy(stream, at(to), at(from), nbytes);
    node().synchronize(stream);
  });
}
int hipMemcpyWithStream(void* to, const void* from, size_t nbytes, int, void* stream) {
  HIP("hipMemcpyWithStream", {
    node().copy(node().known(stream), at(to), at(from), nbytes);
    node().synchronize(node().known(stream));
  });
}
int hipMemcpyHtoD(void* to, void* from, size_t nbytes) { return hipMemcpy(to, from, nbytes, 1); }
int hipMemcpyDtoH(void* to, void* from, size_t nbytes) { return hipMemcpy(to, from, nbytes, 2); }
int hipMemcpyDtoD(void* to, void* from, size_t nbytes) { return hipMemcpy(to, from, nbytes, 3); }
int hipMemcpyHtoDAsync(void* to, void* from, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 1, stream); }
int hipMemcpyDtoHAsync(void* to, void* from, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 2, stream); }
int hipMemcpyDtoDAsync(void* to, void* from, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 3, stream); }
int hipMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, void* stream) { return hipMemcpyAsync(to, from, nbytes, 3, stream); }
int hipMemcpyPeer(void* to, int, const void* from, int, size_t nbytes) { return hipMemcpy(to, from, nbytes, 3); }
int hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int, void* stream) {
  HIP("hipMemcpy2DAsync", {
    for (size_t row = 0; row < height; ++row) node().copy(node().known(stream), at(to) + row * to_pitch, at(from) + row * from_pitch, width);
  });
}
int hipMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind) {
  const int code = hipMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
  if (code != kSuccess) return code;
  HIP("hipMemcpy2D", { node().synchronize(node().known(nullptr)); });
}
int hipMemsetAsync(void* to, int value, size_t nbytes, void* stream) {
  HIP("hipMemsetAsync", { node().fill(node().known(stream), at(to), static_cast<uint8_t>(value), 1, nbytes); });
}
int hipMemset(void* to, int value, size_t nbytes) {
  HIP("hipMemset", {
    node().fill(node().known(nullptr), at(to), static_cast<uint8_t>(value), 1, nbytes);
    node().synchronize(node().known(nullptr));
  });
}
int hipMemsetD8Async(void* to, unsigned char value, size_t count, void* stream) { return hipMemsetAsync(to, value, count, stream); }
int hipMemsetD16Async(void* to, unsigned short value, size_t count, void* stream) {
  HIP("hipMemsetD16Async", { node().fill(node().known(stream), at(to), value, 2, count); });
}
int hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  HIP("hipMemsetD32Async", { node().fill(node().known(stream), at(to), static_cast<uint32_t>(value), 4, count); });
}
int hipMemsetD32(void* to, int value, size_t count) {
  const int code = hipMemsetD32Async(to, value, count, nullptr);
  if (code != kSuccess) return code;
  HIP("hipMemsetD32", { node().synchronize(node().known(nullptr)); });
}

}  // extern "C"
