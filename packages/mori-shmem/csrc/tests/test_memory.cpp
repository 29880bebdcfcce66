// Windows: arithmetic of addresses, sizes above 32 bits, what is refused, and lifetimes.
#include <sys/mman.h>

#include <cstring>

#include "ranks.h"

using namespace mori;

TEST(all_ranks_see_the_same_bytes) {
  Ranks ranks(3, 10000);
  for (int me = 0; me < 3; ++me) std::memset(ranks.bytes(me, me, 0), 'a' + me, 10000);
  for (int me = 0; me < 3; ++me)
    for (int of = 0; of < 3; ++of) CHECK(*ranks.bytes(me, of, 9999) == 'a' + of);
  CHECK(ranks.windows[0]->base % 4096 == 0 && ranks.windows[0]->stride >= 10000);
}

TEST(a_window_above_4_gib_is_sparse_and_exact) {
  const uint64_t nbytes = (uint64_t{9} << 29) + 4096;  // 4.5 GiB
  Ranks ranks(2, nbytes);
  Queue& queue = queue_of(ranks[0], 1);
  for (int i = 0; i < 4096; ++i) ranks.bytes(0, 0, 0)[i] = static_cast<char>(i * 131 % 251);
  const uint64_t high = (uint64_t{1} << 32) + 4096;
  put(queue, ranks.at(0, 1, high), ranks.at(0, 0, 0), 4096);
  put(queue, ranks.at(0, 1, nbytes - 4096), ranks.at(0, 1, high), 4096);
  queue.quiet(5'000'000'000);
  CHECK(std::memcmp(ranks.bytes(1, 1, nbytes - 4096), ranks.bytes(0, 0, 0), 4096) == 0);
  for (int i = 0; i < 4096; ++i) CHECK(ranks.bytes(1, 1, 4096)[i] == 0);  // where a 32-bit offset would land
  CHECK(error_of([&] { put(queue, ranks.at(0, 1, nbytes - 8), ranks.at(0, 0, 0), 16); }).kind == "out_of_range");
  CHECK(error_of([&] { put(queue, ranks.at(0, 1, 0), ranks.at(0, 0, 1), nbytes); }).kind == "out_of_range");
}

// Above 32 MiB other instructions move the bytes; heads and tails of every alignment must be exact there too.
TEST(large_copies_at_odd_offsets) {
  Ranks ranks(2, 64 << 20);
  Queue& queue = queue_of(ranks[0], 1);
  const uint64_t nbytes = (32 << 20) + 77;
  for (uint64_t i = 0; i < nbytes + 64; ++i) *ranks.bytes(0, 0, i) = static_cast<char>(i * 131 % 251);
  const uint64_t offsets[][2] = {{0, 0}, {1, 0}, {0, 63}, {13, 14}};
  for (const auto& [to, from] : offsets) {
    std::memset(ranks.bytes(1, 1, 0), 0x55, nbytes + 128);
    put(queue, ranks.at(0, 1, 64 + to), ranks.at(0, 0, from), nbytes);
    queue.quiet(20'000'000'000);
    CHECK(std::memcmp(ranks.bytes(1, 1, 64 + to), ranks.bytes(0, 0, from), nbytes) == 0);
    CHECK(*ranks.bytes(1, 1, 63 + to) == 0x55 && *ranks.bytes(1, 1, 64 + to + nbytes) == 0x55);
  }
}

TEST(a_copy_above_one_packet_is_cut_into_packets) {
  Ranks ranks(1, (uint64_t{3} << 30));
  Program program(ranks[0].space());
  const uint64_t nbytes = (uint64_t{1} << 30) + 16;
  program.put(ranks.at(0, 0, nbytes), ranks.at(0, 0, 0), nbytes);
  CHECK(program.packets().ends.size() == 2);
  mori_sdma_packet second;
  CHECK(mori_sdma_decode(program.packets().dwords.data() + 7, 7, 0, &second) == MORI_SDMA_OK);
  CHECK(second.src == ranks.at(0, 0, 0x3fffffe0) && second.nbytes == nbytes - 0x3fffffe0);
  program.put(ranks.at(0, 0, 0), ranks.at(0, 0, 0), 0);  // nothing is nothing
  CHECK(program.packets().ends.size() == 2);
}

TEST(what_a_program_refuses) {
  Ranks ranks(2, 10000);
  Program program(ranks[0].space());
  const uint64_t mine = ranks.at(0, 0, 0), gap = ranks.at(0, 0, 10001);
  CHECK(error_of([&] { program.put(gap, mine, 1); }).kind == "out_of_range");
  CHECK(error_of([&] { program.put(mine, 64, 1); }).kind == "out_of_range");
  CHECK(error_of([&] { program.put(mine, mine, ~uint64_t{0}); }).kind == "out_of_range");
  CHECK(error_of([&] { program.put(ranks.at(0, 1, 0), mine + 9990, 11); }).kind == "out_of_range");
  const Error error = error_of([&] { program.put(mine + 9990, mine, 11); });
  CHECK(fact<uint64_t>(error, "address") == mine + 9990 && fact<uint64_t>(error, "size") == 10000);
  CHECK(error_of([&] { program.signal(mine + 4, 1, SignalOp::kSet); }).kind == "misaligned");
  CHECK(error_of([&] { program.wait(mine, uint64_t{1} << 32, MORI_SDMA_GREATER_EQUAL); }).kind == "bad_value");
  CHECK(error_of([&] { program.fill(mine, 0, 6); }).kind == "bad_value");
  CHECK(error_of([&] { program.put_2d(mine, mine, 8, 3, 4, 8); }).kind == "bad_value");  // rows onto each other
  CHECK(error_of([&] { program.put_2d(mine, mine, 8, 3, uint64_t{1} << 63, 8); }).kind == "bad_value");
  CHECK(error_of([&] { program.put_2d(mine, mine, 5000, 3, 5000, 0); }).kind == "out_of_range");
  CHECK(program.packets().ends.empty());
}

TEST(rows_with_pitches) {
  Ranks ranks(2);
  for (int i = 0; i < 1000; ++i) ranks.bytes(0, 0, 0)[i] = static_cast<char>(i % 127);
  Queue& queue = queue_of(ranks[0], 1);
  submit(queue, [&](Program& p) {
    p.put_2d(ranks.at(0, 1, 0), ranks.at(0, 0, 0), 10, 5, 16, 100);
    CHECK(p.packets().ends.size() == 5);
    p.put_2d(ranks.at(0, 1, 512), ranks.at(0, 0, 0), 10, 5, 10, 10);  // in one piece
    CHECK(p.packets().ends.size() == 6);
  });
  queue.quiet(5'000'000'000);
  for (int row = 0; row < 5; ++row) {
    CHECK(std::memcmp(ranks.bytes(1, 1, 16 * static_cast<uint64_t>(row)), ranks.bytes(0, 0, 100 * static_cast<uint64_t>(row)), 10) == 0);
    for (uint64_t i = 10; i < 16; ++i) CHECK(ranks.bytes(1, 1, 16 * static_cast<uint64_t>(row))[i] == 0);
  }
  CHECK(std::memcmp(ranks.bytes(1, 1, 512), ranks.bytes(0, 0, 0), 50) == 0);
}

TEST(memory_files_are_sealed_and_checked) {
  const int fd = create_memory(5000, "part");
  CHECK(ftruncate(fd, 100) != 0 && ftruncate(fd, 1 << 20) != 0);
  CHECK(error_of([&] { FileMapping({fd}, 1 << 20); }).kind == "bad_value");
  CHECK(error_of([&] { create_memory(0, "part"); }).kind == "bad_value");
  CHECK(error_of([&] { FileMapping({-1}, 100); }).kind == "system");
  close(fd);
}

TEST(a_closed_window_is_out_of_reach_but_its_spans_live) {
  Ranks ranks(1);
  const int fd = create_memory(4096, "part");
  auto window = std::make_unique<Window>(ranks.fabrics[0], ranks[0].map_window({fd}, 4096), 0);
  close(fd);
  const auto span = window->span(0, 8, 100);
  CHECK(error_of([&] { window->span(0, 4000, 100); }).kind == "out_of_range");
  CHECK(error_of([&] { window->span(1, 0, 1); }).kind == "bad_value");
  const uint64_t where = window->base;
  ranks[0].signal(where, 5, SignalOp::kSet);
  window->close();
  window->close();
  CHECK(error_of([&] { ranks[0].read(where); }).kind == "out_of_range");
  CHECK(error_of([&] { window->span(0, 0, 1); }).kind == "closed");
  CHECK(*reinterpret_cast<uint64_t*>(where) == 5);  // still mapped
}

TEST_MAIN
