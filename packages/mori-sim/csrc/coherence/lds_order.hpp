// Who wrote and who read each dword of a workgroup's LDS, and what orders them.
//
// Two waves are ordered by s_barrier, once the one before it has waited for its own accesses (lgkmcnt for ds
// instructions, vmcnt for DMA), and by LDS atomics of a few lanes that return a value. Each wave numbers its ds accesses and its DMAs;
// `known` says up to which number of each other wave's its owner may rely on. Reads are kept by barrier interval.
//
// Both halves of a race are seen whichever comes first: a read meets the unordered write before it, a write meets the
// unordered reads and writes before it. So a missing barrier is reported in every schedule.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace mori_sim {

constexpr unsigned kGroupWaves = 16;  // the most waves of a workgroup

enum class LdsUse : uint8_t { read, write, atomic, atomic_return, dma };

struct LdsAccess {           // one instruction of one wave
  LdsUse use = LdsUse::read;
  uint32_t at[2 * 64];       // byte offsets, one for each active lane (two with ds_read2 and its like)
  unsigned count = 0, nbytes = 4;
  uint64_t pc = 0;
};

struct LdsClock {  // index: 2 * wave, and one more for the DMAs of that wave
  std::array<uint32_t, 2 * kGroupWaves> known{};
  uint16_t synced = 0;  // waves whose reads of this interval are over, by atomics
  void join(const LdsClock& o) {
    for (size_t i = 0; i < known.size(); ++i) known[i] = known[i] < o.known[i] ? o.known[i] : known[i];
    synced |= o.synced;
  }
};

struct LdsWave {
  unsigned index = 0;
  uint32_t ds_now = 0, ds_complete = 0, dma_now = 0, dma_complete = 0;
  LdsClock clock;  // of the others
  bool ended = false;
};

struct LdsConflict {
  const char* rule = nullptr;
  uint32_t offset = 0;
  uint64_t other_pc = 0;
  std::string why;
};

class LdsOrder {
 public:
  explicit LdsOrder(size_t nbytes) : nbytes_(nbytes) {}
  LdsWave& wave(unsigned index) {
    LdsWave& w = waves_[index % kGroupWaves];
    w.index = index % kGroupWaves;
    if (index >= num_waves_) num_waves_ = index + 1;
    return w;
  }
  // Numbers the access and notes it; false and *found when something unordered was met.
  bool access(LdsWave& w, const LdsAccess& a, LdsConflict* found);
  // `read` has been issued before a barrier, but its wave has not waited for it.
  void leave_open(const LdsWave& w, uint32_t number, const LdsAccess& read);
  void barrier();

 private:
  struct Cell {
    uint32_t written, write_pc;     // number (0: never); pc less base_
    uint32_t interval, read_pc;     // of the last reads
    uint16_t readers;               // waves that read in that interval
    uint8_t who;                    // index into LdsClock::known
    bool atomic;
  };
  struct Free { void operator()(Cell* c) const { std::free(c); } };
  struct OpenRead {
    unsigned wave;
    uint32_t number;
    LdsAccess access;
  };
  void make_cells(unsigned shift);
  bool met_write(const LdsWave& w, const LdsAccess& a, const Cell& c, uint32_t at, LdsConflict* found) const;
  bool met_reads(const LdsWave& w, const LdsAccess& a, const Cell& c, uint32_t at, LdsConflict* found) const;
  bool met_open_read(const LdsWave& w, const LdsAccess& a, LdsConflict* found) const;
  void hand_over(LdsWave& w, const LdsAccess& a, uint32_t cell);

  size_t nbytes_;
  unsigned shift_ = 2;  // a cell holds 4 bytes, or 1 once anything narrower was seen
  uint32_t interval_ = 1;
  uint64_t base_ = 0;
  unsigned num_waves_ = 0;
  std::unique_ptr<Cell[], Free> cells_;  // zeroed by the system, page by page as they are touched
  std::array<LdsWave, kGroupWaves> waves_{};
  std::array<uint32_t, 2 * kGroupWaves> issued_{};  // before the last barrier
  std::unordered_map<uint32_t, LdsClock> released_;  // by atomics, in this interval
  std::vector<OpenRead> open_;
};

}  // namespace mori_sim
