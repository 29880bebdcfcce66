// What a machine says about itself: faults, stalls and counters as text.
#include <algorithm>
#include <cstdio>

#include "exec/hex.hpp"
#include "exec/machine_impl.hpp"

namespace mori_sim {

void Machine::Impl::fail(Wave& w, uint64_t pc) {
  const Dispatch& d = w.group->kernel->d;
  if (!fault_text.empty()) return;
  fault_text = "kernel " + d.name + ", device " + std::to_string(d.device) + ", workgroup (" + std::to_string(w.group->id[0]) + ", " +
               std::to_string(w.group->id[1]) + ", " + std::to_string(w.group->id[2]) + "), wave " + std::to_string(w.index) + ", pc " + hex(pc) +
               " (entry + " + hex(pc - d.entry) + "): " + (w.code ? w.code->text(pc) : "?") + ": " + w.fault;
  std::string line = w.code ? w.code->line_of(pc) : "";
  if (!line.empty()) fault_text += " [" + line + "]";
}

std::vector<WaveState> Machine::stuck_waves(size_t most) const {
  std::vector<WaveState> out;
  for (const Wave* w : impl_->waves) {
    if (out.size() >= most) break;
    if (w->status == WaveStatus::ended) continue;
    WaveState s{};
    const Dispatch& d = w->group->kernel->d;
    s.kernel = d.name;
    s.state = w->status == WaveStatus::barrier ? "at s_barrier" : w->sleep_until > impl_->ctx.ticks ? "sleeps" : "runs";
    s.instruction = w->code ? w->code->text(w->pc) : "?";
    std::copy(w->group->id, w->group->id + 3, s.workgroup);
    s.wave = w->index;
    s.device = d.device;
    s.rank = d.rank;
    s.pc = w->pc;
    s.polled_addr = w->polled_addr;
    s.polled_value = w->polled_value;
    s.polls = w->polls;
    out.push_back(s);
  }
  return out;
}

std::string Machine::watchdog_report() const {
  char b[64];
  std::snprintf(b, sizeof b, "%.1f", quiet_seconds());
  std::string t = std::string("nothing has moved for ") + b + " s; " + std::to_string(impl_->waves.size()) + " waves in flight\n";
  for (const WaveState& s : stuck_waves()) {
    t += "  rank " + std::to_string(s.rank) + " kernel " + s.kernel + " workgroup (" + std::to_string(s.workgroup[0]) + ", " + std::to_string(s.workgroup[1]) +
         ", " + std::to_string(s.workgroup[2]) + ") wave " + std::to_string(s.wave) + " " + s.state + " pc " + hex(s.pc) + ": " + s.instruction;
    if (s.polls > 1) t += "; polls " + hex(s.polled_addr) + ", saw " + hex(s.polled_value) + " " + std::to_string(s.polls) + " times in a row";
    t += "\n";
  }
  return t;
}

std::string Machine::counters_json() const {
  std::string t = "{";
  bool first = true;
  for (const auto& [name, c] : impl_->counters) {
    auto f = [&](const char* k, uint64_t v) { t += std::string(", \"") + k + "\": " + std::to_string(v); };
    t += std::string(first ? "" : ", ") + "\"" + name + "\": {\"dispatches\": " + std::to_string(c.dispatches);
    first = false;
    f("workgroups", c.workgroups); f("waves", c.waves); f("instructions", c.instructions); f("valu", c.valu); f("salu", c.salu);
    f("mfma", c.mfma); f("vmem", c.vmem); f("smem", c.smem); f("lds", c.lds); f("flat", c.flat); f("branch", c.branch);
    f("waits", c.waits); f("barriers", c.barriers); f("other", c.other); f("atomics", c.atomics); f("mfma_flops", c.mfma_flops);
    f("lds_bytes", c.lds_bytes); f("local_bytes", c.local_bytes); f("peer_bytes", c.peer_bytes); f("host_bytes", c.host_bytes);
    f("uncached_bytes", c.uncached_bytes); f("smem_bytes", c.smem_bytes);
    t += "}";
  }
  return t + "}";
}

}  // namespace mori_sim
