// The executor's units, each in its own file. bind() asks them by mnemonic; null means: not implemented.
#pragma once

#include "exec/lane_table.hpp"
#include "exec/wave.hpp"

namespace mori_sim {

RunFn scalar_unit(const char* name);               // scalar.cpp
RunFn scalar_memory_unit(const Op& op);            // smem.cpp
RunFn vector_unit(Op* op);                         // valu.cpp; also sets op->impl
RunFn cross_lane_unit(const char* name);           // cross_lane.cpp
RunFn matrix_unit(Op* op);                         // matrix.cpp
RunFn vector_memory_unit(Op* op);                  // vmem.cpp: MUBUF, FLAT, GLOBAL, SCRATCH
RunFn lds_unit(Op* op);                            // lds.cpp

// Rows of source k: the register itself, or a copy in the context with scalars splatted and modifiers applied.
const uint32_t* source_rows(Wave& w, const Op& op, int k);
// Writes `rows` result rows to the destination where exec allows it.
void write_rows(Wave& w, unsigned dst, const uint32_t* rows, unsigned n, uint64_t mask);

}  // namespace mori_sim
