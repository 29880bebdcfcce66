// State of one wave, its workgroup and its kernel while in flight, and the small accessors every unit uses.
//
// Registers lie as rows of 64 lanes: row(code) is where operand `code` (isa/decode.hpp) starts, and an operand of
// 64 bits or more is simply the rows that follow. VGPRs take rows 0..255, AGPRs rows 256..511.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "exec/machine.hpp"
#include "isa/decode.hpp"

namespace mori_sim {

constexpr unsigned kLanes = 64, kRows = 512 + 64;  // wide operands at the last register stay inside
constexpr uint64_t kSharedBase = 0x1000000000000ull, kPrivateBase = 0x2000000000000ull;  // flat apertures

struct Checker;  // coherence/checker.hpp

struct ExecContext {  // what all waves of a machine share
  Memory* memory = nullptr;
  const Options* options = nullptr;
  Checker* checker = nullptr;  // null unless strict
  uint64_t ticks = 0;          // wave instructions so far
  uint64_t progress = 0;       // grows with everything that counts as moving, for the watchdog
  alignas(64) uint32_t fetch[3][2 * kLanes];     // splatted or modified sources
  alignas(64) uint32_t out[32 * kLanes];         // results before masking
};

struct KernelRun {
  DispatchId id = 0;
  Dispatch d;
  Counters* counters = nullptr;
  uint64_t next_workgroup = 0, total = 0, running = 0;
  unsigned rows_per_wave = 0, waves_per_group = 0;
  uint64_t pc_bias = 0;
};

struct Wave;

struct Workgroup {
  KernelRun* kernel = nullptr;
  uint32_t id[3] = {0, 0, 0};
  unsigned xcd = 0, cu = 0;  // cu counts over the whole device
  std::vector<uint8_t> lds;
  std::vector<Wave*> waves;
  unsigned alive = 0, arrived = 0;
  uint64_t barriers = 0;
};

enum class WaveStatus : uint8_t { runs, barrier, ended, faulted };

struct RegionCache {
  Region region;
  uint64_t generation = ~0ull;
};

struct Wave {
  alignas(64) uint32_t s[128];
  alignas(64) uint32_t lane_mask[kLanes];  // ~0 for active lanes; follows exec through `mask_of`
  uint64_t mask_of = 0;
  uint32_t* rows = nullptr;
  uint64_t pc = 0;
  const Code* code = nullptr;
  ExecContext* ctx = nullptr;
  Workgroup* group = nullptr;
  Counters* counters = nullptr;
  bool scc = false, yield = false, indexes_vgprs = false;
  WaveStatus status = WaveStatus::runs;
  uint32_t mode = 0;          // as in HW_REG_MODE: round [3:0], denormals [7:4], dx10_clamp 8, ieee 9
  unsigned index = 0;         // in the workgroup
  uint64_t uid = 0;           // unique in the machine
  RegionCache cache[2];
  std::vector<uint8_t> scratch;  // lane after lane
  std::string fault;
  uint64_t polled_addr = 0, polled_value = 0, polls = 0, poll_pc = 0;
  uint64_t sleep_until = 0;
  void* strict = nullptr;     // the checker's state of this wave

  uint64_t exec() const {
    uint64_t e;
    std::memcpy(&e, &s[kExec], 8);
    return e;
  }
  void set_exec(uint64_t e) { std::memcpy(&s[kExec], &e, 8); }
  uint64_t vcc() const {
    uint64_t e;
    std::memcpy(&e, &s[kVcc], 8);
    return e;
  }
  uint32_t* row(unsigned code) { return rows + (code - kVgpr) * kLanes; }
  const uint32_t* mask() {
    uint64_t e = exec();
    if (e != mask_of) {
      for (unsigned i = 0; i < kLanes; ++i) lane_mask[i] = 0u - static_cast<uint32_t>(e >> i & 1);
      mask_of = e;
    }
    return lane_mask;
  }
  void stop(const std::string& why) {
    if (status == WaveStatus::faulted) return;
    fault = why;
    status = WaveStatus::faulted;
    yield = true;
  }
};

// Value of a scalar operand or constant. `type` decides what an inline float means (isa/decode.hpp OperandInfo).
uint32_t constant32(const Op& op, unsigned code, char type);
uint64_t constant64(const Op& op, unsigned code, char type);

inline uint32_t special32(const Wave& w, const Op& op, unsigned code, char type) {
  switch (code) {
    case 235: return static_cast<uint32_t>(kSharedBase >> 32);
    case 237: return static_cast<uint32_t>(kPrivateBase >> 32);
    case 236: case 238: return ~0u;
    case 251: return w.vcc() == 0;
    case 252: return w.exec() == 0;
    case 253: return w.scc;
    default: return constant32(op, code, type);
  }
}

inline uint32_t read32(const Wave& w, const Op& op, unsigned code, char type = 'i') {
  return code < 128 ? w.s[code] : special32(w, op, code, type);
}
inline uint64_t read64(const Wave& w, const Op& op, unsigned code, char type = 'i') {
  if (code < 127) return w.s[code] | static_cast<uint64_t>(w.s[code + 1]) << 32;
  if (code == 235) return kSharedBase;
  if (code == 237) return kPrivateBase;
  if (code >= 251 && code <= 253) return special32(w, op, code, type);
  return constant64(op, code, type);
}
inline void write32(Wave& w, unsigned code, uint32_t v) {
  if (code < 128) w.s[code] = v;
}
inline void write64(Wave& w, unsigned code, uint64_t v) {
  if (code < 127) std::memcpy(&w.s[code], &v, 8);
}

// Host bytes behind [addr, addr + nbytes) as seen from the wave's device; null (and the wave stopped) when not mapped.
uint8_t* resolve(Wave& w, uint64_t addr, uint64_t nbytes, bool write, const Region** region = nullptr);

}  // namespace mori_sim
