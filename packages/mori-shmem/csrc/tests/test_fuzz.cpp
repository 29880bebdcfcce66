// Random and damaged packets: never a crash, never a byte outside what resolve offers, and what is refused changes nothing.
// (Under AddressSanitizer the arena has real red zones around it.)
#include <mori_sdma.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "check.h"

namespace {

constexpr uint64_t kBase = 0x10000;
constexpr uint64_t kBytes = 8192;

struct Arena {
  std::unique_ptr<unsigned char[]> bytes{new unsigned char[kBytes]()};
  static void* resolve(void* user, uint64_t address, uint64_t nbytes, uint32_t) {
    CHECK(nbytes > 0);
    if (address < kBase || nbytes > kBytes || address - kBase > kBytes - nbytes) return nullptr;
    return static_cast<Arena*>(user)->bytes.get() + (address - kBase);
  }
  mori_sdma_memory memory{this, &resolve, nullptr, nullptr, nullptr};
};

using Random = std::mt19937_64;

uint32_t dword(Random& random) { return static_cast<uint32_t>(random()); }

std::vector<uint32_t> poll(Random& random) {
  const auto address = static_cast<uint32_t>(kBase + 4 * (random() % (kBytes / 4)));
  return {0x80000008u | static_cast<uint32_t>(random() % 8) << 28, address, 0, dword(random), dword(random), 0x0fff0004};
}

// A packet of a known kind, most of the time with addresses inside the arena.
std::vector<uint32_t> plausible(Random& random) {
  static const uint32_t ops[] = {0, 1, 2, 5, 6, 8, 10, 11, 13};
  if (random() % 8 == 0) return poll(random);
  std::vector<uint32_t> dwords(2 + random() % 24);
  for (uint32_t& d : dwords) d = random() % 3 ? static_cast<uint32_t>(kBase + random() % kBytes) : dword(random);
  dwords[0] = ops[random() % 9] | (random() % 2 ? dword(random) & 0xffff0000u : 0) | (random() % 2 ? 0xd0000000u : 0);
  for (const size_t i : {2u, 4u, 6u})
    if (i < dwords.size() && random() % 4) dwords[i] = 0;
  if (dwords.size() > 1 && random() % 2) dwords[1] = static_cast<uint32_t>(random() % 600);
  if (dwords.size() > 5 && random() % 2) dwords[5] = 0x0fff0004;
  return dwords;
}

std::vector<uint32_t> noise(Random& random) {
  std::vector<uint32_t> dwords(random() % 20);
  for (uint32_t& d : dwords) d = dword(random);
  return dwords;
}

void run(const std::vector<uint32_t>& dwords, Arena& arena, int* outcomes) {
  // An exact copy on the heap: reading past the end of a packet is then an error that AddressSanitizer sees.
  std::unique_ptr<uint32_t[]> exact(new uint32_t[dwords.size()]);
  std::copy(dwords.begin(), dwords.end(), exact.get());
  mori_sdma_packet packet;
  mori_sdma_fault fault{};
  if (mori_sdma_decode(exact.get(), dwords.size(), 0, &packet) != MORI_SDMA_OK) {
    ++outcomes[3];
    mori_sdma_fault_dwords(&fault, exact.get(), dwords.size());
    CHECK(fault.num_dwords <= 16 && fault.num_dwords <= dwords.size());
    return;
  }
  std::vector<uint32_t> again(packet.num_dwords);
  uint32_t num_dwords = 0;
  CHECK(mori_sdma_encode(&packet, 0, again.data(), packet.num_dwords, &num_dwords) == MORI_SDMA_OK);
  CHECK(num_dwords == packet.num_dwords);
  const std::vector<unsigned char> before(arena.bytes.get(), arena.bytes.get() + kBytes);
  const int outcome = mori_sdma_execute(&packet, &arena.memory, &fault);
  if (outcome != MORI_SDMA_DONE) CHECK(std::memcmp(before.data(), arena.bytes.get(), kBytes) == 0);
  ++outcomes[outcome];
}

}  // namespace

TEST(random_packets) {
  Random random(20261130);
  Arena arena;
  int outcomes[4] = {};
  for (int i = 0; i < 40000; ++i) run(i % 4 ? plausible(random) : noise(random), arena, outcomes);
  std::printf("  done %d, blocked %d, faults %d, malformed %d\n", outcomes[0], outcomes[1], outcomes[2], outcomes[3]);
  for (const int count : outcomes) CHECK(count > 100);  // all ways were taken
}

TEST(random_rings) {
  Random random(7);
  for (int round = 0; round < 2000; ++round) {
    Arena arena;
    std::vector<uint32_t> storage(64);
    for (uint32_t& d : storage) d = random() % 3 ? static_cast<uint32_t>(random() % 14) : dword(random);
    uint64_t rptr = 4 * (random() % 64) + 256 * (random() % 8);
    uint64_t doorbell = random() % 8 ? rptr + 4 * (random() % 64) : random();
    uint64_t unused = 0;
    mori_sdma_ring ring{storage.data(), &rptr, &unused, &doorbell, &unused, &unused, 0, 256};
    mori_sdma_fault fault{};
    int outcome = MORI_SDMA_DONE;
    for (int steps = 0; outcome == MORI_SDMA_DONE; ++steps) {
      CHECK(steps <= 64);
      outcome = mori_sdma_ring_step(&ring, 0, &arena.memory, &fault);
    }
    CHECK(outcome != MORI_SDMA_EMPTY || rptr == doorbell);
  }
}

TEST_MAIN
