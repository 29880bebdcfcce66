#include "exec/lane_table.hpp"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

namespace mori_sim {
namespace lanes_base { const LaneImpl* table(size_t* n); MatrixFn matrix(); }
#if defined(__x86_64__)
namespace lanes_v3 { const LaneImpl* table(size_t* n); MatrixFn matrix(); }
#endif

namespace {
bool use_v3() {
#if defined(__x86_64__)
  // MORI_SIM_LANES=base is for tests: both sets must give the same bits.
  const char* forced = std::getenv("MORI_SIM_LANES");
  if (forced && !std::strcmp(forced, "base")) return false;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}
const bool kV3 = use_v3();

const std::unordered_map<std::string, const LaneImpl*>& by_name() {
  static const auto map = [] {
    std::unordered_map<std::string, const LaneImpl*> m;
    size_t n = 0;
    const LaneImpl* t = nullptr;
#if defined(__x86_64__)
    t = kV3 ? lanes_v3::table(&n) : lanes_base::table(&n);
#else
    t = lanes_base::table(&n);
#endif
    for (size_t i = 0; i < n; ++i) m[t[i].name] = &t[i];
    return m;
  }();
  return map;
}
}  // namespace

const LaneImpl* lane_kernel(const char* name) {
  auto it = by_name().find(name);
  return it == by_name().end() ? nullptr : it->second;
}
MatrixFn matrix_kernel() {
#if defined(__x86_64__)
  if (kV3) return lanes_v3::matrix();
#endif
  return lanes_base::matrix();
}
const char* lane_set_name() { return kV3 ? "avx2" : "base"; }
}  // namespace mori_sim
