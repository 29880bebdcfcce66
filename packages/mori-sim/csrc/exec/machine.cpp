// Machine: places workgroups on CUs, gives waves their turns, and turns faults and stalls into text.
//
// A workgroup goes to XCD (id mod 8, or a seeded permutation of it) and there to the first CU with room for its LDS,
// registers and waves, in launch order, as hardware does. All placed workgroups are in flight at once. A turn runs one
// wave until it yields (s_barrier, s_sleep, s_endpgm) or its slice is used up.
#include "exec/machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>

#include "coherence/checker.hpp"
#include "exec/wave.hpp"

namespace mori_sim {
namespace {

constexpr unsigned kSimds = 4, kSimdRows = 512, kCuLds = 160 * 1024;
using Clock = std::chrono::steady_clock;

struct Cu {
  unsigned lds = 0, waves = 0;
  unsigned rows = 0;  // over the four SIMDs
};
struct Device {
  std::vector<Cu> cus;
};

std::string hex(uint64_t v) {
  char b[32];
  std::snprintf(b, sizeof b, "0x%llx", static_cast<unsigned long long>(v));
  return b;
}

}  // namespace

struct Machine::Impl {
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

  Impl(Memory& m, const Options& o) : memory(m), options(o), random(o.seed) {
    ctx.memory = &memory;
    ctx.options = &options;
    if (options.strict) checker = make_checker(ctx);
    ctx.checker = checker.get();
  }
  ~Impl() {
    for (auto& w : all_waves) ::munmap(w->rows, kRows * kLanes * 4);
  }

  // ---------------------------------------------------------------- placing
  unsigned num_cus() const { return options.num_xcds * options.cus_per_xcd; }
  Device& device(int id) {
    Device& d = devices[id];
    if (d.cus.empty()) d.cus.resize(num_cus());
    return d;
  }
  unsigned xcd_of(uint64_t workgroup) const {
    const uint64_t x = workgroup % options.num_xcds;
    if (!options.xcd_seed) return static_cast<unsigned>(x);
    std::vector<unsigned> p(options.num_xcds);
    for (unsigned i = 0; i < p.size(); ++i) p[i] = i;
    std::mt19937_64 r(options.xcd_seed);
    std::shuffle(p.begin(), p.end(), r);
    return p[x];
  }
  bool place(KernelRun& k) {  // the next workgroup, if its XCD has room
    const unsigned xcd = xcd_of(k.next_workgroup);
    Device& d = device(k.d.device);
    const unsigned rows = k.rows_per_wave * k.waves_per_group;
    // Spread over the XCD's CUs: start with the one after the last used.
    for (unsigned c = 0; c < options.cus_per_xcd; ++c) {
      const unsigned at = xcd * options.cus_per_xcd + (static_cast<unsigned>(k.next_workgroup / options.num_xcds) + c) % options.cus_per_xcd;
      Cu& cu = d.cus[at];
      if (cu.lds + k.d.lds_bytes > kCuLds || cu.waves + k.waves_per_group > options.max_waves_per_cu || cu.rows + rows > kSimds * kSimdRows) continue;
      cu.lds += k.d.lds_bytes;
      cu.waves += k.waves_per_group;
      cu.rows += rows;
      start_workgroup(k, xcd, at);
      return true;
    }
    return false;
  }
  Wave* take_wave() {
    if (!free_waves.empty()) {
      Wave* w = free_waves.back();
      free_waves.pop_back();
      return w;
    }
    all_waves.push_back(std::make_unique<Wave>());
    Wave* w = all_waves.back().get();
    void* p = ::mmap(nullptr, kRows * kLanes * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    w->rows = static_cast<uint32_t*>(p);
    return w;
  }
  void start_workgroup(KernelRun& k, unsigned xcd, unsigned cu) {
    const Dispatch& d = k.d;
    auto g = std::make_unique<Workgroup>();
    uint64_t id = k.next_workgroup++;
    g->kernel = &k;
    g->id[0] = static_cast<uint32_t>(id % d.num_workgroups[0]);
    g->id[1] = static_cast<uint32_t>(id / d.num_workgroups[0] % d.num_workgroups[1]);
    g->id[2] = static_cast<uint32_t>(id / d.num_workgroups[0] / d.num_workgroups[1]);
    g->xcd = xcd;
    g->cu = cu;
    g->lds.assign(d.lds_bytes, 0);
    g->alive = k.waves_per_group;
    k.running++;
    k.counters->workgroups++;
    for (unsigned i = 0; i < k.waves_per_group; ++i) {
      Wave* w = take_wave();
      g->waves.push_back(w);
      start_wave(*w, *g, i);
      waves.push_back(w);
      if (checker) checker->wave_starts(*w);
    }
    groups.push_back(std::move(g));
  }
  void start_wave(Wave& w, Workgroup& g, unsigned index) {
    KernelRun& k = *g.kernel;
    const Dispatch& d = k.d;
    uint32_t* rows = w.rows;
    w.rows = rows;
    std::memset(w.s, 0, sizeof w.s);
    // Only what the kernel was given is touched: the rest of the mapping stays unbacked.
    const unsigned arch = std::min(256u, std::min(k.rows_per_wave, ((d.rsrc3 & 63) + 1) * 4)), acc = std::min(256u, k.rows_per_wave - std::min(arch, k.rows_per_wave));
    std::memset(rows, 0, (d.rsrc3 ? arch : std::min(256u, k.rows_per_wave)) * kLanes * 4);
    std::memset(rows + 256 * kLanes, 0, (d.rsrc3 ? acc : std::min(256u, k.rows_per_wave)) * kLanes * 4);
    w.mask_of = ~0ull;
    std::memset(w.lane_mask, 0xff, sizeof w.lane_mask);
    w.pc = d.entry + k.pc_bias;
    w.code = d.code.get();
    w.ctx = &ctx;
    w.group = &g;
    w.counters = k.counters;
    w.scc = w.yield = w.indexes_vgprs = false;
    w.status = WaveStatus::runs;
    w.index = index;
    w.uid = next_uid++;
    w.cache[0] = w.cache[1] = RegionCache{};
    w.fault.clear();
    w.polled_addr = w.polled_value = w.polls = w.poll_pc = 0;
    w.sleep_until = 0;
    w.mode = (d.rsrc1 >> 12 & 0xff) | (d.rsrc1 >> 21 & 1) << 8 | (d.rsrc1 >> 23 & 1) << 9 | (d.rsrc1 >> 26 & 1) << 23;
    w.scratch.assign(static_cast<size_t>(d.scratch_bytes) * kLanes, 0);
    k.counters->waves++;
    // user SGPRs in the order of the code properties, then the system ones
    unsigned s = 0;
    auto put64 = [&](uint64_t v) { w.s[s++] = static_cast<uint32_t>(v); w.s[s++] = static_cast<uint32_t>(v >> 32); };
    const unsigned p = d.properties;
    if (p & 1) s += 4;
    if (p & 2) put64(d.dispatch_packet);
    if (p & 4) put64(d.queue);
    if (p & 8) put64(d.kernarg);
    if (p & 16) put64(d.dispatch_id);
    if (p & 32) put64(0);
    if (p & 64) w.s[s++] = d.scratch_bytes;
    const unsigned preload = d.preload & 127, preload_at = d.preload >> 7;
    for (unsigned n = 0; n < preload; ++n) {
      uint8_t* b = resolve(w, d.kernarg + 4ull * (preload_at + n), 4, false);
      if (!b) break;
      std::memcpy(&w.s[s++], b, 4);
    }
    s = std::max(s, d.rsrc2 >> 1 & 31);
    for (unsigned a = 0; a < 3; ++a)
      if (d.rsrc2 >> (7 + a) & 1) w.s[s++] = g.id[a];
    if (d.rsrc2 >> 10 & 1) w.s[s++] = 0;
    if (d.rsrc2 & 1) w.s[s++] = 0;
    // work item ids and EXEC
    const unsigned total = d.block[0] * d.block[1] * d.block[2];
    const unsigned ids = d.rsrc2 >> 11 & 3;
    uint64_t exec = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const unsigned item = index * kLanes + lane;
      if (item >= total) break;
      exec |= 1ull << lane;
      const unsigned x = item % d.block[0], y = item / d.block[0] % d.block[1], z = item / d.block[0] / d.block[1];
      rows[lane] = x | (ids >= 1 ? y << 10 : 0) | (ids >= 2 ? z << 20 : 0);
    }
    w.set_exec(exec);
  }

  // ---------------------------------------------------------------- turns
  bool runnable(const Wave& w) const { return w.status == WaveStatus::runs; }

  void fail(Wave& w, uint64_t pc) {
    const Dispatch& d = w.group->kernel->d;
    if (!fault_text.empty()) return;
    fault_text = "kernel " + d.name + ", device " + std::to_string(d.device) + ", workgroup (" + std::to_string(w.group->id[0]) + ", " +
                 std::to_string(w.group->id[1]) + ", " + std::to_string(w.group->id[2]) + "), wave " + std::to_string(w.index) + ", pc " + hex(pc) +
                 " (entry + " + hex(pc - d.entry) + "): " + (w.code ? w.code->text(pc) : "?") + ": " + w.fault;
    std::string line = w.code ? w.code->line_of(pc) : "";
    if (!line.empty()) fault_text += " [" + line + "]";
  }

  const Code* code_at(uint64_t pc) const {
    for (const auto& c : codes)
      if (c->holds(pc)) return c.get();
    return nullptr;
  }

  static void run_indexed(Wave& w, const Op& plain) {
    Op op = plain;
    const uint32_t m0 = w.s[kM0];
    auto shift = [&](uint16_t* r, unsigned bit) {
      if (*r >= kVgpr && *r < kAgpr && (m0 >> (12 + bit) & 1)) *r = static_cast<uint16_t>(*r + (m0 & 255));
    };
    for (unsigned k = 0; k < plain.num_src; ++k) shift(&op.src[k], k);
    shift(&op.dst, 3);
    for (uint16_t r : {op.dst, op.src[0], op.src[1], op.src[2]})
      if (r >= kAgpr && r < kAgpr + 256 && plain.dst < kAgpr) return w.stop("VGPR index leads past v255");
    op.run(w, op);
  }

  template <bool strict>
  unsigned turn_of(Wave& w, unsigned slice) {
    uint64_t by_category[12] = {};
    unsigned n = 0;
    w.yield = false;
    uint64_t pc = w.pc;
    while (n < slice) {
      pc = w.pc;
      if (!w.code || !w.code->holds(pc)) {
        const Code* other = code_at(pc);
        if (!other) {
          w.stop("jump to " + hex(pc) + ", where no code is loaded");
          break;
        }
        w.code = other;
      }
      Op* op = w.code->at(pc);
      if (!op) {
        w.stop("program counter is not aligned");
        break;
      }
      if (!op->run) {
        std::string why = bind(op);
        if (!why.empty()) {
          w.stop(why);
          break;
        }
      }
      if (strict) checker->before(w, *op);
      w.pc = pc + op->nbytes;
      ctx.ticks++;
      by_category[static_cast<int>(op->category)]++;
      ++n;
      if (w.indexes_vgprs && op->category == Category::valu) run_indexed(w, *op);
      else op->run(w, *op);
      if (w.yield) break;
    }
    Counters& c = *w.counters;
    c.instructions += n;
    c.valu += by_category[1];
    c.salu += by_category[2];
    c.mfma += by_category[3];
    c.vmem += by_category[4];
    c.smem += by_category[5];
    c.lds += by_category[6];
    c.flat += by_category[7];
    c.branch += by_category[8];
    c.other += by_category[11];
    if (w.status == WaveStatus::faulted) fail(w, pc);
    return n;
  }

  void after_turn(Wave& w) {
    Workgroup& g = *w.group;
    if (w.status == WaveStatus::barrier) g.arrived++;
    if (w.status == WaveStatus::ended) {
      if (checker) checker->wave_ends(w);
      g.alive--;
      ctx.progress++;
    }
    if (g.alive && g.arrived == g.alive) {
      if (checker) checker->barrier_released(g);
      g.arrived = 0;
      g.barriers++;
      ctx.progress++;
      for (Wave* o : g.waves)
        if (o->status == WaveStatus::barrier) o->status = WaveStatus::runs;
    }
    if (!g.alive) end_workgroup(g);
  }

  void end_workgroup(Workgroup& g) {
    KernelRun& k = *g.kernel;
    Cu& cu = device(k.d.device).cus[g.cu];
    cu.lds -= k.d.lds_bytes;
    cu.waves -= k.waves_per_group;
    cu.rows -= k.rows_per_wave * k.waves_per_group;
    for (Wave* w : g.waves) free_waves.push_back(w);
    waves.erase(std::remove_if(waves.begin(), waves.end(), [&](Wave* w) { return w->group == &g; }), waves.end());
    k.running--;
    if (!k.running && k.next_workgroup == k.total && checker) checker->kernel_ends(k);
    auto it = std::find_if(groups.begin(), groups.end(), [&](const std::unique_ptr<Workgroup>& p) { return p.get() == &g; });
    std::swap(*it, groups.back());
    groups.pop_back();
  }

  void fill() {
    for (auto& k : kernels)
      while (k->next_workgroup < k->total && place(*k)) {}
    while (!kernels.empty() && kernels.front()->next_workgroup == kernels.front()->total && !kernels.front()->running) kernels.pop_front();
    kernels.erase(std::remove_if(kernels.begin(), kernels.end(),
                                 [](const std::unique_ptr<KernelRun>& k) { return k->next_workgroup == k->total && !k->running; }),
                  kernels.end());
  }

  Wave* pick(unsigned* slice) {
    *slice = options.slice;
    const size_t n = waves.size();
    if (!n) return nullptr;
    if (options.order == Options::Order::random) {
      *slice = 1 + static_cast<unsigned>(random() % options.slice);
      const size_t first = random() % n;
      for (size_t i = 0; i < n; ++i)
        if (Wave* w = waves[(first + i) % n]; runnable(*w)) return w;
      return nullptr;
    }
    const bool delays = options.order == Options::Order::rank_delayed;
    Wave* asleep = nullptr;
    for (size_t i = 0; i < n; ++i) {
      if (++turn >= n) turn = 0, ++round;
      Wave* w = waves[turn];
      if (!runnable(*w)) continue;
      if (w->sleep_until > ctx.ticks) { if (!asleep) asleep = w; continue; }
      if (delays && w->group->kernel->d.rank == options.delayed_rank && round % options.delay_factor) { asleep = w; continue; }
      return w;
    }
    if (delays && asleep) {  // only the delayed rank could run: let it, but rarely
      *slice = 64;
    }
    return asleep;
  }

  State run(uint64_t budget) {
    if (!fault_text.empty()) return State::fault;
    uint64_t used = 0;
    fill();
    while (used < budget) {
      unsigned slice;
      Wave* w = pick(&slice);
      if (!w) break;
      const size_t before = groups.size();
      slice = static_cast<unsigned>(std::min<uint64_t>(slice, budget - used));
      used += checker ? turn_of<true>(*w, slice) : turn_of<false>(*w, slice);
      if (w->status == WaveStatus::faulted) break;
      if (w->status != WaveStatus::runs) after_turn(*w);
      if (checker && options.stop_at_first_report && !checker->reports.empty() && fault_text.empty()) fault_text = checker->reports.front().text;
      if (!fault_text.empty()) break;
      if (groups.size() != before) fill();
    }
    if (ctx.progress != seen_progress || waves.empty()) {
      seen_progress = ctx.progress;
      moved = Clock::now();
    }
    if (!fault_text.empty()) return State::fault;
    return waves.empty() && kernels.empty() ? State::idle : State::running;
  }
};

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
  m.moved = Clock::now();
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
  for (Wave* w : m.waves) (void)w;
  m.free_waves.clear();
  for (auto& w : m.all_waves) m.free_waves.push_back(w.get());
  m.waves.clear();
  m.groups.clear();
  m.kernels.clear();
  m.devices.clear();
}

double Machine::quiet_seconds() const { return std::chrono::duration<double>(Clock::now() - impl_->moved).count(); }

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
void Machine::agent_polled(const std::string& a, int d, uint64_t addr, uint64_t n) {
  if (impl_->checker) impl_->checker->agent_polled(a, d, addr, n);
}
void Machine::agent_observed(const std::string& a, int d, uint64_t addr, uint64_t n) {
  if (impl_->checker) impl_->checker->agent_observed(a, d, addr, n);
}
void Machine::agent_reads(const std::string& a, int d, uint64_t addr, uint64_t n, const std::string& what) {
  if (impl_->checker) impl_->checker->agent_reads(a, d, addr, n, what);
}
void Machine::agent_writes(const std::string& a, int d, uint64_t addr, uint64_t n, const std::string& what) {
  if (impl_->checker) impl_->checker->agent_writes(a, d, addr, n, what);
}
void Machine::agent_joined(const std::string& a, DispatchId id) {
  if (impl_->checker) impl_->checker->agent_joined(a, id);
}
void Machine::memory_released(uint64_t addr, uint64_t n) {
  if (impl_->checker) impl_->checker->memory_released(addr, n);
}

}  // namespace mori_sim
