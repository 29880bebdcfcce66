// Moving bytes between ranges that do not overlap.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#include <emmintrin.h>
#define MORI_STREAMING_STORES 1
#endif

namespace mori_sdma {

// From here on the destination does not stay in the cache anyway, and streaming stores save reading it first. Measured
// against memcpy (2-core virtual machine, EPYC with 32 MiB of L3): 1.4 times as fast for 64 MiB; for 16 MiB 1.4 times as
// fast when the data is not cached, half as fast when it is.
constexpr uint64_t kStreamBytes = 32 << 20;

#ifdef MORI_STREAMING_STORES
inline void stream(char* to, const char* from, uint64_t nbytes) {
  const uint64_t head = -reinterpret_cast<uintptr_t>(to) & 63;
  std::memcpy(to, from, head);
  uint64_t done = head;
  for (; done + 64 <= nbytes; done += 64) {
    _mm_prefetch(from + done + 512, _MM_HINT_NTA);  // a hint: it may point past the end
    const auto* in = reinterpret_cast<const __m128i*>(from + done);
    auto* out = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to + done, from + done, nbytes - done);
  _mm_sfence();  // streaming stores are not ordered by a later release store alone
}
#endif

inline void copy(void* to, const void* from, uint64_t nbytes) {
#ifdef MORI_STREAMING_STORES
  if (nbytes >= kStreamBytes) return stream(static_cast<char*>(to), static_cast<const char*>(from), nbytes);
#endif
  std::memcpy(to, from, nbytes);
}

}  // namespace mori_sdma
