// The encoder and decoder against dwords written out by hand from the description of the packets.
#include <mori_sdma.h>

#include "check.h"

namespace {

using Dwords = std::vector<uint32_t>;

Dwords encode(const mori_sdma_packet& packet, uint32_t flags = 0) {
  Dwords out(64);
  uint32_t num_dwords = 0;
  CHECK(mori_sdma_encode(&packet, flags, out.data(), 64, &num_dwords) == MORI_SDMA_OK);
  out.resize(num_dwords);
  return out;
}

mori_sdma_reason decode(const Dwords& dwords, mori_sdma_packet* packet, uint32_t flags = 0) {
  return mori_sdma_decode(dwords.data(), dwords.size(), flags, packet);
}

mori_sdma_reason why(const Dwords& dwords, uint32_t flags = 0) {
  mori_sdma_packet packet;
  return decode(dwords, &packet, flags);
}

mori_sdma_packet decoded(const Dwords& dwords) {
  mori_sdma_packet packet;
  CHECK(decode(dwords, &packet) == MORI_SDMA_OK);
  CHECK(packet.num_dwords == dwords.size());
  return packet;
}

// Encode gives `dwords`, and decode gives it back.
void check_both_ways(mori_sdma_packet packet, const Dwords& dwords) {
  CHECK(encode(packet) == dwords);
  CHECK(encode(decoded(dwords)) == dwords);
}

mori_sdma_packet make(uint32_t op) {
  mori_sdma_packet packet{};
  packet.op = op;
  return packet;
}

}  // namespace

TEST(copy_linear) {
  auto packet = make(MORI_SDMA_COPY);
  packet.src = 0x123456789abd;
  packet.dst = 0x7fff00001003;
  packet.nbytes = 4096;
  const Dwords dwords{0x00000001, 0x00000fff, 0x00000000, 0x56789abd, 0x00001234, 0x00001003, 0x00007fff};
  check_both_ways(packet, dwords);
  CHECK(decoded(dwords).src == packet.src && decoded(dwords).dst == packet.dst && decoded(dwords).nbytes == 4096);
  packet.nbytes = 0x3fffffe0;
  CHECK(encode(packet)[1] == 0x3fffffdf);
  packet.nbytes = 0x40000000;
  CHECK(encode(packet)[1] == 0x3fffffff);
}

TEST(copy_sizes_that_cannot_be) {
  auto packet = make(MORI_SDMA_COPY);
  uint32_t out[8], num_dwords = 7;
  CHECK(mori_sdma_encode(&packet, 0, out, 8, &num_dwords) == MORI_SDMA_BAD_SIZE && num_dwords == 0);
  packet.nbytes = 0x40000001;
  CHECK(mori_sdma_encode(&packet, 0, out, 8, &num_dwords) == MORI_SDMA_BAD_SIZE);
  packet.nbytes = 64;
  CHECK(mori_sdma_encode(&packet, 0, out, 6, &num_dwords) == MORI_SDMA_NO_ROOM);
}

TEST(copies_above_22_bits_are_refused_on_request_instead_of_cut) {
  CHECK(why({1, 0x003fffff, 0, 0, 0, 0, 0}, MORI_SDMA_COPY_22BIT) == MORI_SDMA_OK);
  CHECK(why({1, 0x00400000, 0, 0, 0, 0, 0}, MORI_SDMA_COPY_22BIT) == MORI_SDMA_BAD_SIZE);
  CHECK(why({1, 0x00400000, 0, 0, 0, 0, 0}) == MORI_SDMA_OK);
  CHECK(mori_sdma_max_copy(0) == 0x3fffffe0 && mori_sdma_max_copy(MORI_SDMA_COPY_22BIT) < 0x400000);
}

TEST(write_linear) {
  const uint32_t data[3] = {0xdeadbeef, 1, 2};
  auto packet = make(MORI_SDMA_WRITE);
  packet.dst = 0x1122334455667788;
  packet.nbytes = 12;
  packet.data = data;
  check_both_ways(packet, {0x00000002, 0x55667788, 0x11223344, 2, 0xdeadbeef, 1, 2});
  packet.nbytes = 10;
  uint32_t out[16], num_dwords;
  CHECK(mori_sdma_encode(&packet, 0, out, 16, &num_dwords) == MORI_SDMA_BAD_SIZE);
}

TEST(const_fill) {
  auto packet = make(MORI_SDMA_FILL);
  packet.dst = 0x0000700000000040;
  packet.func = MORI_SDMA_FILL_DWORD;
  packet.value = 0xa5a5a5a5;
  packet.nbytes = 64;
  check_both_ways(packet, {0x8000000b, 0x00000040, 0x00007000, 0xa5a5a5a5, 63});
  CHECK(decoded({0x8000000b, 0x40, 0x7000, 0xa5a5a5a5, 60}).nbytes == 64);  // the other way of counting
  CHECK(decoded({0x0000000b, 0x41, 0x7000, 0xa5, 4}).nbytes == 5);
  CHECK(why({0xc000000b, 0x40, 0, 0, 60}) == MORI_SDMA_BAD_FIELD);
  CHECK(why({0x8000000b, 0x42, 0, 0, 60}) == MORI_SDMA_MISALIGNED);
}

TEST(fence_trap_timestamp_nop) {
  auto fence = make(MORI_SDMA_FENCE);
  fence.dst = 0x8000000c;
  fence.value = 0x12345678;
  check_both_ways(fence, {0x00000005, 0x8000000c, 0, 0x12345678});
  auto trap = make(MORI_SDMA_TRAP);
  trap.value = 0x0fedcba9;
  check_both_ways(trap, {0x00000006, 0x0fedcba9});
  auto stamp = make(MORI_SDMA_TIMESTAMP);
  stamp.sub_op = MORI_SDMA_TIMESTAMP_GET_GLOBAL;
  stamp.dst = 0x100000020;
  check_both_ways(stamp, {0x0000020d, 0x00000020, 1});
  CHECK(decoded({0x0000010d, 0x27, 1}).dst == 0x100000020);  // the low three bits are ignored
  auto nop = make(MORI_SDMA_NOP);
  check_both_ways(nop, {0});
  nop.func = 3;
  check_both_ways(nop, {0x00030000, 0, 0, 0});
  CHECK(decoded({0x00020000, 0xffffffff, 0x63}).num_dwords == 3);  // what is skipped is not looked at
}

TEST(poll_regmem) {
  auto poll = make(MORI_SDMA_POLL);
  poll.func = MORI_SDMA_GREATER_EQUAL;
  poll.dst = 0x7f0000001008;
  poll.value = 42;
  poll.compare = 0xffffffff;
  poll.interval = 4;
  poll.retry = 0xfff;
  check_both_ways(poll, {0xd0000008, 0x00001008, 0x00007f00, 42, 0xffffffff, 0x0fff0004});
  CHECK(why({0x50000008, 0, 0, 0, 0, 0x0fff0004}) == MORI_SDMA_UNSUPPORTED);  // a register
  CHECK(why({0xd0000008, 0, 0, 0, 0, 0x00100004}) == MORI_SDMA_UNSUPPORTED);  // gives up
  CHECK(why({0xf0000008, 0, 0, 0, 0, 0x0fff0004}) == MORI_SDMA_BAD_FIELD);
  CHECK(why({0xd0000008, 2, 0, 0, 0, 0x0fff0004}) == MORI_SDMA_MISALIGNED);
}

TEST(atomics) {
  auto add = make(MORI_SDMA_ATOMIC);
  add.func = MORI_SDMA_ATOMIC_ADD;
  add.dst = 0x600000008;
  add.value = 0xffffffffffffffff;
  check_both_ways(add, {0x5e00000a, 8, 6, 0xffffffff, 0xffffffff, 0, 0, 0});
  auto swap = add;
  swap.func = MORI_SDMA_ATOMIC_CMPSWAP;
  swap.compare = 0x100000002;
  check_both_ways(swap, {0x5000000a, 8, 6, 0xffffffff, 0xffffffff, 2, 1, 0});
  CHECK(decoded({0x1e00000a, 4, 6, 1, 0, 0, 0, 0}).nbytes == 4);  // ADD on 32 bits
  CHECK(why({0x5e00000a, 4, 6, 1, 0, 0, 0, 0}) == MORI_SDMA_MISALIGNED);
  CHECK(why({0x5a00000a, 8, 6, 1, 0, 0, 0, 0}) == MORI_SDMA_BAD_FIELD);  // 0x2d
  CHECK(why({0x7400000a, 8, 6, 1, 0, 0, 0, 0}) == MORI_SDMA_BAD_FIELD);  // 0x3a
  CHECK(why({0x5e01000a, 8, 6, 1, 0, 0, 0, 0}) == MORI_SDMA_MUST_BE_ZERO);  // the loop bit
}

TEST(what_is_not_executed_is_named) {
  CHECK(why({4, 0, 0, 0, 0, 0}) == MORI_SDMA_UNSUPPORTED);
  CHECK(std::string(mori_sdma_op_name(4, 0)) == "INDIRECT");
  for (const uint32_t op : {3u, 17u, 255u}) CHECK(why(Dwords(8, op)) == MORI_SDMA_UNKNOWN_OP);
  for (const uint32_t op : {7u, 9u, 12u, 14u, 15u, 16u}) CHECK(why({op, 0, 0, 0, 0, 0}) == MORI_SDMA_UNSUPPORTED);
  CHECK(why({0x00000401, 63, 0, 0, 0, 0, 0}) == MORI_SDMA_UNKNOWN_OP);  // a sub-window copy
  CHECK(why({0x00000205, 0, 0, 0, 0}) == MORI_SDMA_UNKNOWN_OP);  // a 64-bit FENCE of later engines
  CHECK(why({0x0000000d, 0, 0}) == MORI_SDMA_UNSUPPORTED);  // setting the clock
}

TEST(bits_without_meaning_must_be_zero) {
  CHECK(why({0x08000001, 63, 0, 0, 0, 0, 0}) == MORI_SDMA_MUST_BE_ZERO);  // broadcast
  CHECK(why({1, 63, 0x00010000, 0, 0, 0, 0}) == MORI_SDMA_MUST_BE_ZERO);  // swap
  CHECK(why({1, 0x40000000, 0, 0, 0, 0, 0}) == MORI_SDMA_MUST_BE_ZERO);
  CHECK(why({2, 0, 0, 0x00100000, 0}) == MORI_SDMA_MUST_BE_ZERO);
  CHECK(why({6, 0x10000000}) == MORI_SDMA_MUST_BE_ZERO);
}

TEST(too_few_dwords) {
  CHECK(why({}) == MORI_SDMA_TRUNCATED);
  CHECK(why({1, 63, 0, 0, 0, 0}) == MORI_SDMA_TRUNCATED);
  CHECK(why({2, 0, 0, 3, 1, 2, 3}) == MORI_SDMA_TRUNCATED);
  CHECK(why({0x00020000, 0}) == MORI_SDMA_TRUNCATED);
}

TEST_MAIN
