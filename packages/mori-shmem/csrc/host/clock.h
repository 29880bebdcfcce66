// One clock for everything: CLOCK_MONOTONIC in ns, the same in all processes of a machine.
#pragma once
#include <cstdint>
#include <ctime>

namespace mori {

inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

inline void sleep_ns(int64_t ns) {
  timespec length{ns / 1000000000, ns % 1000000000};
  nanosleep(&length, nullptr);
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace mori
