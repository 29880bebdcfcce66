// Strings and seconds of Python into the core's enums and nanoseconds; what is not known is bad_value.
#include <cmath>

#include "python/bindings.h"

namespace mori::python {

uint32_t comparison(const std::string& name) {
  static const char* const names[] = {"<", "<=", "==", "!=", ">=", ">"};
  for (uint32_t i = 0; i < 6; ++i)
    if (name == names[i]) return MORI_SDMA_LESS + i;
  throw bad_value("cmp", name, "<, <=, ==, !=, >=, >");
}

SignalOp signal_op(const std::string& name) {
  if (name == "set") return SignalOp::kSet;
  if (name == "add") return SignalOp::kAdd;
  throw bad_value("op", name, "set, add");
}

int64_t timeout_ns(double seconds) {
  if (std::isnan(seconds) || seconds < 0) throw bad_value("timeout_s", seconds, "0 or more seconds");
  return seconds > 1e9 ? INT64_MAX : static_cast<int64_t>(seconds * 1e9);
}

int64_t timeout_ns(Node& node, const std::optional<double>& seconds) {
  return seconds ? timeout_ns(*seconds) : node.timeout_ns.load();
}

}  // namespace mori::python
