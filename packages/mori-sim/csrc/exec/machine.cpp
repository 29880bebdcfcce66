// Machine's calls: a launch is checked and submitted, run in slices, and asked about.
#include "exec/machine_impl.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

namespace mori_sim {

Machine::Impl::Impl(Memory& m, const Options& o) : memory(m), options(o), random(o.seed) {
  ctx.memory = &memory;
  ctx.options = &options;
  if (options.strict) checker = make_checker(ctx);
  ctx.checker = checker.get();
}
Machine::Impl::~Impl() {
  for (auto& w : all_waves) ::munmap(w->rows, kRows * kLanes * 4);
}

Machine::Machine(Memory& memory, const Options& options) : impl_(new Impl(memory, options)) {}
Machine::~Machine() = default;

DispatchId Machine::submit(Dispatch d) {
  Impl& m = *impl_;
  if (!d.code) throw std::invalid_argument(d.name + ": no code");
  auto k = std::make_unique<KernelRun>();
  const uint64_t items = static_cast<uint64_t>(d.block[0]) * d.block[1] * d.block[2];
  if (!items || items > 1024) throw std::invalid_argument(d.name + ": a workgroup has 1 to 1024 work items, not " + std::to_string(items));
  k->total = static_cast<uint64_t>(d.num_workgroups[0]) * d.num_workgroups[1] * d.num_workgroups[2];
  if (!k->total) throw std::invalid_argument(d.name + ": the grid is empty");
  k->waves_per_group = static_cast<unsigned>((items + kLanes - 1) / kLanes);
  k->rows_per_wave = ((d.rsrc1 & 63) + 1) * 8;
  if (d.lds_bytes > kCuLds) throw std::invalid_argument(d.name + ": " + std::to_string(d.lds_bytes) + " bytes of LDS, a CU has " + std::to_string(kCuLds));
  const unsigned per_simd = (k->waves_per_group + kSimds - 1) / kSimds;
  if (per_simd * k->rows_per_wave > kSimdRows)
    throw std::invalid_argument(d.name + ": " + std::to_string(k->waves_per_group) + " waves of " + std::to_string(k->rows_per_wave) +
                                " registers do not fit a CU (512 per SIMD)");
  if (d.preload & 127) k->pc_bias = 256;  // the first 256 bytes load what hardware has preloaded
  k->id = m.next_id++;
  k->counters = &m.counters[d.name];
  k->counters->dispatches++;
  if (std::find(m.codes.begin(), m.codes.end(), d.code) == m.codes.end()) m.codes.push_back(d.code);
  if (m.codes.size() > 64) m.codes.erase(std::remove_if(m.codes.begin(), m.codes.end() - 1, [](const std::shared_ptr<Code>& c) { return c.use_count() == 1; }), m.codes.end() - 1);
  k->d = std::move(d);
  const DispatchId id = k->id;
  if (m.checker) m.checker->kernel_starts(*k);
  m.kernels.push_back(std::move(k));
  m.moved = Impl::Clock::now();
  return id;
}

bool Machine::done(DispatchId id) const {
  for (const auto& k : impl_->kernels)
    if (k->id == id) return k->next_workgroup == k->total && !k->running;
  return true;
}
Machine::State Machine::run(uint64_t n) { return impl_->run(n); }
bool Machine::idle() const {
  for (const auto& k : impl_->kernels)
    if (k->next_workgroup != k->total || k->running) return false;
  return true;
}
bool Machine::faulted() const { return !impl_->fault_text.empty(); }
std::string Machine::fault() const { return impl_->fault_text; }
void Machine::clear_fault() {
  Impl& m = *impl_;
  m.fault_text.clear();
  m.free_waves.clear();
  for (auto& w : m.all_waves) m.free_waves.push_back(w.get());
  m.waves.clear();
  m.groups.clear();
  m.kernels.clear();
  m.devices.clear();
}

double Machine::quiet_seconds() const { return std::chrono::duration<double>(Impl::Clock::now() - impl_->moved).count(); }

void Machine::reset_counters() {
  for (auto& c : impl_->counters) c.second = Counters{};
}
uint64_t Machine::instructions() const { return impl_->ctx.ticks; }

const std::vector<Report>& Machine::reports() const {
  static const std::vector<Report> none;
  return impl_->checker ? impl_->checker->reports : none;
}
void Machine::clear_reports() {
  if (impl_->checker) impl_->checker->reports.clear();
}
void Machine::engine_pointer(uint64_t addr) {
  if (impl_->checker) impl_->checker->engine_pointer(addr);
}
// An engine's or the host's access may span several mappings, which are known by addresses of their own.
template <class F>
static void each_known(const Memory& memory, uint64_t addr, uint64_t nbytes, F f) {
  while (nbytes > 0) {
    uint64_t part = nbytes;
    const uint64_t known = memory.known_as(addr, &part);
    f(known, part);
    addr += part;
    nbytes -= part;
  }
}
void Machine::agent_polled(const std::string& a, int d, uint64_t addr, uint64_t n) {
  if (!impl_->checker) return;
  each_known(impl_->memory, addr, n, [&](uint64_t at, uint64_t part) { impl_->checker->agent_polled(a, d, at, part); });
}
void Machine::agent_observed(const std::string& a, int d, uint64_t addr, uint64_t value) {
  uint64_t n = sizeof value;
  if (impl_->checker) impl_->checker->agent_observed(a, d, impl_->memory.known_as(addr, &n), value);
}
void Machine::agent_reads(const std::string& a, int d, uint64_t addr, uint64_t n, const std::string& what) {
  if (!impl_->checker) return;
  each_known(impl_->memory, addr, n, [&](uint64_t at, uint64_t part) { impl_->checker->agent_reads(a, d, at, part, what); });
}
void Machine::agent_writes(const std::string& a, int d, uint64_t addr, uint64_t n, const std::string& what) {
  if (!impl_->checker) return;
  each_known(impl_->memory, addr, n, [&](uint64_t at, uint64_t part) { impl_->checker->agent_writes(a, d, at, part, what); });
}
void Machine::agent_joined(const std::string& a, DispatchId id) {
  if (impl_->checker) impl_->checker->agent_joined(a, id);
}
void Machine::memory_released(uint64_t addr, uint64_t n) {
  if (impl_->checker) impl_->checker->memory_released(addr, n);
}

}  // namespace mori_sim
