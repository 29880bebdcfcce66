// Signals of a window in CUDA C++ kernels: the device side of comm.signal, comm.wait and queue.signal.
//
//   const Window window = {table, base, stride, rank, world_size};      // the fields of win.handle, by value
//   uint64_t* there = (uint64_t*)peer_pointer(window, peer) + 3;       // word 3 of the peer's part
//   set_word<SYSTEM>(there, epoch);                                    // after everything this thread has stored
//   if (!wait_word<SYSTEM>(here, epoch, limits, peer, what, index)) return;   // late: the record is written, the call fails
//
// A word has one writer for one purpose and grows, or toggles between 0 and 1 (mori_shmem/targets/cuda/lowering.py has
// the rules for graphs). Release and acquire are per thread: let a block meet (__syncthreads) before its one signalling
// thread releases and after its one waiting thread has acquired.
#pragma once
#include "signal.cuh"

enum Scope { DEVICE_SCOPE, SYSTEM };  // who may be at the other end: a kernel of this GPU, or anybody

struct Window {
  const uint64_t* table;  // where not null, rank r's part starts at table[r]; else at base + r * stride
  uint64_t base, stride;
  uint32_t rank, world_size;
};

struct Limits {  // of every wait of a launch
  Fault* fault;  // comm.fault_record
  uint64_t timeout_ns;
  uint32_t rank;
};

DEVICE char* peer_pointer(const Window& window, uint32_t peer) {
  return (char*)(window.table ? window.table[peer] : window.base + peer * window.stride);
}

template <Scope scope>
DEVICE uint64_t load_word(const uint64_t* p) {  // acquire
  uint64_t v;
  if (scope == SYSTEM)
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

template <Scope scope>
DEVICE void set_word(uint64_t* p, uint64_t v) {  // release
  if (scope == SYSTEM)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

template <Scope scope>
DEVICE void add_to_word(uint64_t* p, uint64_t v) {  // release
  if (scope == SYSTEM)
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// One thread. True: the word is at least `wanted`, and what was stored before it is visible. False: late, or another
// wait of this rank was; the record (who, from whom, what, index, and the low 32 bits of seen and wanted) is written.
template <Scope scope>
DEVICE bool wait_word(const uint64_t* p, uint64_t wanted, const Limits& limits, uint32_t peer, uint32_t what, uint32_t index) {
  uint64_t seen = load_word<scope>(p);
  if (seen >= wanted) return true;
  const uint64_t start = now_ns();
  for (uint32_t spins = 0;; ++spins) {
    seen = load_word<scope>(p);
    if (seen >= wanted) return true;
    __nanosleep(20);
    if (is_time_to_look(spins) && (load_relaxed_gpu(&limits.fault->code) || now_ns() - start > limits.timeout_ns)) break;
  }
  if (atomicCAS(&limits.fault->code, 0u, 0x80000000u) == 0u) {
    Fault* f = limits.fault;
    f->rank = limits.rank, f->peer = peer, f->what = what, f->index = index;
    f->seen = (uint32_t)seen, f->wanted = (uint32_t)wanted, f->block = blockIdx.x;
    store_release_sys(&f->code, 1);
  }
  return false;
}

// All threads of one block, at least world_size of them. All ranks meet: what any of them stored before is visible to
// all after. `words` is the offset of world_size words in the window that belong to this barrier alone, and `count` my
// own word in device memory: barriers so far, so that replays of a graph and eager calls may mix (kernels.ptx has the
// proof). Every rank must launch exactly one block that comes here at a time.
DEVICE bool all_ranks_meet(const Window& window, uint64_t words, uint64_t* count, const Limits& limits, uint32_t what) {
  const uint64_t epoch = *(volatile uint64_t*)count + 1;
  __syncthreads();  // everybody has read it, and has stored what it had to store
  if (threadIdx.x == 0) *(volatile uint64_t*)count = epoch;
  bool came = true;
  if (threadIdx.x < window.world_size) {
    fence_sys();
    set_word<SYSTEM>((uint64_t*)(peer_pointer(window, threadIdx.x) + words) + window.rank, epoch);
    const uint64_t* mine = (const uint64_t*)(peer_pointer(window, window.rank) + words) + threadIdx.x;
    came = wait_word<SYSTEM>(mine, epoch, limits, threadIdx.x, what, 0);
  }
  return __syncthreads_and(came);
}
