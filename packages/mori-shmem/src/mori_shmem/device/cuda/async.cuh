// mbarriers and the bulk copy engine of an SM (sm_90), one instruction a function.
#pragma once
#include "types.cuh"

DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- mbarriers: `count` arrivals plus the expected bytes complete a phase; waiters name the phase's parity
DEVICE void barrier_init(uint32_t bar, uint32_t count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
DEVICE void barrier_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_arrive_expect(uint32_t bar, uint32_t nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(nbytes) : "memory");
}
DEVICE void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
DEVICE bool barrier_test(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// To the same barrier in CTA `cta` of the cluster. Not `.release.cluster`: that compiles to a GPU-wide memory barrier per
// stage and made the whole GEMM 1.35 times slower; what is released here was only read, through the async proxy.
DEVICE void barrier_arrive_cluster(uint32_t bar, uint32_t cta) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(cta)
               : "memory");
}
// Write a word at `address` in CTA `cta` of the cluster; it counts as 4 bytes for the barrier there.
DEVICE void store_async_cluster(uint32_t address, uint32_t value, uint32_t bar, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 bar, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [bar];\n}" ::"r"(address), "r"(value), "r"(bar), "r"(cta)
      : "memory");
}
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// ---- tensor loads and stores; x is the contiguous dimension. Outside the tensor: loads give 0, stores do nothing
DEVICE void tensor_load(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(map),
               "r"(bar), "r"(x), "r"(y)
               : "memory");
}
DEVICE void tensor_load_multicast(uint32_t dst, const TensorMap* map, uint32_t bar, int x, int y, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}
DEVICE void tensor_store(const TensorMap* map, uint32_t src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src), "r"(x), "r"(y) : "memory");
}
// ---- contiguous bytes, multiples of 16
DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t nbytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(nbytes), "r"(bar)
               : "memory");
}
DEVICE void bulk_store(void* dst, uint32_t src, uint32_t nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(nbytes) : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void stores_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // their shared memory may be reused
DEVICE void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }            // they have been made visible

DEVICE void stores_wait_read_but_one() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }  // all but the newest group
DEVICE void stores_wait_but_one() { asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); }

DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // my st.shared before their bulk store
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }                     // an acquired flag before a bulk load
