// Which registers an instruction reads and writes, for the missing-wait check.
#pragma once

#include <vector>

#include "isa/decode.hpp"

namespace mori_sim {

struct RegisterRange {
  uint16_t first;  // operand numbering of isa/decode.hpp: below 128 scalar, from 256 vector
  uint16_t count;
};
struct RegisterUse {
  std::vector<RegisterRange> reads, writes;
};
RegisterUse registers_of(const Op& op);

}  // namespace mori_sim
