// The lane set every processor can run.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "exec/lane_table.hpp"
#include "exec/machine.hpp"
#include "isa/decode.hpp"

namespace mori_sim {
namespace lanes_base {
namespace {
#include "exec/lanes.inc"
#include "exec/matrix.inc"
}  // namespace
const LaneImpl* table(size_t* n) { *n = table_size(); return table_begin(); }
MatrixFn matrix() { return matrix_multiply; }
}  // namespace lanes_base
}  // namespace mori_sim
