// Strict mode's door into the executor. Machine owns one Checker when Options::strict; without it nothing is called.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coherence/lds_order.hpp"
#include "exec/wave.hpp"

namespace mori_sim {

struct VectorAccess {  // one vector memory instruction, before it is carried out
  const uint64_t* addr;      // per lane
  uint64_t lanes;            // who takes part
  unsigned nbytes;           // per lane
  const Region* region;      // of the first active lane
  bool load = false, store = false, atomic = false;
  bool to_lds = false;
  unsigned lds_offset = 0, lds_slot = 0;  // DMA: where the data of lane 0 lands, bytes from lane to lane
  const uint32_t* data = nullptr;         // store: the first of its registers
};

// What an engine may fetch at any time; it must be right, but nobody has to wait until it was read.
constexpr const char* kPossibleFetch = "ring, which it may fetch whenever it looks at the write pointer";

// The packet that reads and writes a word in one step, at memory.
constexpr const char* kAtomicPacket = "ATOMIC";

struct Checker {
  virtual ~Checker() = default;
  virtual void wave_starts(Wave& w) = 0;
  virtual void wave_ends(Wave& w) = 0;
  virtual void kernel_starts(KernelRun& k) = 0;
  virtual void kernel_ends(KernelRun& k) = 0;
  virtual void before(Wave& w, const Op& op) = 0;          // register hazards, waits
  virtual void vector_access(Wave& w, const Op& op, const VectorAccess& a) = 0;
  virtual void vector_done(Wave& w, const Op& op, const VectorAccess& a, const uint32_t* loaded) = 0;  // values known
  virtual void scalar_access(Wave& w, const Op& op, uint64_t addr, unsigned nbytes) = 0;
  virtual void lds_access(Wave& w, const Op& op, LdsUse use, unsigned nbytes) = 0;  // of the offsets noted in `lds`
  virtual void barrier_released(Workgroup& g) = 0;
  virtual void engine_pointer(uint64_t addr) = 0;  // a doorbell or write pointer
  // An engine saw this value in a doorbell or write pointer; if no wave stored it, the host did. A poll was met by a word.
  virtual void agent_observed(const std::string& agent, int device, uint64_t addr, uint64_t value) = 0;
  virtual void agent_polled(const std::string& agent, int device, uint64_t addr, uint64_t nbytes) = 0;
  virtual void agent_reads(const std::string& agent, int device, uint64_t addr, uint64_t nbytes, const std::string& what) = 0;
  virtual void agent_writes(const std::string& agent, int device, uint64_t addr, uint64_t nbytes, const std::string& what) = 0;
  virtual void agent_joined(const std::string& agent, DispatchId finished) = 0;
  virtual void memory_released(uint64_t addr, uint64_t nbytes) = 0;

  void note_lds(uint64_t offset) { lds.at[lds.count++] = static_cast<uint32_t>(offset); }

  LdsAccess lds;  // of the instruction that is being carried out
  std::vector<Report> reports;
};

std::unique_ptr<Checker> make_checker(ExecContext& ctx);

}  // namespace mori_sim
