#include "host/faults.h"

#include <algorithm>
#include <utility>

#include "host/clock.h"

namespace mori {

namespace {

constexpr int64_t kReorderUs = 20'000;  // long enough on a busy machine for the reader of the signal to look at the data

void pause_us(int64_t us, const std::atomic<bool>& closing) {
  const int64_t end_ns = monotonic_ns() + us * 1000;
  while (!closing.load() && monotonic_ns() < end_ns) sleep_ns(std::min<int64_t>(end_ns - monotonic_ns(), 5'000'000));
}

}  // namespace

void FaultHooks::set(const Plan& plan) {
  plan_ = plan;
  num_copies_ = 0;
  active_ = plan.drop_every != 0 || plan.delay_us != 0 || plan.reorder || !held_.empty();
}

int FaultHooks::execute_held(const mori_sdma_memory& memory, mori_sdma_fault& fault) {
  const std::vector<mori_sdma_packet> late = std::move(held_);
  held_.clear();
  for (const mori_sdma_packet& copy : late)
    if (mori_sdma_execute(&copy, &memory, &fault) == MORI_SDMA_FAULT) return MORI_SDMA_FAULT;
  return MORI_SDMA_DONE;
}

int FaultHooks::execute(const mori_sdma_packet& packet, const mori_sdma_memory& memory, mori_sdma_fault& fault,
                        const std::atomic<bool>& closing) {
  if (packet.op == MORI_SDMA_COPY) {
    if (plan_.drop_every && ++num_copies_ % plan_.drop_every == 0) return MORI_SDMA_DONE;
    if (plan_.reorder) {
      held_.push_back(packet);
      return MORI_SDMA_DONE;
    }
    if (plan_.delay_us) pause_us(plan_.delay_us, closing);
  }
  const int result = mori_sdma_execute(&packet, &memory, &fault);
  const bool is_signal = packet.op == MORI_SDMA_FENCE || packet.op == MORI_SDMA_ATOMIC;
  if (result != MORI_SDMA_DONE || !is_signal || held_.empty()) return result;
  pause_us(std::max(plan_.delay_us, kReorderUs), closing);
  return execute_held(memory, fault);
}

}  // namespace mori
