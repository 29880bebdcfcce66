// Scalar memory: loads (plain and through a buffer descriptor), the clocks, and the cache instructions.
#include <atomic>
#include <chrono>

#include "coherence/checker.hpp"
#include "exec/units.hpp"

namespace mori_sim {
namespace {

// [address of the first byte]; the two low bits are ignored.
uint64_t scalar_offset(Wave& w, const Op& op) {
  if (op.soffset_en && op.imm) return static_cast<uint64_t>(static_cast<int64_t>(op.offset)) + w.s[op.soffset];
  if (op.imm) return static_cast<uint64_t>(static_cast<int64_t>(op.offset));
  if (op.soffset_en) return w.s[op.soffset];
  return w.s[op.offset & 0x7f];
}

void put(Wave& w, unsigned dst, const uint32_t* v, unsigned n) {
  for (unsigned k = 0; k < n; ++k) write32(w, dst + k, v[k]);
}

bool fetch(Wave& w, uint64_t addr, unsigned nbytes, uint32_t* v) {
  const uint8_t* p = resolve(w, addr, nbytes, false);
  if (!p) return false;
  for (unsigned k = 0; k < nbytes / 4; ++k) v[k] = __atomic_load_n(reinterpret_cast<const uint32_t*>(p) + k, __ATOMIC_RELAXED);
  w.counters->smem_bytes += nbytes;
  return true;
}

void load(Wave& w, const Op& op) {
  if (op.srsrc > 126) return w.stop("an address at s" + std::to_string(op.srsrc));
  const uint64_t base = w.s[op.srsrc] | static_cast<uint64_t>(w.s[op.srsrc + 1]) << 32;
  const uint64_t addr = (base + scalar_offset(w, op)) & ~3ull;
  uint32_t v[16];
  if (w.ctx->checker) w.ctx->checker->scalar_access(w, op, addr, op.mem_bytes);
  if (fetch(w, addr, op.mem_bytes, v)) put(w, op.dst, v, op.mem_bytes / 4);
}

void buffer_load(Wave& w, const Op& op) {
  if (op.srsrc > 124) return w.stop("a buffer descriptor at s" + std::to_string(op.srsrc));
  const uint32_t* d = &w.s[op.srsrc];
  const uint64_t base = (d[0] | static_cast<uint64_t>(d[1]) << 32) & 0xffffffffffffull;
  const unsigned stride = d[1] >> 16 & 0x3fff;
  const uint64_t size = stride ? static_cast<uint64_t>(stride) * d[2] : d[2];
  const uint64_t off = scalar_offset(w, op) & ~3ull;
  uint32_t v[16] = {};
  unsigned ok = op.mem_bytes;
  if (off >= size) ok = 0;
  else if (off + ok > size) ok = static_cast<unsigned>((size - off) & ~3ull);
  if (ok && w.ctx->checker) w.ctx->checker->scalar_access(w, op, base + off, ok);
  if (ok && !fetch(w, base + off, ok, v)) return;
  put(w, op.dst, v, op.mem_bytes / 4);
}

void memtime(Wave& w, const Op& op) { write64(w, op.dst, w.ctx->ticks * w.ctx->options->clock_step); }
void memrealtime(Wave& w, const Op& op) {  // 100 MHz
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch());
  write64(w, op.dst, static_cast<uint64_t>(ns.count()) / 10);
}
void cache(Wave&, const Op&) { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace

RunFn scalar_memory_unit(const Op& op) {
  const std::string n = op.info->name;
  if (n == "s_memtime") return memtime;
  if (n == "s_memrealtime") return memrealtime;
  if (n == "s_dcache_inv" || n == "s_dcache_wb" || n == "s_dcache_inv_vol" || n == "s_dcache_wb_vol") return cache;
  if (n.compare(0, 14, "s_buffer_load_") == 0) return buffer_load;
  if (n.compare(0, 7, "s_load_") == 0) return load;
  return nullptr;  // scalar stores and atomics do not exist on gfx940 and later
}

}  // namespace mori_sim
