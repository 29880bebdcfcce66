// Arithmetic on the host that ops need at memory speed.
#pragma once
#include <cstdint>
#include <vector>

namespace mori {

// out[i] = bf16((s0[i] + s1[i]) + s2[i] ...): fp32 sums in the order given, one rounding to nearest even at the end. A NaN
// comes out as 0x7fc0, as torch rounds it. `out` may be one of the sources; partly overlapping ranges are not allowed.
void sum_bf16(uint16_t* out, const std::vector<const uint16_t*>& sources, uint64_t num_elements);

}  // namespace mori
