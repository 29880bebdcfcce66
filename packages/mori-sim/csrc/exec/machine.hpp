// The executor's outside: what a node (memory, copy engines, HIP stub) needs to run gfx950 code objects.
//
//   Memory    (implemented by the node)  device address -> host bytes, with bounds and a kind
//   Code      a loaded text segment; each instruction is decoded once, when first reached
//   Dispatch  one kernel launch: code, entry, descriptor words, kernarg, grid, block, LDS
//   Machine   holds all dispatches in flight and advances them in time slices:
//               id = machine.submit(dispatch);
//               while (!machine.done(id)) { machine.run(1 << 16); engines.poll(); }
//             so waves, workgroups, kernels and devices (ranks) that wait for each other all make progress.
//
// A Machine is not thread safe: one thread (or one lock) drives it. Everything that goes wrong in a kernel is a
// sticky Fault: no wave runs any more, run() keeps answering State::fault, and fault() has the text.
// Device addresses are host virtual addresses in practice, but the executor never assumes it: it only touches what
// Memory::resolve hands out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mori_sim {

// ---------------------------------------------------------------------------------------------- memory
enum class MemoryKind : uint8_t {
  local,     // memory of the device that runs the wave: cached in its L1 and L2 (RW)
  peer,      // another device's memory (NC): may sit dirty or stale in any own L2
  host,      // system memory: uncached
  uncached,  // device memory allocated uncached, own or a peer's
};

struct Region {           // a contiguous, mapped range
  uint64_t begin = 0;     // device address of the first byte
  uint64_t end = 0;       // one past the last byte
  uint8_t* host = nullptr;// where `begin` lies in this process
  MemoryKind kind = MemoryKind::local;
  int home_device = 0;    // who owns the memory; -1 host
  bool writable = true;
  bool shared = false;    // other processes map it too and may write it unseen (strict mode)
  uint64_t shift = 0;     // to the address by which checkers know these bytes, where it is another one
};

class Memory {
 public:
  virtual ~Memory() = default;
  // The mapped range that holds `addr`, seen from `device`. False when nothing is mapped there.
  // The answer may be cached until generation() changes.
  virtual bool resolve(int device, uint64_t addr, Region* out) = 0;
  virtual uint64_t generation() const = 0;  // changes with each map/unmap/free
  virtual bool aliased() const { return false; }  // whether some memory is mapped at more than one address
  // One address for the same bytes in all mappings; *nbytes becomes how many of them follow each other there.
  virtual uint64_t known_as(uint64_t addr, uint64_t* nbytes) const { (void)nbytes; return addr; }
};

// ---------------------------------------------------------------------------------------------- code
struct Op;  // one decoded instruction, isa/decode.hpp

class Code {
 public:
  // `bytes` are copied. `base` is the device address of bytes[0] (what s_getpc_b64 shows).
  // `symbols` (address, name) and `lines` (address, "file:line") may be empty; they only serve reports.
  Code(uint64_t base, const void* bytes, size_t nbytes);
  ~Code();
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  uint64_t base() const { return base_; }
  size_t nbytes() const { return nbytes_; }
  bool holds(uint64_t pc) const { return pc - base_ < nbytes_; }

  // Text of the instruction at pc and its size in bytes; "not an instruction: <dwords>" and 4 when unknown.
  std::string text(uint64_t pc, unsigned* nbytes = nullptr) const;
  // Class of the instruction at pc for mixes and counters: "valu", "salu", "mfma", "vmem", "smem", "lds", "flat",
  // "branch", "wait", "barrier", "other", "unknown".
  const char* category(uint64_t pc) const;
  // Why the executor would stop at pc, empty when the instruction is implemented.
  std::string unsupported(uint64_t pc) const;

  void add_symbol(uint64_t addr, std::string name);
  void add_line(uint64_t addr, std::string file_and_line);
  std::string line_of(uint64_t pc) const;  // "" when unknown

  Op* at(uint64_t pc) const;  // for the executor; null when pc is outside or not dword aligned

 private:
  uint64_t base_;
  size_t nbytes_;
  std::vector<uint32_t> words_;
  std::unique_ptr<Op[]> ops_;  // one slot per dword
  std::vector<std::pair<uint64_t, std::string>> symbols_, lines_;
  friend class Machine;
};

// ---------------------------------------------------------------------------------------------- launches
struct Dispatch {
  std::shared_ptr<Code> code;
  std::string name;            // kernel name for reports
  uint64_t entry = 0;          // device address of the first instruction
  int device = 0;              // who runs it; selects caches and MemoryKind
  int rank = 0;                // for "one rank delayed" and reports; usually == device

  uint32_t num_workgroups[3] = {1, 1, 1};
  uint32_t block[3] = {64, 1, 1};  // work items
  uint32_t lds_bytes = 0;          // static + dynamic
  uint32_t scratch_bytes = 0;      // per lane (private_segment_fixed_size); the machine allocates it

  // From the 64-byte kernel descriptor, as it stands there.
  uint32_t rsrc1 = 0, rsrc2 = 0, rsrc3 = 0;
  uint16_t properties = 0;      // kernel_code_properties
  uint16_t preload = 0;         // kernarg_preload: length [6:0], offset [15:7], in dwords

  uint64_t kernarg = 0;         // device addresses; must stay mapped until done
  uint64_t dispatch_packet = 0; // only read when the properties ask for it
  uint64_t queue = 0;
  uint64_t dispatch_id = 0;
};

struct Options {
  enum class Order { round_robin, random, rank_delayed };
  Order order = Order::round_robin;
  uint64_t seed = 0;
  int delayed_rank = 0;            // rank_delayed: this rank gets one slice in `delay_factor` rounds
  unsigned delay_factor = 64;
  unsigned slice = 2048;           // wave instructions per turn (random: 1..slice)

  unsigned num_xcds = 8, cus_per_xcd = 32;
  uint64_t xcd_seed = 0;           // 0: workgroup id mod num_xcds; else a permutation per seed
  unsigned max_waves_per_cu = 32;

  bool strict = false;             // coherence and missing-wait checks
  bool stop_at_first_report = false;  // strict: a report becomes the sticky fault at once
  bool end_of_kernel_publishes = true;  // strict: false: the end of a kernel publishes the device's own memory only (agent scope)
  unsigned max_reports = 64;

  enum class MfmaOrder { exact, sequential, blocked };  // how the k products of one output are added
  MfmaOrder mfma_order = MfmaOrder::exact;  // exact: float64, one rounding to fp32 at the end, then nothing
  unsigned mfma_block = 4;         // blocked: that many products are summed exactly, then one fp32 rounding each
  bool fp8_saturates = false;      // v_cvt_pk_{fp8,bf8}_f32 out of range: largest finite instead of NaN / Inf
  uint64_t clock_step = 1;         // s_memtime ticks per wave instruction of the machine
};

struct Report {           // strict mode: one broken rule
  std::string rule;       // "a".."e" of the publishing rules, "wait", "race-scope", ...
  std::string text;       // the whole story, both instructions, ready to print
  int device = 0;
  std::string kernel;     // of the instruction that met the problem
  uint64_t pc = 0;
  uint64_t addr = 0;
};

struct WaveState {        // watchdog data of one wave that has not ended
  std::string kernel, instruction, state;  // state: "runs", "at s_barrier", "sleeps"
  uint32_t workgroup[3];
  unsigned wave;          // in its workgroup
  int device, rank;
  uint64_t pc;
  uint64_t polled_addr;   // last address read with a coherent load or RMW; 0: none
  uint64_t polled_value;  // what lane 0 of the active lanes saw there
  uint64_t polls;         // how many times in a row the same address gave the same value
};

struct Counters {         // per kernel name, summed over dispatches
  uint64_t instructions = 0, valu = 0, salu = 0, mfma = 0, vmem = 0, smem = 0, lds = 0, flat = 0, branch = 0,
           waits = 0, barriers = 0, other = 0;
  uint64_t mfma_flops = 0;
  uint64_t lds_bytes = 0, l1_bytes = 0, local_bytes = 0, peer_bytes = 0, host_bytes = 0, uncached_bytes = 0, smem_bytes = 0;
  uint64_t workgroups = 0, waves = 0, dispatches = 0, atomics = 0;
};

// What copy engines and the host do, as the checker must see it. All are no-ops unless Options::strict.
// `agent` names the actor ("sdma 3", "host"): one ordered stream of actions each.
class Coherence;

using DispatchId = uint64_t;

class Machine {
 public:
  enum class State { idle, running, fault };

  Machine(Memory& memory, const Options& options);
  ~Machine();

  DispatchId submit(Dispatch dispatch);      // throws std::invalid_argument: more LDS/registers than a CU has, ...
  bool done(DispatchId id) const;            // ended (also true for unknown, old ids)
  State run(uint64_t max_instructions);      // at most about that many wave instructions, over all dispatches
  bool idle() const;                         // nothing in flight

  bool faulted() const;
  std::string fault() const;                 // kernel, workgroup, wave, PC, instruction text, reason
  void clear_fault();                        // drops everything in flight too

  // Watchdog: seconds since something last moved (a wave ended, a store, a barrier passed, a poll saw a new value).
  double quiet_seconds() const;
  std::vector<WaveState> stuck_waves(size_t most = 16) const;
  std::string watchdog_report() const;       // the same as text

  std::string counters_json() const;         // {"kernel": {...}}
  void reset_counters();
  uint64_t instructions() const;

  // ---- strict mode
  const std::vector<Report>& reports() const;
  void clear_reports();
  // Acquire side: `agent` has read these bytes (a doorbell, a write pointer, a signal) and acts on them.
  void engine_pointer(uint64_t addr);
  void agent_polled(const std::string& agent, int device, uint64_t addr, uint64_t nbytes);
  void agent_observed(const std::string& agent, int device, uint64_t addr, uint64_t value);
  // Data side: called before the bytes are read / after they are written.
  void agent_reads(const std::string& agent, int device, uint64_t addr, uint64_t nbytes, const std::string& what);
  void agent_writes(const std::string& agent, int device, uint64_t addr, uint64_t nbytes, const std::string& what);
  // The kernels submitted so far on `device` that are done happened before what `agent` (the host) does next.
  void agent_joined(const std::string& agent, DispatchId finished);
  // The next submits on this device happen after everything `agent` has done so far (default for agent "host").
  void memory_released(uint64_t addr, uint64_t nbytes);  // freed or unmapped: forget its history

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// What the executor does where the hardware's behaviour is not known, one line each (for `mori-sim info --unknowns`).
const std::vector<std::string>& unknown_behaviours();

}  // namespace mori_sim
