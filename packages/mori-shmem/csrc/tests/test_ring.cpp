// The ring by itself: wrapping, padding, the full test, order between producers, and pointers that make no sense.
#include <mori_sdma.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "check.h"

namespace {

struct Ring {
  explicit Ring(uint64_t nbytes) : storage(nbytes / 4 + 64) {
    void* base = storage.data();
    size_t space = storage.size() * 4;
    std::align(256, nbytes, base, space);
    ring = {static_cast<uint32_t*>(base), &rptr, &wptr, &doorbell, &reserved, &committed, 0, nbytes};
  }
  std::vector<uint32_t> storage;
  uint64_t rptr = 0, wptr = 0, doorbell = 0, reserved = 0, committed = 0;
  mori_sdma_ring ring;
};

// Counts what arrives: each producer writes its number into fences at rising addresses.
struct Sink {
  std::vector<uint32_t> words = std::vector<uint32_t>(1 << 16);
  static void* resolve(void* user, uint64_t address, uint64_t nbytes, uint32_t) {
    auto& words = static_cast<Sink*>(user)->words;
    return address + nbytes > 4 * words.size() ? nullptr : reinterpret_cast<char*>(words.data()) + address;
  }
  mori_sdma_memory memory{this, &resolve, nullptr, nullptr, nullptr};
};

// One packet of 4 + n dwords; false if the ring is full.
bool produce(Ring& ring, uint64_t dst, const std::vector<uint32_t>& data) {
  mori_sdma_packet write{};
  write.op = MORI_SDMA_WRITE;
  write.dst = dst;
  write.nbytes = 4 * data.size();
  write.data = data.data();
  std::vector<uint32_t> dwords(4 + data.size());
  uint32_t num_dwords = 0;
  CHECK(mori_sdma_encode(&write, 0, dwords.data(), static_cast<uint32_t>(dwords.size()), &num_dwords) == MORI_SDMA_OK);
  uint64_t begin, start, end;
  const int reserved = mori_sdma_ring_reserve(&ring.ring, 4 * num_dwords, &begin, &start, &end);
  CHECK(reserved >= 0);
  if (reserved == 0) return false;
  std::memcpy(mori_sdma_ring_at(&ring.ring, start), dwords.data(), 4 * num_dwords);
  mori_sdma_ring_commit(&ring.ring, begin, end);
  return true;
}

int step(Ring& ring, Sink& sink, mori_sdma_fault* fault = nullptr) {
  mori_sdma_fault unused{};
  return mori_sdma_ring_step(&ring.ring, 0, &sink.memory, fault ? fault : &unused);
}

}  // namespace

TEST(mixed_sizes_wrap_many_times) {
  Ring ring(256);
  Sink sink;
  uint64_t sent = 0, executed = 0;
  for (uint32_t i = 0; i < 5000; ++i) {
    const std::vector<uint32_t> data(1 + i * 7 % 28, i);  // 20 to 128 bytes: up to half the ring
    while (!produce(ring, 4 * (i % 1000), data)) {
      CHECK(step(ring, sink) == MORI_SDMA_DONE);
      ++executed;
    }
    sent += 4 * (4 + data.size());
    CHECK(ring.doorbell - ring.rptr < 256);
  }
  while (step(ring, sink) == MORI_SDMA_DONE) ++executed;
  CHECK(ring.rptr == ring.doorbell && ring.wptr == ring.doorbell && ring.committed == ring.doorbell);
  CHECK(executed >= 5000 && ring.rptr > sent);  // with the padding
  CHECK(sink.words[999] == 4999);
}

TEST(a_ring_is_never_quite_full) {
  Ring ring(256);
  Sink sink;
  int num_sent = 0;
  while (produce(ring, 0, std::vector<uint32_t>(12, 7))) ++num_sent;  // 64 bytes each
  CHECK(num_sent == 3);
  CHECK(step(ring, sink) == MORI_SDMA_DONE);
  CHECK(produce(ring, 0, std::vector<uint32_t>(12, 7)));
}

TEST(sizes_that_a_ring_refuses) {
  Ring ring(256);
  uint64_t begin, start, end;
  for (const uint64_t nbytes : {0, 6, 132, 256})
    CHECK(mori_sdma_ring_reserve(&ring.ring, nbytes, &begin, &start, &end) == -1);
  CHECK(ring.reserved == 0);
  while (produce(ring, 0, {1})) continue;
  begin = start = end = 99;
  CHECK(mori_sdma_ring_reserve(&ring.ring, 20, &begin, &start, &end) == 0);
  CHECK(begin == 99 && start == 99 && end == 99);
}

TEST(pointers_that_make_no_sense) {
  Sink sink;
  for (const uint64_t doorbell : {uint64_t{2}, uint64_t{260}, uint64_t{0} - 4}) {
    Ring ring(256);
    ring.doorbell = doorbell;
    mori_sdma_fault fault{};
    CHECK(step(ring, sink, &fault) == MORI_SDMA_FAULT && fault.reason == MORI_SDMA_BAD_POINTER);
  }
}

TEST(a_packet_may_not_reach_past_the_doorbell_or_the_end) {
  Sink sink;
  Ring ring(256);
  const uint32_t fence[4] = {5, 0, 0, 1};
  std::memcpy(ring.ring.base, fence, 16);
  ring.doorbell = 12;
  mori_sdma_fault fault{};
  CHECK(step(ring, sink, &fault) == MORI_SDMA_FAULT && fault.reason == MORI_SDMA_TRUNCATED);
  CHECK(fault.num_dwords == 3 && fault.dwords[0] == 5);
  ring.rptr = 248;
  ring.doorbell = 264;
  std::memcpy(ring.ring.base + 62, fence, 8);
  CHECK(step(ring, sink, &fault) == MORI_SDMA_FAULT && fault.reason == MORI_SDMA_TRUNCATED && fault.num_dwords == 2);
}

TEST(many_producers_each_in_order) {
  constexpr uint32_t kProducers = 6, kEach = 3000;
  Ring ring(1024);
  Sink sink;
  std::atomic<bool> ok{true};
  std::vector<std::thread> producers;
  for (uint32_t p = 0; p < kProducers; ++p)
    producers.emplace_back([&, p] {
      for (uint32_t i = 1; i <= kEach; ++i)
        while (!produce(ring, 256 * p, std::vector<uint32_t>(1 + (i + p) % 20, i))) std::this_thread::yield();
    });
  uint32_t last[kProducers] = {};
  for (uint32_t done = 0; done < kProducers * kEach;) {
    const int result = step(ring, sink);
    CHECK(result != MORI_SDMA_FAULT);
    if (result == MORI_SDMA_EMPTY) std::this_thread::yield();
    if (result != MORI_SDMA_DONE) continue;
    for (uint32_t p = 0; p < kProducers; ++p) {
      const uint32_t seen = sink.words[64 * p];
      CHECK(seen == last[p] || seen == last[p] + 1);  // NOPs change nothing
      done += seen - last[p];
      last[p] = seen;
    }
  }
  for (std::thread& producer : producers) producer.join();
  CHECK(ok && step(ring, sink) == MORI_SDMA_EMPTY);
}

TEST_MAIN
