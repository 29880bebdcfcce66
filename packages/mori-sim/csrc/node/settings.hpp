// What `mori-sim run` and the user set in the environment, read once when the node starts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exec/machine.hpp"

namespace mori_sim {

struct Settings {
  int num_devices = 1;             // MORI_SIM_DEVICES
  Options machine;                 // MORI_SIM_COHERENCE, _SCHEDULE, _SEED, _SLICE, _DELAY_RANK, _MFMA_ORDER, _FP8_SATURATES
  std::string report_file;         // MORI_SIM_REPORT: one JSON object a line, appended
  std::string save_code;           // MORI_SIM_SAVE_CODE: a folder that gets a copy of every loaded code object
  bool abort_on_fault = true;      // MORI_SIM_ON_FAULT = abort | error
  double watchdog_s = 120;         // MORI_SIM_WATCHDOG_S: a kernel in which nothing moves for so long is stuck
  bool lend_host_memory = true;    // MORI_SIM_HOST_MEMORY = lend | refuse: ordinary process memory as device memory
  int rank = -1;                   // RANK, when a launcher set it
  bool poison = false;             // MORI_SIM_POISON: new device memory is filled with 0xCB; on in strict mode

  double copy_delay_us = 0;        // MORI_SIM_COPY_DELAY_US: each packet waits a random time up to this
  bool lazy_copies = false;        // MORI_SIM_LAZY_COPIES: rptr may move before data lands; on in strict mode
  double record_delay_us = 0;      // MORI_SIM_RECORD_DELAY_US: between a change of memory and its record in the checker
  bool short_copies = false;       // MORI_SIM_SHORT_COPIES: 22-bit byte counts, as older engines have
  int queues_per_engine = 8;       // MORI_SIM_QUEUES_PER_ENGINE
  uint32_t missing_engines = 0;    // MORI_SIM_MISSING_ENGINES: a mask of engines that take queues and never run

  bool delayed() const {           // is this process the rank that the schedule holds back?
    return machine.order == Options::Order::rank_delayed && rank == machine.delayed_rank;
  }
};

// Throws std::invalid_argument naming the variable, its value and what is allowed.
Settings read_settings();

}  // namespace mori_sim
