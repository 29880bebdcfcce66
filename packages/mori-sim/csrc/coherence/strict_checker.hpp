// The one Checker there is. Its parts, in the order in which an access meets them:
//   checker.cpp      the calls from the executor, the life of waves and kernels
//   outstanding.cpp  what is issued and not waited for: registers, s_waitcnt
//   history.cpp      which lines an access touches, what is remembered of them
//   loads.cpp        what a load must know of the stores that it meets
//   stores.cpp       what a store must know of the reads before it; what is remembered of it
//   publishing.cpp   buffer_wbl2, buffer_inv, and whether a store has left its L2
//   agents.cpp       copy engines and the host
//   findings.cpp     reports
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coherence/checker.hpp"
#include "coherence/clock.hpp"
#include "coherence/history.hpp"
#include "coherence/lines.hpp"
#include "coherence/strict_wave.hpp"

namespace mori_sim::strict {

struct WriteBack {  // one buffer_wbl2
  uint32_t actor;
  uint32_t clock;
  Scope scope;
  Clock covers;  // the stores known to be in L2 when it was issued
};

class StrictChecker final : public Checker {
 public:
  explicit StrictChecker(ExecContext& ctx) : ctx_(ctx) { actors_.emplace_back(); }

  void kernel_starts(KernelRun& k) override;
  void kernel_ends(KernelRun& k) override;
  void wave_starts(Wave& w) override;
  void wave_ends(Wave& w) override;
  void barrier_released(Workgroup& g) override;
  void before(Wave& w, const Op& op) override;
  void vector_access(Wave& w, const Op& op, const VectorAccess& a) override;
  void vector_done(Wave& w, const Op& op, const VectorAccess& a, const uint32_t* loaded) override;
  void scalar_access(Wave& w, const Op& op, uint64_t addr, unsigned nbytes) override;
  void lds_access(Wave& w, const Op& op, LdsUse use, unsigned nbytes) override;
  void agent_observed(const std::string& name, int device, uint64_t addr, uint64_t value) override;
  void agent_polled(const std::string& name, int device, uint64_t addr, uint64_t nbytes) override;
  void engine_pointer(uint64_t addr) override { engine_pointers_[addr] = std::nullopt; }
  void agent_reads(const std::string& name, int device, uint64_t addr, uint64_t nbytes, const std::string& what) override;
  void agent_writes(const std::string& name, int device, uint64_t addr, uint64_t nbytes, const std::string& what) override;
  void agent_joined(const std::string& name, DispatchId finished) override;
  void memory_released(uint64_t addr, uint64_t nbytes) override;

 private:
  // ---- checker.cpp
  StrictWave& state(Wave& w) { return *static_cast<StrictWave*>(w.strict); }
  uint32_t order_lds(Wave& w, StrictWave& s, const Op& op, LdsUse use, unsigned nbytes);

  // ---- outstanding.cpp
  static const RegisterUse& use_of(const Op& op);
  static Pending pending(Pending::Kind kind, uint64_t pc);
  static void mark(StrictWave& s, const Pending& p);
  void recount(StrictWave& s);
  void check_registers(Wave& w, StrictWave& s, const Op& op);
  void busy_register(Wave& w, StrictWave& s, const Op& op, unsigned reg, bool writes);
  void wait(StrictWave& s, unsigned imm);
  void arrive(StrictWave& s, Pending& p);

  // ---- history.cpp
  void gather(Wave& w, const VectorAccess& a);
  void touch(Wave& w, uint64_t addr, unsigned nbytes);
  const Region* region(Wave& w, uint64_t addr);
  uint64_t known_as(Wave& w, uint64_t addr);
  void put(uint64_t line, const Record& r);
  void note_readers(Wave& w, StrictWave& s, uint64_t pc, uint32_t clock);
  void note_reader(uint64_t line, const Reader& reader);
  void note_engine_read(uint32_t id, uint64_t addr, uint64_t nbytes);
  template <class F>
  static void each_part(uint64_t addr, uint64_t nbytes, F f) {
    for (uint64_t at = addr; at < addr + nbytes;) {
      const uint64_t line = at / kLine, first = at % kLine, n = std::min<uint64_t>(kLine - first, addr + nbytes - at);
      ByteMask m;
      m.set(static_cast<unsigned>(first), static_cast<unsigned>(n));
      f(line, m);
      at += n;
    }
  }
  template <class F>
  void each_record(uint64_t addr, uint64_t nbytes, F f) {
    if (lines_.empty()) return;
    each_part(addr, nbytes, [&](uint64_t line, const ByteMask& bytes) {
      Line* found = lines_.find(line);
      if (!found) return;
      for (Record& r : found->records)
        if (r.bytes.meets(bytes)) f(r);
    });
  }

  // ---- loads.cpp
  void read_line(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, Scope scope, bool atomic);
  void check_memory_read(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, const Record& r, bool ended, Scope scope, bool atomic);
  void check_cached_read(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, const Record& r, bool ended);
  void from_outside(Wave& w, StrictWave& s, uint64_t pc, const Touched& t);
  bool far(const Actor& reader, const Record& r) const;

  // ---- stores.cpp
  void write_lines(Wave& w, StrictWave& s, uint64_t pc, Scope scope, bool atomic, uint32_t clock, const VectorAccess& a);
  void flag_to_peer(Wave& w, StrictWave& s, uint64_t pc, const Touched& t);
  void check_readers(Wave& w, StrictWave& s, uint64_t pc, const Touched& t);
  void check_engine_pointer(Wave& w, StrictWave& s, uint64_t pc, const Touched& t, const VectorAccess& a);

  // ---- publishing.cpp
  void write_back(Wave& w, StrictWave& s, const Op& op);
  void invalidate(StrictWave& s, const Op& op);
  bool published(const Record& r, const Clock& by, Scope need, std::string* why) const;
  bool knows_ended(const Clock& c, uint32_t actor) const { return actors_[actor].end_seq && actors_[actor].end_seq <= c.ended; }
  bool knows(const Clock& c, uint32_t actor, uint32_t clock) const { return knows_ended(c, actor) || c.get(actor) >= clock; }
  // With agent scope, the end of a kernel leaves other devices' lines dirty in the L2.
  bool end_publishes(const Record& r) const { return ctx_.options->end_of_kernel_publishes || r.home == r.device; }

  // ---- agents.cpp
  uint32_t agent(const std::string& name, int device);
  bool learn(uint32_t id, uint64_t addr, uint64_t nbytes);
  void learn_from_host(uint32_t id, int device);

  // ---- findings.cpp
  std::string instruction(const Code* code, uint64_t pc) const;
  bool once(const std::string& rule, uint64_t pc, uint64_t other) { return seen_.insert({rule, {pc, other}}).second; }
  void report(const std::string& rule, Wave& w, uint64_t pc, uint64_t addr, const std::string& text, uint64_t other);
  void finding(const std::string& rule, Wave& w, uint64_t pc, uint64_t addr, const Record& r, const std::string& why);
  void report_agent(const std::string& rule, const std::string& name, int device, const std::string& what, uint64_t addr, const Record& r, const std::string& why);

  ExecContext& ctx_;
  std::vector<Actor> actors_;
  std::map<std::string, uint32_t> agents_;
  std::unordered_map<const Wave*, std::unique_ptr<StrictWave>> states_;
  std::unordered_map<const Workgroup*, std::unique_ptr<LdsOrder>> groups_;
  std::unordered_map<DispatchId, std::vector<uint32_t>> waves_of_;
  std::unordered_map<DispatchId, Clock> starts_;
  std::unordered_map<DispatchId, uint64_t> ended_at_;
  std::map<std::pair<int, unsigned>, std::vector<WriteBack>> write_backs_;
  LineTable<Line> lines_;
  // Doorbells and write pointers, which tell engines how far a ring is filled, and what waves stored there last.
  std::map<uint64_t, std::optional<uint64_t>> engine_pointers_;
  std::unordered_map<int, std::set<uint64_t>> to_peer_;  // lines with plain stores to that device
  std::map<uint64_t, uint64_t> signals_;  // last value seen of words that other processes write
  std::set<std::pair<std::string, std::pair<uint64_t, uint64_t>>> seen_;
  std::vector<Touched> touched_;  // by the instruction that is being carried out
  uint64_t highest_ = 0;           // line of them
  std::vector<ClockPtr> acquired_;
  bool uncached_seen_ = false;
  Region region_;
  uint64_t region_generation_ = ~0ull;
  int region_device_ = -1;
  uint64_t seq_ = 1;
};

}  // namespace mori_sim::strict
