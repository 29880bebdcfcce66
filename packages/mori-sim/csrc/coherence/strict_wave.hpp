// What strict mode knows of one wave: which stores of others it may rely on, and what it still has to wait for.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "coherence/clock.hpp"
#include "coherence/hazards.hpp"
#include "coherence/lds_order.hpp"

namespace mori_sim::strict {

struct Pending {  // something vmcnt or lgkmcnt counts
  enum Kind : uint8_t { load, store, wbl2, lds_dma, ds, smem } kind = load;
  uint64_t pc = 0;
  const std::vector<RegisterRange>* writes = nullptr;
  uint32_t clock = 0;
  uint32_t lds_number = 0;            // of a ds access or a DMA, as LdsOrder counts
  std::unique_ptr<LdsAccess> lds_read;
  std::vector<ClockPtr> acquires;
};

struct StrictWave {
  uint32_t actor = 0;
  Clock known;                    // of others; the own part is `now` / `complete`
  Clock agent_fresh, system_fresh;  // what was known when L1/L2 were last emptied (buffer_inv, kernel start)
  uint32_t now = 0, complete = 0;
  std::deque<Pending> vm, lgkm;
  uint64_t busy[12] = {};         // registers with an outstanding write, operand numbering
  bool any_busy = false;
  LdsOrder* lds = nullptr;        // of the workgroup
  unsigned index = 0;
  // stores of sibling waves that were issued before the last barrier (complete or not)
  std::map<uint32_t, uint32_t> issued;
};

}  // namespace mori_sim::strict
