// The lane set for x86-64 processors with AVX2 and FMA.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "exec/lane_table.hpp"
#include "exec/machine.hpp"
#include "isa/decode.hpp"

#if defined(__x86_64__)
// After the headers: nothing that other files share may be compiled with these.
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,popcnt,lzcnt")

namespace mori_sim {
namespace lanes_v3 {
namespace {
#include "exec/lanes.inc"
#include "exec/matrix.inc"
}  // namespace
const LaneImpl* table(size_t* n) { *n = table_size(); return table_begin(); }
MatrixFn matrix() { return matrix_multiply; }
}  // namespace lanes_v3
}  // namespace mori_sim
#endif
