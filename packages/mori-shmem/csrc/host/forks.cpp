#include "host/forks.h"

#include <pthread.h>

#include <atomic>

namespace mori {

namespace {
std::atomic<uint64_t> generation{0};
}

uint64_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace mori
