// Queues of the host target: order, faults, limits, deadlines, and the hooks that make a transport bad.
#include <cstring>
#include <thread>

#include "host/clock.h"
#include "ranks.h"

using namespace mori;

namespace {

constexpr int64_t kLong = 20'000'000'000;
constexpr uint32_t kAtLeast = MORI_SDMA_GREATER_EQUAL;

void raw(Queue& queue, std::vector<uint32_t> dwords) {
  Packets packets;
  packets.dwords = std::move(dwords);
  packets.ends.push_back(packets.dwords.size());
  queue.submit(packets);
}

uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }
uint32_t high(uint64_t value) { return static_cast<uint32_t>(value >> 32); }

}  // namespace

TEST(put_then_signal) {
  Ranks ranks(2);
  Queue& queue = queue_of(ranks[0], 1);
  for (uint64_t round = 1; round <= 200; ++round) {
    std::memset(ranks.bytes(0, 0, 0), static_cast<int>(round), 4000);
    put(queue, ranks.at(0, 1, 64), ranks.at(0, 0, 0), 4000);
    signal(queue, ranks.at(0, 1, 0), round);
    CHECK(ranks[1].wait(ranks.at(1, 1, 0), round, kAtLeast, 0, kLong) == round);
    for (int i = 0; i < 4000; i += 500) CHECK(ranks.bytes(1, 1, 64)[i] == static_cast<char>(round));
  }
}

TEST(large_copies_are_done_by_an_engine_meanwhile) {
  Ranks ranks(2, 64 << 20);
  std::memset(ranks.bytes(0, 0, 0), 7, 64 << 20);
  Queue& queue = queue_of(ranks[0], 1);
  put(queue, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 64 << 20);
  while (queue.completed_bytes() != queue.submitted_bytes()) sleep_ns(1'000'000);  // without any help from here
  CHECK(std::memcmp(ranks.bytes(1, 1, 0), ranks.bytes(0, 0, 0), 64 << 20) == 0);
}

TEST(a_queue_waits_for_a_flag_before_it_copies) {
  Ranks ranks(2);
  Queue& queue = queue_of(ranks[0], 1);
  ranks.bytes(0, 0, 0)[0] = 5;
  submit(queue, [&](Program& p) {
    p.wait(ranks.at(0, 0, 8), 3, kAtLeast);
    p.put(ranks.at(0, 1, 0), ranks.at(0, 0, 0), 1);
    p.timestamp(ranks.at(0, 1, 16));
    p.signal(ranks.at(0, 1, 8), 1, SignalOp::kAdd);
  });
  sleep_ns(20'000'000);
  CHECK(*ranks.bytes(1, 1, 0) == 0);
  ranks[0].signal(ranks.at(0, 0, 8), 2, SignalOp::kSet);
  sleep_ns(5'000'000);
  CHECK(*ranks.bytes(1, 1, 0) == 0);
  const int64_t before_ns = monotonic_ns();
  ranks[0].signal(ranks.at(0, 0, 8), 3, SignalOp::kSet);
  ranks[1].wait(ranks.at(1, 1, 8), 1, kAtLeast, 0, kLong);
  CHECK(*ranks.bytes(1, 1, 0) == 5);
  const int64_t stamp_ns = static_cast<int64_t>(ranks[1].read(ranks.at(1, 1, 16)));
  CHECK(stamp_ns >= before_ns && stamp_ns <= monotonic_ns());
}

TEST(a_signal_of_64_bits_arrives_whole) {
  Ranks ranks(2);
  Queue& queue = queue_of(ranks[0], 1);
  signal(queue, ranks.at(0, 1, 0), 0x123456789abcdef0);
  CHECK(ranks[1].wait(ranks.at(1, 1, 0), 0x123456789abcdef0, MORI_SDMA_EQUAL, 0, kLong) == 0x123456789abcdef0);
  signal(queue, ranks.at(0, 1, 0), ~uint64_t{0}, SignalOp::kAdd);
  CHECK(ranks[1].read(ranks.at(1, 1, 0)) == 0x123456789abcdeef);
}

TEST(the_first_bad_packet_stops_the_queue_for_good) {
  Ranks ranks(2);
  Queue& bad = queue_of(ranks[0], 1, 0);
  Queue& good = queue_of(ranks[0], 1, 1);
  raw(bad, {0x63, 1, 2, 3});
  const Error error = error_of([&] { bad.quiet(kLong); });
  CHECK(error.kind == "queue_fault" && fact<std::string>(error, "reason") == "unknown_op");
  CHECK(fact<std::vector<uint32_t>>(error, "dwords") == std::vector<uint32_t>({0x63, 1, 2, 3}));
  CHECK(fact<uint64_t>(error, "offset_bytes") == 0);
  CHECK(error_of([&] { put(bad, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 8); }).kind == "queue_fault");
  CHECK(error_of([&] { bad.check(); }).kind == "queue_fault");
  ranks.bytes(0, 0, 0)[0] = 1;
  put(good, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 1);
  good.quiet(kLong);
  CHECK(*ranks.bytes(1, 1, 0) == 1);
}

TEST(a_packet_that_reaches_outside_does_nothing) {
  Ranks ranks(2, 10000);
  Queue& queue = queue_of(ranks[0], 1);
  std::memset(ranks.bytes(0, 0, 0), 9, 10000);
  const uint64_t src = ranks.at(0, 0, 0), dst = ranks.at(0, 1, 9000);
  raw(queue, {1, 1000, 0, low(src), high(src), low(dst), high(dst)});  // 1001 bytes: one too many
  const Error error = error_of([&] { queue.quiet(kLong); });
  CHECK(fact<std::string>(error, "reason") == "out_of_range" && fact<uint64_t>(error, "address") == dst);
  CHECK(fact<uint64_t>(error, "nbytes") == 1001);
  for (uint64_t i = 9000; i < 10000; ++i) CHECK(*ranks.bytes(1, 1, i) == 0);
}

TEST(asking_for_too_many_queues) {
  Settings settings = small_settings();
  settings.max_queues = 2;
  settings.queues_per_peer = 8;
  Ranks ranks(2, 4096, settings);
  const Error error = error_of([&] { ranks[0].open_queues(1, {0, 1, 2, 3}); });
  CHECK(error.kind == "queue_limit" && fact<uint64_t>(error, "requested") == 4 && fact<int64_t>(error, "limit") == 2);
  CHECK(ranks[0].node().num_queues() == 0);
  CHECK(ranks[0].open_queues(1, {0, 1}).size() == 2);
  CHECK(ranks[0].open_queues(1, {1})[0] == ranks[0].open_queues(1, {1})[0]);
  for (const int index : {8, -1}) CHECK(error_of([&] { ranks[0].open_queues(1, {index}); }).kind == "bad_queue");
  CHECK(error_of([&] { ranks[0].open_queues(2, {0}); }).kind == "bad_queue");
}

TEST(quiet_has_a_deadline_and_shows_where_the_queue_stands) {
  Ranks ranks(2);
  Queue& queue = queue_of(ranks[0], 1);
  submit(queue, [&](Program& p) { p.wait(ranks.at(0, 0, 0), 1, kAtLeast); });
  const Error error = error_of([&] { queue.quiet(200'000'000); });
  CHECK(error.kind == "timeout" && fact<uint64_t>(error, "wanted") == 24);
  CHECK((fact<std::vector<uint32_t>>(error, "dwords")[0] & 0xff) == MORI_SDMA_POLL);
  ranks[0].signal(ranks.at(0, 0, 0), 1, SignalOp::kSet);
  queue.quiet(kLong);
}

TEST(a_full_ring_makes_the_submitter_wait_up_to_the_deadline) {
  Settings settings = small_settings();
  settings.ring_bytes = kMinRingBytes;
  Ranks ranks(2, 4096, settings);
  Queue& queue = queue_of(ranks[0], 1);
  submit(queue, [&](Program& p) { p.wait(ranks.at(0, 0, 0), 1, kAtLeast); });
  ranks[0].node().timeout_ns.store(100'000'000);
  std::string kind;
  for (int i = 0; i < 20 && kind.empty(); ++i) try {
      put(queue, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 8);
    } catch (const Error& error) {
      kind = error.kind;
      CHECK(fact<std::string>(error, "what") == "ring_space");
    }
  CHECK(kind == "timeout");
  ranks[0].node().timeout_ns.store(kLong);
  std::thread later([&] {
    sleep_ns(30'000'000);
    ranks[0].signal(ranks.at(0, 0, 0), 1, SignalOp::kSet);
  });
  for (int i = 0; i < 20; ++i) put(queue, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 8);  // goes on once the flag is there
  later.join();
  queue.quiet(kLong);
}

TEST(a_program_larger_than_the_ring) {
  Settings settings = small_settings();
  settings.ring_bytes = 1024;
  Ranks ranks(2, 1 << 20, settings);
  Queue& queue = queue_of(ranks[0], 1);
  for (int i = 0; i < 5000; ++i) ranks.bytes(0, 0, 0)[i] = static_cast<char>(i % 100);
  submit(queue, [&](Program& p) { p.put_2d(ranks.at(0, 1, 0), ranks.at(0, 0, 0), 5, 1000, 7, 5); });
  queue.quiet(kLong);
  for (uint64_t row = 0; row < 1000; ++row)
    CHECK(std::memcmp(ranks.bytes(1, 1, 7 * row), ranks.bytes(0, 0, 5 * row), 5) == 0);
}

TEST(hooks_drop_delay_and_reorder) {
  Ranks ranks(2);
  Queue& queue = queue_of(ranks[0], 1);
  const auto arrived = [&](char value) {
    static uint64_t round = 0;
    ++round;
    ranks.bytes(0, 0, 0)[0] = value;
    put(queue, ranks.at(0, 1, 64), ranks.at(0, 0, 0), 1);
    std::thread signaller([&] { signal(queue, ranks.at(0, 1, 0), round); });
    ranks[1].wait(ranks.at(1, 1, 0), round, kAtLeast, 0, kLong);
    const char seen = *static_cast<volatile char*>(ranks.bytes(1, 1, 64));
    signaller.join();
    return seen == value;
  };
  CHECK(arrived(1));
  queue.set_faults({1, 0, false});
  CHECK(!arrived(2));
  queue.set_faults({2, 0, false});
  CHECK(arrived(3) && !arrived(4) && arrived(5));
  queue.set_faults({0, 0, true});
  CHECK(!arrived(6));
  CHECK(*ranks.bytes(1, 1, 64) == 6);  // late, but there
  queue.set_faults({0, 20'000, false});
  const int64_t begin_ns = monotonic_ns();
  CHECK(arrived(7) && monotonic_ns() - begin_ns >= 20'000'000);
  queue.set_faults({});
  CHECK(arrived(8));
}

TEST_MAIN
