// Workgroups onto CUs, and what their waves start with.
//
// A workgroup goes to XCD (id mod 8, or a seeded permutation of it) and there to the first CU with room for its LDS,
// registers and waves, in launch order, as hardware does. All placed workgroups are in flight at once.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <random>

#include "exec/machine_impl.hpp"

namespace mori_sim {
namespace {

// User SGPRs in the order of the code properties, then the system ones.
void start_scalars(Wave& w) {
  const Dispatch& d = w.group->kernel->d;
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
    if (d.rsrc2 >> (7 + a) & 1) w.s[s++] = w.group->id[a];
  if (d.rsrc2 >> 10 & 1) w.s[s++] = 0;
  if (d.rsrc2 & 1) w.s[s++] = 0;
}

// Work item ids and EXEC.
void start_lanes(Wave& w) {
  const Dispatch& d = w.group->kernel->d;
  const unsigned total = d.block[0] * d.block[1] * d.block[2];
  const unsigned ids = d.rsrc2 >> 11 & 3;
  uint64_t exec = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const unsigned item = w.index * kLanes + lane;
    if (item >= total) break;
    exec |= 1ull << lane;
    const unsigned x = item % d.block[0], y = item / d.block[0] % d.block[1], z = item / d.block[0] / d.block[1];
    w.rows[lane] = x | (ids >= 1 ? y << 10 : 0) | (ids >= 2 ? z << 20 : 0);
  }
  w.set_exec(exec);
}

}  // namespace

void Machine::Impl::fill() {
  for (auto& k : kernels)
    while (k->next_workgroup < k->total && place(*k)) {}
  while (!kernels.empty() && kernels.front()->next_workgroup == kernels.front()->total && !kernels.front()->running) kernels.pop_front();
  kernels.erase(std::remove_if(kernels.begin(), kernels.end(),
                               [](const std::unique_ptr<KernelRun>& k) { return k->next_workgroup == k->total && !k->running; }),
                kernels.end());
}

Machine::Impl::Device& Machine::Impl::device(int id) {
  Device& d = devices[id];
  if (d.cus.empty()) d.cus.resize(options.num_xcds * options.cus_per_xcd);
  return d;
}

unsigned Machine::Impl::xcd_of(uint64_t workgroup) const {
  const uint64_t x = workgroup % options.num_xcds;
  if (!options.xcd_seed) return static_cast<unsigned>(x);
  std::vector<unsigned> p(options.num_xcds);
  for (unsigned i = 0; i < p.size(); ++i) p[i] = i;
  std::mt19937_64 r(options.xcd_seed);
  std::shuffle(p.begin(), p.end(), r);
  return p[x];
}

bool Machine::Impl::place(KernelRun& k) {
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

Wave* Machine::Impl::take_wave() {
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

void Machine::Impl::start_workgroup(KernelRun& k, unsigned xcd, unsigned cu) {
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

void Machine::Impl::start_wave(Wave& w, Workgroup& g, unsigned index) {
  KernelRun& k = *g.kernel;
  const Dispatch& d = k.d;
  uint32_t* rows = w.rows;
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
  start_scalars(w);
  start_lanes(w);
}

void Machine::Impl::end_workgroup(Workgroup& g) {
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

}  // namespace mori_sim
