// Waits and barriers between ranks of one process: values, deadlines, leaving, and what the errors say.
#include <algorithm>
#include <cstring>
#include <thread>

#include "host/clock.h"
#include "ranks.h"

using namespace mori;

namespace {

constexpr int64_t kLong = 20'000'000'000;
constexpr uint32_t kAtLeast = MORI_SDMA_GREATER_EQUAL;

double seconds_since(int64_t begin_ns) { return static_cast<double>(monotonic_ns() - begin_ns) * 1e-9; }

}  // namespace

TEST(a_signal_wakes_a_sleeper) {
  Ranks ranks(2);
  for (uint64_t round = 1; round <= 20; ++round) {
    std::thread sleeper([&] { CHECK(ranks[1].wait(ranks.at(1, 1, 64), round, kAtLeast, 0, kLong) == round); });
    sleep_ns(2'000'000);
    ranks[0].signal(ranks.at(0, 1, 64), 1, SignalOp::kAdd);
    sleeper.join();
  }
}

// Long asleep, a waiter looks by itself only every 50 ms (barrier) or 10 ms (signal): that it is back sooner is the wake-up.
// The best of several, because the machine may be busy.
TEST(sleepers_are_woken_not_found) {
  Ranks ranks(2);
  int64_t barrier_ns = INT64_MAX, signal_ns = INT64_MAX;
  for (uint64_t round = 1; round <= 5; ++round) {
    int64_t left_ns = 0, woken_ns = 0;
    std::thread sleeper([&] {
      ranks[1].barrier(kLong);
      left_ns = monotonic_ns();
      ranks[1].wait(ranks.at(1, 1, 0), round, kAtLeast, 0, kLong);
      woken_ns = monotonic_ns();
    });
    sleep_ns(110'000'000);
    const int64_t entered_ns = monotonic_ns();
    ranks[0].barrier(kLong);
    sleep_ns(60'000'000);
    const int64_t signalled_ns = monotonic_ns();
    signal(queue_of(ranks[0], 1), ranks.at(0, 1, 0), round);
    sleeper.join();
    barrier_ns = std::min(barrier_ns, left_ns - entered_ns);
    signal_ns = std::min(signal_ns, woken_ns - signalled_ns);
  }
  std::printf("  barrier %.3f ms, signal %.3f ms\n", static_cast<double>(barrier_ns) * 1e-6, static_cast<double>(signal_ns) * 1e-6);
  CHECK(barrier_ns < 2'000'000 && signal_ns < 2'000'000);
}

TEST(every_comparison_is_unsigned_and_64_bits_wide) {
  Ranks ranks(1);
  const uint64_t where = ranks.at(0, 0, 0), big = uint64_t{1} << 63;
  ranks[0].signal(where, big, SignalOp::kSet);
  CHECK(ranks[0].wait(where, big - 1, MORI_SDMA_GREATER, -1, 0) == big);
  ranks[0].wait(where, big, MORI_SDMA_EQUAL, -1, 0);
  ranks[0].wait(where, big + 1, MORI_SDMA_LESS, -1, 0);
  ranks[0].wait(where, big, MORI_SDMA_LESS_EQUAL, -1, 0);
  ranks[0].wait(where, 0, MORI_SDMA_NOT_EQUAL, -1, 0);
  CHECK(error_of([&] { ranks[0].wait(where, big + 1, kAtLeast, -1, 0); }).kind == "timeout");
}

TEST(plain_stores_are_noticed_within_some_milliseconds) {
  Ranks ranks(2);
  int64_t stored_ns = 0, noticed_ns = 0;
  std::thread sleeper([&] {
    ranks[1].wait(ranks.at(1, 1, 0), 9, kAtLeast, 0, kLong);
    noticed_ns = monotonic_ns();
  });
  sleep_ns(100'000'000);
  stored_ns = monotonic_ns();
  __atomic_store_n(reinterpret_cast<uint64_t*>(ranks.at(0, 1, 0)), 9, __ATOMIC_RELEASE);
  sleeper.join();
  CHECK(noticed_ns - stored_ns < 500'000'000);  // 10 ms, and a loaded machine
}

TEST(a_deadline_ends_a_wait_and_tells_what_was_seen) {
  Ranks ranks(2);
  ranks[0].signal(ranks.at(0, 0, 8), 3, SignalOp::kSet);
  const int64_t begin_ns = monotonic_ns();
  const Error error = error_of([&] { ranks[0].wait(ranks.at(0, 0, 8), 4, kAtLeast, 1, 300'000'000); });
  CHECK(error.kind == "timeout" && seconds_since(begin_ns) >= 0.3 && seconds_since(begin_ns) < 3);
  CHECK(fact<uint64_t>(error, "seen") == 3 && fact<uint64_t>(error, "wanted") == 4 && fact<int64_t>(error, "peer") == 1);
  CHECK(fact<std::string>(error, "cmp") == ">=" && fact<double>(error, "waited_s") >= 0.3);
}

TEST(a_barrier_holds_until_the_last_rank_and_names_the_missing) {
  Ranks ranks(3);
  const Error error = error_of([&] { ranks[0].barrier(200'000'000); });
  CHECK(error.kind == "timeout" && fact<std::vector<int>>(error, "missing") == std::vector<int>({1, 2}));
  std::atomic<int> num_inside{0};
  std::vector<std::thread> others;
  for (int rank = 0; rank < 2; ++rank)
    others.emplace_back([&, rank] {
      ranks[rank].barrier(kLong);  // rank 0 takes its barrier up again
      ++num_inside;
    });
  sleep_ns(50'000'000);
  CHECK(num_inside == 0);
  ranks[2].barrier(kLong);
  for (std::thread& other : others) other.join();
}

TEST(many_barriers_in_a_row) {
  Ranks ranks(4);
  std::vector<std::atomic<uint64_t>> rounds(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank)
    threads.emplace_back([&, rank] {
      for (uint64_t round = 1; round <= 300; ++round) {
        rounds[static_cast<size_t>(rank)] = round;
        ranks[rank].barrier(kLong);
        for (auto& other : rounds) CHECK(other >= round);
        ranks[rank].barrier(kLong);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(who_leaves_ends_the_waits_for_him_but_not_the_values_he_left) {
  Ranks ranks(3);
  std::string kind;
  std::thread sleeper([&] { kind = error_of([&] { ranks[0].wait(ranks.at(0, 0, 0), 1, kAtLeast, 1, kLong); }).kind; });
  sleep_ns(20'000'000);
  ranks[1].signal(ranks.at(1, 2, 0), 77, SignalOp::kSet);
  const int64_t begin_ns = monotonic_ns();
  ranks[1].close();
  sleeper.join();
  CHECK(kind == "peer_left" && seconds_since(begin_ns) < 1);
  CHECK(ranks[2].wait(ranks.at(2, 2, 0), 77, kAtLeast, 1, kLong) == 77);
  CHECK(error_of([&] { ranks[2].wait(ranks.at(2, 2, 0), 78, kAtLeast, -1, 100'000'000); }).kind == "timeout");
  const Error error = error_of([&] { ranks[2].barrier(kLong); });
  CHECK(error.kind == "peer_left" && fact<std::vector<int>>(error, "ranks") == std::vector<int>({1}));
  CHECK(ranks[0].peer_states() == std::vector<std::string>({"alive", "left", "alive"}));
}

TEST(close_ends_the_waits_of_other_threads) {
  Ranks ranks(2);
  std::string kind;
  std::thread sleeper([&] { kind = error_of([&] { ranks[0].wait(ranks.at(0, 0, 0), 1, kAtLeast, 1, kLong); }).kind; });
  sleep_ns(20'000'000);
  const int64_t begin_ns = monotonic_ns();
  ranks[0].close();
  ranks[0].close();
  sleeper.join();
  CHECK(kind == "closed" && seconds_since(begin_ns) < 1);
  CHECK(error_of([&] { ranks[0].barrier(kLong); }).kind == "closed");
}

TEST_MAIN
