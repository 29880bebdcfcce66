// One packet at a time against a block of memory with guards around it.
#include <mori_sdma.h>

#include <cstring>

#include "check.h"

namespace {

constexpr uint64_t kBase = 0x500000000000;
constexpr uint64_t kBytes = 4096;

struct Arena {
  std::vector<unsigned char> guarded = std::vector<unsigned char>(kBytes + 512, 0xee);
  uint64_t written_at = 0, written_bytes = 0;
  uint32_t written_op = 0, trapped = 0;
  mori_sdma_memory memory{this, &resolve, &written, &now, &trap};

  unsigned char* bytes() { return guarded.data() + 256; }
  template <class Word>
  Word& word(uint64_t offset) {
    return *reinterpret_cast<Word*>(bytes() + offset);
  }
  bool guards_hold() const {
    for (size_t i = 0; i < 256; ++i)
      if (guarded[i] != 0xee || guarded[kBytes + 256 + i] != 0xee) return false;
    return true;
  }

  static Arena& of(void* user) { return *static_cast<Arena*>(user); }
  static void* resolve(void* user, uint64_t address, uint64_t nbytes, uint32_t) {
    if (address < kBase || nbytes > kBytes || address - kBase > kBytes - nbytes) return nullptr;
    return of(user).bytes() + (address - kBase);
  }
  static void written(void* user, uint64_t address, uint64_t nbytes, uint32_t op) {
    of(user).written_at = address, of(user).written_bytes = nbytes, of(user).written_op = op;
  }
  static uint64_t now(void*) { return 123456789012345; }
  static void trap(void* user, uint32_t context) { of(user).trapped = context; }
};

mori_sdma_packet make(uint32_t op, uint64_t dst, uint64_t value = 0) {
  mori_sdma_packet packet{};
  packet.op = op;
  packet.dst = dst;
  packet.value = value;
  return packet;
}

int run(Arena& arena, const mori_sdma_packet& packet, mori_sdma_fault* fault = nullptr) {
  uint32_t dwords[64], num_dwords = 0;
  CHECK(mori_sdma_encode(&packet, 0, dwords, 64, &num_dwords) == MORI_SDMA_OK);
  mori_sdma_packet again;
  CHECK(mori_sdma_decode(dwords, num_dwords, 0, &again) == MORI_SDMA_OK);
  mori_sdma_fault unused{};
  return mori_sdma_execute(&again, &arena.memory, fault ? fault : &unused);
}

template <class Word>
Word atomic(uint32_t operation, Word before, uint64_t operand, uint64_t compare = 0) {
  Arena arena;
  arena.word<Word>(8) = before;
  auto packet = make(MORI_SDMA_ATOMIC, kBase + 8, operand);
  packet.func = operation;
  packet.compare = compare;
  CHECK(run(arena, packet) == MORI_SDMA_DONE);
  CHECK(arena.written_at == kBase + 8 && arena.written_bytes == sizeof(Word));
  return arena.word<Word>(8);
}

}  // namespace

TEST(copy_at_any_byte_offset) {
  Arena arena;
  for (int i = 0; i < 1000; ++i) arena.bytes()[i] = static_cast<unsigned char>(i * 131 % 251);
  auto copy = make(MORI_SDMA_COPY, kBase + 2003);
  copy.src = kBase + 1;
  copy.nbytes = 999;
  CHECK(run(arena, copy) == MORI_SDMA_DONE);
  CHECK(std::memcmp(arena.bytes() + 2003, arena.bytes() + 1, 999) == 0);
  CHECK(arena.bytes()[2002] == 0xee && arena.bytes()[3002] == 0xee);
  CHECK(arena.written_op == MORI_SDMA_COPY && arena.written_at == kBase + 2003 && arena.written_bytes == 999);
}

TEST(copy_onto_itself_moves) {
  Arena arena;
  for (int i = 0; i < 200; ++i) arena.bytes()[i] = static_cast<unsigned char>(i);
  auto copy = make(MORI_SDMA_COPY, kBase + 50);
  copy.src = kBase;
  copy.nbytes = 150;
  CHECK(run(arena, copy) == MORI_SDMA_DONE);
  for (int i = 0; i < 150; ++i) CHECK(arena.bytes()[50 + i] == i);
}

TEST(nothing_outside_is_touched) {
  for (const uint64_t dst : {kBase - 1, kBase + kBytes - 63, kBase + kBytes, uint64_t{0}, ~uint64_t{63}, ~uint64_t{0}}) {
    Arena arena;
    auto copy = make(MORI_SDMA_COPY, dst);
    copy.src = kBase + 64;
    copy.nbytes = 64;
    mori_sdma_fault fault{};
    CHECK(run(arena, copy, &fault) == MORI_SDMA_FAULT);
    CHECK(fault.reason == MORI_SDMA_OUT_OF_RANGE && fault.address == dst && fault.nbytes == 64);
    CHECK(arena.guards_hold() && arena.written_bytes == 0);
  }
  Arena arena;
  auto copy = make(MORI_SDMA_COPY, kBase);
  copy.src = kBase + kBytes - 8;
  copy.nbytes = 16;
  mori_sdma_fault fault{};
  CHECK(run(arena, copy, &fault) == MORI_SDMA_FAULT && fault.address == copy.src);
  CHECK(arena.bytes()[0] == 0xee);
}

TEST(write_and_fill) {
  Arena arena;
  const uint32_t data[2] = {0x01020304, 0x05060708};
  auto write = make(MORI_SDMA_WRITE, kBase + 4);
  write.nbytes = 8;
  write.data = data;
  CHECK(run(arena, write) == MORI_SDMA_DONE && std::memcmp(arena.bytes() + 4, data, 8) == 0);
  CHECK(arena.bytes()[3] == 0xee && arena.bytes()[12] == 0xee);
  const uint64_t lengths[] = {5, 6, 8};
  for (uint32_t element = 0; element < 3; ++element) {
    auto fill = make(MORI_SDMA_FILL, kBase + 64, 0x44332211);
    fill.func = element;
    fill.nbytes = lengths[element];
    CHECK(run(arena, fill) == MORI_SDMA_DONE);
    for (uint64_t i = 0; i < fill.nbytes; ++i) CHECK(arena.bytes()[64 + i] == 0x11 * (1 + i % (1u << element)));
    CHECK(arena.bytes()[64 + fill.nbytes] == 0xee);
  }
}

TEST(fence_timestamp_trap) {
  Arena arena;
  CHECK(run(arena, make(MORI_SDMA_FENCE, kBase + 12, 0xcafe)) == MORI_SDMA_DONE);
  CHECK(arena.word<uint32_t>(12) == 0xcafe && arena.word<uint32_t>(16) == 0xeeeeeeee);
  auto stamp = make(MORI_SDMA_TIMESTAMP, kBase + 24);
  stamp.sub_op = MORI_SDMA_TIMESTAMP_GET;
  CHECK(run(arena, stamp) == MORI_SDMA_DONE && arena.word<uint64_t>(24) == 123456789012345);
  CHECK(run(arena, make(MORI_SDMA_TRAP, 0, 99)) == MORI_SDMA_DONE && arena.trapped == 99);
}

TEST(poll_waits_for_each_comparison) {
  struct {
    uint32_t func;
    bool less, equal, greater;
  } const table[] = {{MORI_SDMA_ALWAYS, true, true, true},         {MORI_SDMA_LESS, true, false, false},
                     {MORI_SDMA_LESS_EQUAL, true, true, false},    {MORI_SDMA_EQUAL, false, true, false},
                     {MORI_SDMA_NOT_EQUAL, true, false, true},     {MORI_SDMA_GREATER_EQUAL, false, true, true},
                     {MORI_SDMA_GREATER, false, false, true}};
  for (const auto& row : table) {
    Arena arena;
    auto poll = make(MORI_SDMA_POLL, kBase + 4, 0x80000010);
    poll.func = row.func;
    poll.compare = 0xfffffff0;  // the mask: the low digit of memory does not count
    poll.retry = 0xfff;
    arena.word<uint32_t>(4) = 0x7fffffff;
    CHECK(run(arena, poll) == (row.less ? MORI_SDMA_DONE : MORI_SDMA_BLOCKED));
    arena.word<uint32_t>(4) = 0x8000001f;
    CHECK(run(arena, poll) == (row.equal ? MORI_SDMA_DONE : MORI_SDMA_BLOCKED));
    arena.word<uint32_t>(4) = 0x80000020;  // greater as an unsigned number
    CHECK(run(arena, poll) == (row.greater ? MORI_SDMA_DONE : MORI_SDMA_BLOCKED));
  }
}

TEST(atomics_on_64_bits) {
  const uint64_t minus_one = ~uint64_t{0};
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_ADD, 0xffffffff, 1) == 0x100000000);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_ADD, 5, minus_one) == 4);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_SUB, 5, 7) == minus_one - 1);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_SWAP, 5, 7) == 7);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_CMPSWAP, 5, 7, 5) == 7);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_CMPSWAP, 5, 7, 6) == 5);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_SMIN, 5, minus_one) == minus_one);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_UMIN, 5, minus_one) == 5);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_SMAX, 5, minus_one) == 5);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_UMAX, 5, minus_one) == minus_one);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_AND, 12, 10) == 8);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_OR, 12, 10) == 14);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_XOR, 12, 10) == 6);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_INC, 6, 7) == 7 && atomic<uint64_t>(MORI_SDMA_ATOMIC_INC, 7, 7) == 0);
  CHECK(atomic<uint64_t>(MORI_SDMA_ATOMIC_DEC, 1, 7) == 0 && atomic<uint64_t>(MORI_SDMA_ATOMIC_DEC, 0, 7) == 7);
}

TEST(atomics_on_32_bits_leave_the_rest) {
  const uint32_t narrow = MORI_SDMA_ATOMIC_32;
  CHECK(atomic<uint32_t>(MORI_SDMA_ATOMIC_ADD - narrow, 0xffffffff, 2) == 1);
  CHECK(atomic<uint32_t>(MORI_SDMA_ATOMIC_SMAX - narrow, 0xffffffff, 3) == 3);
  CHECK(atomic<uint32_t>(MORI_SDMA_ATOMIC_UMAX - narrow, 0xffffffff, 3) == 0xffffffff);
  Arena arena;
  auto add = make(MORI_SDMA_ATOMIC, kBase + 4, 1);
  add.func = MORI_SDMA_ATOMIC_ADD - narrow;
  arena.word<uint32_t>(4) = 0xffffffff;
  CHECK(run(arena, add) == MORI_SDMA_DONE && arena.word<uint32_t>(4) == 0 && arena.word<uint32_t>(8) == 0xeeeeeeee);
}

TEST_MAIN
