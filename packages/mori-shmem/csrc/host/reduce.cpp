#include "host/reduce.h"

#include <algorithm>
#include <cstring>

// One copy of the loops for each vector width, chosen when the library is loaded. Sanitizers cannot run the choosing code
// (it runs before they are set up), and other machines need no choice.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define MORI_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MORI_VECTOR_CLONES
#endif

namespace mori {

namespace {

constexpr uint64_t kBlock = 1024;  // fp32 partial sums of a block stay in the first-level cache

inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

MORI_VECTOR_CLONES void start(float* __restrict sums, const uint16_t* __restrict source, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) sums[i] = widen(source[i]);
}

MORI_VECTOR_CLONES void add(float* __restrict sums, const uint16_t* __restrict source, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) sums[i] += widen(source[i]);
}

MORI_VECTOR_CLONES void finish(uint16_t* __restrict out, const float* __restrict sums, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) out[i] = narrow(sums[i]);
}

}  // namespace

void sum_bf16(uint16_t* out, const std::vector<const uint16_t*>& sources, uint64_t num_elements) {
  alignas(64) float sums[kBlock];
  for (uint64_t begin = 0; begin < num_elements; begin += kBlock) {
    const uint64_t count = std::min(kBlock, num_elements - begin);
    start(sums, sources[0] + begin, count);
    for (size_t i = 1; i < sources.size(); ++i) add(sums, sources[i] + begin, count);
    finish(out + begin, sums, count);
  }
}

}  // namespace mori
