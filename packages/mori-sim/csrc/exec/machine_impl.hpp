// What a Machine holds, and which file does what with it:
//   placing.cpp      workgroups onto CUs, and the registers their waves start with
//   turns.cpp        who runs next, and for how long
//   machine.cpp      the public calls
//   machine_text.cpp faults, stalls and counters as text
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "coherence/checker.hpp"
#include "exec/wave.hpp"

namespace mori_sim {

constexpr unsigned kSimds = 4, kSimdRows = 512, kCuLds = 160 * 1024;

struct Machine::Impl {
  using Clock = std::chrono::steady_clock;
  struct Cu {
    unsigned lds = 0, waves = 0;
    unsigned rows = 0;  // over the four SIMDs
  };
  struct Device {
    std::vector<Cu> cus;
  };

  Memory& memory;
  Options options;
  ExecContext ctx;
  std::unique_ptr<Checker> checker;
  std::map<int, Device> devices;
  std::deque<std::unique_ptr<KernelRun>> kernels;
  std::vector<std::unique_ptr<Workgroup>> groups;
  std::vector<Wave*> waves;  // those that have not ended
  std::vector<Wave*> free_waves;
  std::vector<std::unique_ptr<Wave>> all_waves;
  std::vector<std::shared_ptr<Code>> codes;
  std::map<std::string, Counters> counters;
  std::mt19937_64 random;
  std::string fault_text;
  DispatchId next_id = 1;
  uint64_t next_uid = 1, seen_progress = 0, turn = 0, round = 0;
  Clock::time_point moved = Clock::now();

  Impl(Memory& m, const Options& o);
  ~Impl();

  // ---------------------------------------------------------------- placing.cpp
  Device& device(int id);
  unsigned xcd_of(uint64_t workgroup) const;
  bool place(KernelRun& k);  // the next workgroup, if its XCD has room
  Wave* take_wave();
  void start_workgroup(KernelRun& k, unsigned xcd, unsigned cu);
  void start_wave(Wave& w, Workgroup& g, unsigned index);
  void end_workgroup(Workgroup& g);
  void fill();  // places what has room, forgets kernels that have ended

  // ---------------------------------------------------------------- turns.cpp
  State run(uint64_t budget);
  Wave* pick(unsigned* slice);
  template <bool strict>
  unsigned turn_of(Wave& w, unsigned slice);
  void after_turn(Wave& w);
  const Code* code_at(uint64_t pc) const;

  // ---------------------------------------------------------------- machine_text.cpp
  void fail(Wave& w, uint64_t pc);
};

}  // namespace mori_sim
