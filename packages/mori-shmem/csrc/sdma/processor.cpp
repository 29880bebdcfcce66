// Execution of one packet against memory that the caller resolves.
//
// Order: a queue's packets are executed one after the other, so when a FENCE or ATOMIC stores, every copy before it is
// complete. FENCE, ATOMIC and POLL use sequentially consistent accesses; plain data that was written before a FENCE is
// therefore visible to whoever reads the fence's value with acquire order. A sleeper that counts itself in before it looks
// at the value, and a waker that looks at the count after the store, cannot miss each other for the same reason.
#include <mori_sdma.h>

#include <cstring>
#include <ctime>

#include "copy.h"

namespace {

struct Execution {
  const mori_sdma_packet& packet;
  const mori_sdma_memory& memory;
  mori_sdma_fault& fault;

  void* resolve(uint64_t address, uint64_t nbytes, uint32_t access) {
    void* pointer = nbytes - 1 > UINT64_MAX - address ? nullptr : memory.resolve(memory.user, address, nbytes, access);
    if (!pointer) fault = {MORI_SDMA_OUT_OF_RANGE, 0, address, nbytes, {}};
    return pointer;
  }

  int written() {
    if (memory.written) memory.written(memory.user, packet.dst, packet.nbytes, packet.op);
    return MORI_SDMA_DONE;
  }

  int copy() {
    const void* from = resolve(packet.src, packet.nbytes, MORI_SDMA_READ);
    void* to = from ? resolve(packet.dst, packet.nbytes, MORI_SDMA_OVERWRITE) : nullptr;
    if (!to) return MORI_SDMA_FAULT;
    const auto first = reinterpret_cast<uintptr_t>(from), second = reinterpret_cast<uintptr_t>(to);
    if ((first > second ? first - second : second - first) < packet.nbytes)
      std::memmove(to, from, packet.nbytes);
    else
      mori_sdma::copy(to, from, packet.nbytes);
    return written();
  }

  int write() {
    void* to = resolve(packet.dst, packet.nbytes, MORI_SDMA_OVERWRITE);
    if (!to) return MORI_SDMA_FAULT;
    std::memcpy(to, packet.data, packet.nbytes);
    return written();
  }

  int fill() {
    auto* to = static_cast<unsigned char*>(resolve(packet.dst, packet.nbytes, MORI_SDMA_OVERWRITE));
    if (!to) return MORI_SDMA_FAULT;
    const uint32_t pattern = static_cast<uint32_t>(packet.value);  // little endian: the low bytes come first
    const uint64_t element = 1ull << packet.func;
    if (packet.func == MORI_SDMA_FILL_BYTE) {
      std::memset(to, static_cast<int>(pattern & 0xff), packet.nbytes);
      return written();
    }
    for (uint64_t i = 0; i < packet.nbytes; i += element) std::memcpy(to + i, &pattern, element);
    return written();
  }

  int fence() {
    auto* to = static_cast<uint32_t*>(resolve(packet.dst, 4, MORI_SDMA_OVERWRITE));
    if (!to) return MORI_SDMA_FAULT;
    __atomic_store_n(to, static_cast<uint32_t>(packet.value), __ATOMIC_SEQ_CST);
    return written();
  }

  int poll() {
    const auto* from = static_cast<const uint32_t*>(resolve(packet.dst, 4, MORI_SDMA_READ));
    if (!from) return MORI_SDMA_FAULT;
    const uint32_t seen = __atomic_load_n(from, __ATOMIC_SEQ_CST) & static_cast<uint32_t>(packet.compare);
    return holds(seen, static_cast<uint32_t>(packet.value)) ? MORI_SDMA_DONE : MORI_SDMA_BLOCKED;
  }

  bool holds(uint32_t seen, uint32_t reference) const {
    switch (packet.func) {
      case MORI_SDMA_LESS: return seen < reference;
      case MORI_SDMA_LESS_EQUAL: return seen <= reference;
      case MORI_SDMA_EQUAL: return seen == reference;
      case MORI_SDMA_NOT_EQUAL: return seen != reference;
      case MORI_SDMA_GREATER_EQUAL: return seen >= reference;
      case MORI_SDMA_GREATER: return seen > reference;
      default: return true;  // MORI_SDMA_ALWAYS
    }
  }

  template <class Word, class Signed>
  int atomic() {
    auto* to = static_cast<Word*>(resolve(packet.dst, sizeof(Word), MORI_SDMA_READWRITE));
    if (!to) return MORI_SDMA_FAULT;
    const Word operand = static_cast<Word>(packet.value);
    switch (packet.func | MORI_SDMA_ATOMIC_32) {
      case MORI_SDMA_ATOMIC_ADD: __atomic_fetch_add(to, operand, __ATOMIC_SEQ_CST); break;
      case MORI_SDMA_ATOMIC_SUB: __atomic_fetch_sub(to, operand, __ATOMIC_SEQ_CST); break;
      case MORI_SDMA_ATOMIC_AND: __atomic_fetch_and(to, operand, __ATOMIC_SEQ_CST); break;
      case MORI_SDMA_ATOMIC_OR: __atomic_fetch_or(to, operand, __ATOMIC_SEQ_CST); break;
      case MORI_SDMA_ATOMIC_XOR: __atomic_fetch_xor(to, operand, __ATOMIC_SEQ_CST); break;
      case MORI_SDMA_ATOMIC_SWAP: __atomic_exchange_n(to, operand, __ATOMIC_SEQ_CST); break;
      default: {
        Word old = __atomic_load_n(to, __ATOMIC_SEQ_CST);
        while (!__atomic_compare_exchange_n(to, &old, updated<Word, Signed>(old, operand), false, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST)) {
        }
      }
    }
    return written();
  }

  template <class Word, class Signed>
  Word updated(Word old, Word operand) const {
    const auto less = static_cast<Signed>(old) < static_cast<Signed>(operand);
    switch (packet.func | MORI_SDMA_ATOMIC_32) {
      case MORI_SDMA_ATOMIC_CMPSWAP: return old == static_cast<Word>(packet.compare) ? operand : old;
      case MORI_SDMA_ATOMIC_SMIN: return less ? old : operand;
      case MORI_SDMA_ATOMIC_SMAX: return less ? operand : old;
      case MORI_SDMA_ATOMIC_UMIN: return old < operand ? old : operand;
      case MORI_SDMA_ATOMIC_UMAX: return old < operand ? operand : old;
      case MORI_SDMA_ATOMIC_INC: return old >= operand ? 0 : old + 1;
      case MORI_SDMA_ATOMIC_DEC: return old == 0 || old > operand ? operand : old - 1;
      default: return old;
    }
  }

  int timestamp() {
    auto* to = static_cast<uint64_t*>(resolve(packet.dst, 8, MORI_SDMA_OVERWRITE));
    if (!to) return MORI_SDMA_FAULT;
    __atomic_store_n(to, memory.now ? memory.now(memory.user) : clock_ns(), __ATOMIC_SEQ_CST);
    return written();
  }

  static uint64_t clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
  }
};

}  // namespace

int mori_sdma_execute(const mori_sdma_packet* packet, const mori_sdma_memory* memory, mori_sdma_fault* fault) {
  Execution run{*packet, *memory, *fault};
  switch (packet->op) {
    case MORI_SDMA_NOP: return MORI_SDMA_DONE;
    case MORI_SDMA_COPY: return run.copy();
    case MORI_SDMA_WRITE: return run.write();
    case MORI_SDMA_FENCE: return run.fence();
    case MORI_SDMA_POLL: return run.poll();
    case MORI_SDMA_FILL: return run.fill();
    case MORI_SDMA_TIMESTAMP: return run.timestamp();
    case MORI_SDMA_ATOMIC:
      return packet->func & MORI_SDMA_ATOMIC_32 ? run.atomic<uint64_t, int64_t>() : run.atomic<uint32_t, int32_t>();
    case MORI_SDMA_TRAP:
      if (memory->trap) memory->trap(memory->user, static_cast<uint32_t>(packet->value));
      return MORI_SDMA_DONE;
  }
  *fault = {MORI_SDMA_UNSUPPORTED, 0, 0, 0, {}};
  return MORI_SDMA_FAULT;
}
