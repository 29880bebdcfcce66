#include "host/reduce.h"

#include <algorithm>

#include "host/clones.h"
#include "host/codes.h"

namespace mori {

namespace {

constexpr uint64_t kBlock = 1024;  // fp32 partial sums of a block stay in the first-level cache

MORI_VECTOR_CLONES void start(float* __restrict sums, const uint16_t* __restrict source, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) sums[i] = codes::bf16_value(source[i]);
}

MORI_VECTOR_CLONES void add(float* __restrict sums, const uint16_t* __restrict source, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) sums[i] += codes::bf16_value(source[i]);
}

MORI_VECTOR_CLONES void finish(uint16_t* __restrict out, const float* __restrict sums, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) out[i] = codes::bf16_code(sums[i]);
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
