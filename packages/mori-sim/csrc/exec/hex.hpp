// A number as reports show it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace mori_sim {

inline std::string hex(uint64_t v) {
  char b[32];
  std::snprintf(b, sizeof b, "0x%llx", static_cast<unsigned long long>(v));
  return b;
}

}  // namespace mori_sim
