// Bounded stress: many threads, few cores, the smallest rings. Loopback puts let ThreadSanitizer see data and signals at
// one address, so a missing order between a copy and its signal is a report.
#include <cstring>
#include <thread>

#include "host/clock.h"
#include "ranks.h"

using namespace mori;

namespace {

constexpr int64_t kLong = 60'000'000'000;
constexpr uint32_t kAtLeast = MORI_SDMA_GREATER_EQUAL;

Settings tight(uint64_t ring_bytes, int num_engines = 1) {
  Settings settings = small_settings();
  settings.timeout_ns = kLong;
  settings.ring_bytes = ring_bytes;
  settings.num_engines = num_engines;
  return settings;
}

}  // namespace

TEST(mixed_sizes_through_the_smallest_ring) {
  Ranks ranks(2, 4 << 20, tight(kMinRingBytes));
  Queue& queue = queue_of(ranks[0], 1);
  constexpr uint64_t kSizes[] = {4, 20, 256, 4096, 65536};
  for (int i = 0; i < 65536; ++i) ranks.bytes(0, 0, 0)[i] = static_cast<char>(i % 113);
  for (uint64_t i = 0; i < 10000; ++i) {
    put(queue, ranks.at(0, 1, 4096 + i % 16 * 65536), ranks.at(0, 0, 0), kSizes[i % 5]);
    if (i % 3 == 0) signal(queue, ranks.at(0, 1, 0), 1, SignalOp::kAdd);
  }
  queue.quiet(kLong);
  CHECK(ranks[1].read(ranks.at(1, 1, 0)) == 3334);
  for (uint64_t slot = 0; slot < 16; ++slot)
    CHECK(std::memcmp(ranks.bytes(1, 1, 4096 + slot * 65536), ranks.bytes(0, 0, 0), 65536) == 0);
}

TEST(eight_issuers_share_a_queue) {
  Ranks ranks(2, 1 << 20, tight(1024));
  Queue& queue = queue_of(ranks[0], 1);
  std::vector<std::thread> issuers;
  for (uint64_t issuer = 0; issuer < 8; ++issuer)
    issuers.emplace_back([&, issuer] {
      for (uint64_t i = 1; i <= 1000; ++i) {
        submit(queue, [&](Program& p) {
          p.put(ranks.at(0, 1, 4096 * (1 + issuer)), ranks.at(0, 0, 4096 * (1 + issuer)), 8 + i % 512);
          p.signal(ranks.at(0, 1, 8 * issuer), i, SignalOp::kSet);
          p.signal(ranks.at(0, 1, 64), 1, SignalOp::kAdd);
        });
        if (i % 100 == 0) queue.quiet(kLong);
      }
    });
  for (std::thread& issuer : issuers) issuer.join();
  queue.quiet(kLong);
  CHECK(ranks[1].wait(ranks.at(1, 1, 64), 8000, MORI_SDMA_EQUAL, 0, kLong) == 8000);
  for (uint64_t issuer = 0; issuer < 8; ++issuer) CHECK(ranks[1].read(ranks.at(1, 1, 8 * issuer)) == 1000);
}

// A ring of threads of one rank: each waits for its flag, changes its data, puts it to the next and signals.
TEST(signals_order_data) {
  constexpr int kThreads = 4;
  constexpr uint64_t kRounds = 300, kWords = 64;
  Ranks ranks(1, 1 << 20, tight(4096, 2));
  const auto data = [&](int i) { return reinterpret_cast<uint64_t*>(ranks.at(0, 0, 4096 + 8192 * static_cast<uint64_t>(i))); };
  const auto flag = [&](int i) { return ranks.at(0, 0, 64 * static_cast<uint64_t>(i)); };
  std::vector<std::thread> threads;
  for (int me = 0; me < kThreads; ++me)
    threads.emplace_back([&, me] {
      const int next = (me + 1) % kThreads;
      Queue& queue = queue_of(ranks[0], 0, me);
      for (uint64_t round = 0; round < kRounds; ++round) {
        if (me != 0 || round != 0) ranks[0].wait(flag(me), me == 0 ? round : round + 1, kAtLeast, -1, kLong);
        for (uint64_t i = 0; i < kWords; ++i) {
          CHECK(data(me)[i] == round * kThreads + static_cast<uint64_t>(me));
          data(me)[i] += 1;
        }
        submit(queue, [&](Program& p) {
          p.put(reinterpret_cast<uint64_t>(data(next)), reinterpret_cast<uint64_t>(data(me)), 8 * kWords);
          p.signal(flag(next), round + 1, SignalOp::kSet);
        });
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(queues_and_engines_under_load) {
  Ranks ranks(2, 16 << 20, tight(2048, 2));
  std::vector<std::thread> issuers;
  for (int index = 0; index < 4; ++index)
    issuers.emplace_back([&, index] {
      Queue& queue = queue_of(ranks[0], 1, index);
      const uint64_t flag = 64 * static_cast<uint64_t>(index), block = (2 + static_cast<uint64_t>(index)) << 20;
      for (uint64_t round = 1; round <= 40; ++round) {
        std::memset(ranks.bytes(0, 0, block), static_cast<int>(round), 1 << 20);
        submit(queue, [&](Program& p) {
          p.wait(ranks.at(0, 0, flag), round, kAtLeast);
          p.put(ranks.at(0, 1, block), ranks.at(0, 0, block), 1 << 20);
          p.signal(ranks.at(0, 1, flag), round, SignalOp::kSet);
        });
        ranks[0].signal(ranks.at(0, 0, flag), round, SignalOp::kSet);
        ranks[1].wait(ranks.at(1, 1, flag), round, kAtLeast, 0, kLong);
        CHECK(*ranks.bytes(1, 1, block) == static_cast<char>(round));
        CHECK(*ranks.bytes(1, 1, block + (1 << 20) - 1) == static_cast<char>(round));
        queue.quiet(kLong);
      }
    });
  for (std::thread& issuer : issuers) issuer.join();
}

TEST(eight_ranks_exchange_at_once) {
  constexpr int kRanks = 8;
  constexpr uint64_t kRounds = 60, kBytes = 20000;
  Ranks ranks(kRanks, 1 << 20, tight(4096));
  std::vector<std::thread> threads;
  for (int me = 0; me < kRanks; ++me)
    threads.emplace_back([&, me] {
      const auto slot = [](uint64_t parity, int from) { return 65536 + (parity * kRanks + static_cast<uint64_t>(from)) * 20480; };
      for (uint64_t round = 1; round <= kRounds; ++round) {
        std::memset(ranks.bytes(me, me, 4096), static_cast<int>(round + static_cast<uint64_t>(me)), kBytes);
        for (int i = 1; i < kRanks; ++i) {
          const int to = (me + i) % kRanks;
          Queue& queue = queue_of(ranks[me], to);
          put(queue, ranks.at(me, to, slot(round % 2, me)), ranks.at(me, me, 4096), kBytes);
          signal(queue, ranks.at(me, to, 8 * static_cast<uint64_t>(me)), round);
        }
        for (int from = 0; from < kRanks; ++from) {
          if (from == me) continue;
          ranks[me].wait(ranks.at(me, me, 8 * static_cast<uint64_t>(from)), round, kAtLeast, from, kLong);
          const char wanted = static_cast<char>(round + static_cast<uint64_t>(from));
          CHECK(*ranks.bytes(me, me, slot(round % 2, from)) == wanted);
          CHECK(*ranks.bytes(me, me, slot(round % 2, from) + kBytes - 1) == wanted);
        }
        for (int i = 1; i < kRanks; ++i) queue_of(ranks[me], (me + i) % kRanks).quiet(kLong);
        ranks[me].barrier(kLong);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_MAIN
