// Flags between GPUs, and waits that end.
//
// A flag is a 32-bit word with one writer per call. It only grows (an epoch) or toggles 0 -> 1 -> 0; either way
// "has come" means  (int)(seen - wanted) >= 0,  which also stays right when an epoch wraps.
// The writer stores its data, then `signal`s; the reader waits, then reads the data: release and acquire, system scope.
// A wait that passes its deadline writes who, what, seen and wanted into the fault record (the first one wins) and
// returns false. From then on every wait on the GPU returns at once: the kernel ends, the host reads the record, raises.
#pragma once
#include "types.cuh"

struct Fault {   // 32 bytes, read by the host (mori_shmem.targets.fault_record)
  unsigned code;  // 0: none, 1: a flag did not come in time
  unsigned rank, peer, what, index, seen, wanted, block;
};

DEVICE unsigned load_acquire_sys(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE unsigned load_relaxed_gpu(const unsigned* p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release_sys(unsigned* p, unsigned v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void store_relaxed_sys(unsigned* p, unsigned v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Counts arrivals and says whether this is the last of `total`; the counter is then 0 again. Everything that the
// counted threads had stored before (also to peers) is visible to whoever sees what the last one signals.
DEVICE bool last_of(unsigned* counter, unsigned total) {
  unsigned old;
  asm volatile("atom.acq_rel.sys.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(total - 1) : "memory");
  return old == total - 1;
}

// The same for what only this GPU sees.
DEVICE bool last_to_leave(unsigned* counter, unsigned total) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(total - 1) : "memory");
  return old == total - 1;
}

DEVICE uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// About once a millisecond. The record lies in host memory: a thousand waiting warps that looked every 40 us kept PCIe so busy
// that copy engines, which fetch their work over it, took a millisecond a copy (fused-sdma: 8000 us for 280).
DEVICE bool is_time_to_look(unsigned spins) { return (spins & 1023) == 1023; }

DEVICE bool has_come(const unsigned* flag, unsigned wanted) { return (int)(load_acquire_sys(flag) - wanted) >= 0; }

// One thread. True: the flag has come, and what was stored before it is visible. False: late, or another wait was.
DEVICE bool wait_flag(const unsigned* flag, unsigned wanted, Fault* fault, uint64_t timeout_ns, unsigned rank, unsigned peer,
                      unsigned what, unsigned index) {
  if (has_come(flag, wanted)) return true;
  const uint64_t start = now_ns();
  unsigned seen;
  for (unsigned spins = 0;; ++spins) {
    seen = load_acquire_sys(flag);
    if ((int)(seen - wanted) >= 0) return true;
    __nanosleep(20);
    if (is_time_to_look(spins) && (load_relaxed_gpu(&fault->code) || now_ns() - start > timeout_ns)) break;
  }
  if (atomicCAS(&fault->code, 0u, 0x80000000u) == 0u) {
    fault->rank = rank, fault->peer = peer, fault->what = what, fault->index = index;
    fault->seen = seen, fault->wanted = wanted, fault->block = blockIdx.x;
    store_release_sys(&fault->code, 1);
  }
  return false;
}
