// The ring of packets between producers and one consumer.
//
// All words are monotonic byte offsets. A producer
//   1. reserves: a compare-and-swap moves `reserved` over the padding to the ring's end, if the packets would straddle it,
//      and over the packets. Space is there while the new end stays less than one ring ahead of `rptr`;
//   2. writes NOPs into the padding, and its dwords;
//   3. waits until `committed` reaches the beginning of its own space, so that packets are published in order;
//   4. stores wptr, then the doorbell, then `committed`, each with release order.
// The consumer reads the doorbell with acquire order, executes what lies between rptr and it, and stores rptr, after which
// a producer that has read rptr may overwrite the space. That store is sequentially consistent, so that a consumer that
// then finds no sleeper counted in can be sure that whoever goes to sleep later sees the new rptr.
#include <mori_sdma.h>
#include <sched.h>

namespace {

uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// Signed, because a producer with an old cursor may find rptr already past it: it then fails its compare-and-swap.
bool fits(const mori_sdma_ring* ring, uint64_t end, uint64_t rptr) {
  return static_cast<int64_t>(end - rptr) < static_cast<int64_t>(ring->nbytes);
}

bool has_room(mori_sdma_ring* ring, uint64_t end) {
  if (fits(ring, end, __atomic_load_n(&ring->seen_rptr, __ATOMIC_ACQUIRE))) return true;
  const uint64_t rptr = load(ring->rptr);
  __atomic_store_n(&ring->seen_rptr, rptr, __ATOMIC_RELEASE);
  return fits(ring, end, rptr);
}

void write_nops(mori_sdma_ring* ring, uint64_t begin, uint64_t end) {
  uint64_t left = (end - begin) / 4;
  uint32_t* out = mori_sdma_ring_at(ring, begin);
  while (left) {
    mori_sdma_packet nop{};
    nop.func = static_cast<uint32_t>(left > 0x4000 ? 0x3fff : left - 1);
    uint32_t num_dwords = 0;
    mori_sdma_encode(&nop, 0, out, static_cast<uint32_t>(left), &num_dwords);
    out += num_dwords;
    left -= num_dwords;
  }
}

}  // namespace

uint32_t* mori_sdma_ring_at(const mori_sdma_ring* ring, uint64_t offset) {
  return ring->base + (offset & (ring->nbytes - 1)) / 4;
}

int mori_sdma_ring_reserve(mori_sdma_ring* ring, uint64_t nbytes, uint64_t* begin, uint64_t* start, uint64_t* end) {
  if (nbytes == 0 || nbytes % 4 || nbytes > ring->nbytes / 2) return -1;
  uint64_t cursor = load(ring->reserved), first = 0, next = 0;
  do {
    const uint64_t left_before_end = ring->nbytes - (cursor & (ring->nbytes - 1));
    first = nbytes > left_before_end ? cursor + left_before_end : cursor;
    next = first + nbytes;
    if (!has_room(ring, next)) return 0;
  } while (!__atomic_compare_exchange_n(ring->reserved, &cursor, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  *begin = cursor, *start = first, *end = next;
  write_nops(ring, cursor, first);
  return 1;
}

void mori_sdma_ring_commit(mori_sdma_ring* ring, uint64_t begin, uint64_t end) {
  for (int tries = 0; load(ring->committed) != begin; ++tries)
    if (tries > 64) sched_yield();
  store(ring->wptr, end);
  store(ring->doorbell, end);
  store(ring->committed, end);
}

mori_sdma_reason mori_sdma_ring_next(const mori_sdma_ring* ring, const uint32_t** dwords, uint64_t* available) {
  const uint64_t rptr = load(ring->rptr);
  const uint64_t published = load(ring->doorbell);
  *available = 0;
  if (published % 4 || published - rptr >= ring->nbytes) return MORI_SDMA_BAD_POINTER;
  const uint64_t position = rptr & (ring->nbytes - 1);
  const uint64_t unbroken = ring->nbytes - position;
  const uint64_t pending = published - rptr;
  *dwords = ring->base + position / 4;
  *available = (pending < unbroken ? pending : unbroken) / 4;
  return MORI_SDMA_OK;
}

void mori_sdma_ring_retire(mori_sdma_ring* ring, uint64_t num_dwords) {
  __atomic_store_n(ring->rptr, load(ring->rptr) + 4 * num_dwords, __ATOMIC_SEQ_CST);
}

void mori_sdma_fault_dwords(mori_sdma_fault* fault, const uint32_t* dwords, uint64_t available) {
  mori_sdma_packet packet;
  mori_sdma_decode(dwords, available, 0, &packet);
  uint64_t wanted = packet.num_dwords ? packet.num_dwords : 16;  // of an unknown packet, show what may belong to it
  if (wanted > available) wanted = available;
  if (wanted > 16) wanted = 16;
  fault->num_dwords = static_cast<uint32_t>(wanted);
  for (uint64_t i = 0; i < wanted; ++i) fault->dwords[i] = dwords[i];
}

int mori_sdma_ring_step(mori_sdma_ring* ring, uint32_t flags, const mori_sdma_memory* memory, mori_sdma_fault* fault) {
  const uint32_t* dwords = nullptr;
  uint64_t available = 0;
  mori_sdma_packet packet;
  mori_sdma_reason reason = mori_sdma_ring_next(ring, &dwords, &available);
  if (reason == MORI_SDMA_OK && available == 0) return MORI_SDMA_EMPTY;
  if (reason == MORI_SDMA_OK) reason = mori_sdma_decode(dwords, available, flags, &packet);
  int result = MORI_SDMA_FAULT;
  if (reason == MORI_SDMA_OK)
    result = mori_sdma_execute(&packet, memory, fault);
  else
    *fault = {static_cast<uint32_t>(reason), 0, 0, 0, {}};
  if (result == MORI_SDMA_FAULT) mori_sdma_fault_dwords(fault, dwords, available);
  if (result == MORI_SDMA_DONE) mori_sdma_ring_retire(ring, packet.num_dwords);
  return result;
}
