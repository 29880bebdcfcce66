#include "node/settings.hpp"

#include <cstdlib>
#include <stdexcept>

namespace mori_sim {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& value, const std::string& allowed) {
  throw std::invalid_argument(std::string(name) + "=" + value + ": allowed: " + allowed);
}

double number(const char* name, double missing, double least, double most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return missing;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*end != 0 || !(value >= least && value <= most))
    refuse(name, text, "a number from " + std::to_string(least) + " to " + std::to_string(most));
  return value;
}

uint64_t whole(const char* name, uint64_t missing, uint64_t least, uint64_t most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return missing;
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 0);
  if (*end != 0 || *text == '-' || value < least || value > most)
    refuse(name, text, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  return value;
}

// The index of the variable's value in `words`; `missing` when unset.
size_t choice(const char* name, size_t missing, const std::vector<std::string>& words) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return missing;
  std::string allowed;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == text) return i;
    allowed += (i ? ", " : "") + words[i];
  }
  refuse(name, text, allowed);
}

}  // namespace

Settings read_settings() {
  Settings s;
  s.num_devices = static_cast<int>(whole("MORI_SIM_DEVICES", 1, 1, 8));
  s.machine.strict = choice("MORI_SIM_COHERENCE", 0, {"off", "strict"}) == 1;
  s.machine.order = static_cast<Options::Order>(choice("MORI_SIM_SCHEDULE", 0, {"rr", "random", "delay-rank"}));
  s.machine.seed = whole("MORI_SIM_SEED", 0, 0, UINT64_MAX);
  s.machine.xcd_seed = whole("MORI_SIM_XCD_SEED", 0, 0, UINT64_MAX);
  s.machine.delayed_rank = static_cast<int>(whole("MORI_SIM_DELAY_RANK", 0, 0, 1023));
  s.machine.slice = static_cast<unsigned>(whole("MORI_SIM_SLICE", s.machine.slice, 1, 1u << 24));
  s.machine.max_reports = static_cast<unsigned>(whole("MORI_SIM_MAX_REPORTS", s.machine.max_reports, 1, 1u << 20));
  s.machine.mfma_order = static_cast<Options::MfmaOrder>(choice("MORI_SIM_MFMA_ORDER", 0, {"exact", "sequential", "blocked"}));
  s.machine.end_of_kernel_publishes = choice("MORI_SIM_KERNEL_END", 0, {"system", "agent"}) == 0;
  s.machine.fp8_saturates = choice("MORI_SIM_FP8_SATURATES", 0, {"0", "1"}) == 1;
  if (const char* file = std::getenv("MORI_SIM_REPORT")) s.report_file = file;
  if (const char* folder = std::getenv("MORI_SIM_SAVE_CODE")) s.save_code = folder;
  s.abort_on_fault = choice("MORI_SIM_ON_FAULT", 0, {"abort", "error"}) == 0;
  s.watchdog_s = number("MORI_SIM_WATCHDOG_S", s.watchdog_s, 0.1, 1e6);
  s.lend_host_memory = choice("MORI_SIM_HOST_MEMORY", 0, {"lend", "refuse"}) == 0;
  s.rank = static_cast<int>(whole("RANK", static_cast<uint64_t>(-1), 0, 1 << 20));
  s.poison = choice("MORI_SIM_POISON", s.machine.strict, {"0", "1"}) == 1;
  s.copy_delay_us = number("MORI_SIM_COPY_DELAY_US", 0, 0, 1e6);
  s.record_delay_us = number("MORI_SIM_RECORD_DELAY_US", 0, 0, 1e6);
  s.lazy_copies = choice("MORI_SIM_LAZY_COPIES", s.machine.strict, {"0", "1"}) == 1;
  s.short_copies = choice("MORI_SIM_SHORT_COPIES", 0, {"0", "1"}) == 1;
  s.queues_per_engine = static_cast<int>(whole("MORI_SIM_QUEUES_PER_ENGINE", 8, 1, 64));
  s.missing_engines = static_cast<uint32_t>(whole("MORI_SIM_MISSING_ENGINES", 0, 0, 0xffff));
  return s;
}

}  // namespace mori_sim
