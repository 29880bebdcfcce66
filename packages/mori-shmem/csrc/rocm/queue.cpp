#include "rocm/queue.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "host/clock.h"

namespace mori::rocm {

namespace {

constexpr uint64_t kProbeBytes = 64;
constexpr uint64_t kPacketDwords = 8;  // in a queue for kernels every packet has 32 bytes
constexpr unsigned kShortSleep_us = 20;

mori_sdma_packet fence(uint64_t address, uint32_t value) {
  mori_sdma_packet packet{};
  packet.op = MORI_SDMA_FENCE;
  packet.dst = address;
  packet.value = value;
  return packet;
}

mori_sdma_packet copy(uint64_t dst, uint64_t src, uint64_t nbytes) {
  mori_sdma_packet packet{};
  packet.op = MORI_SDMA_COPY;
  packet.dst = dst;
  packet.src = src;
  packet.nbytes = nbytes;
  return packet;
}

mori_sdma_packet poll(uint64_t address, uint32_t at_least) {
  mori_sdma_packet packet{};
  packet.op = MORI_SDMA_POLL;
  packet.func = MORI_SDMA_GREATER_EQUAL;
  packet.dst = address;
  packet.value = at_least;
  packet.compare = UINT32_MAX;
  packet.interval = 4;
  packet.retry = 0xfff;
  return packet;
}

// Zero dwords are NOPs.
Packets padded(const Packets& packets) {
  Packets out;
  uint64_t begin = 0;
  for (const uint64_t end : packets.ends) {
    out.dwords.insert(out.dwords.end(), packets.dwords.begin() + static_cast<std::ptrdiff_t>(begin),
                      packets.dwords.begin() + static_cast<std::ptrdiff_t>(end));
    out.dwords.resize((out.dwords.size() + kPacketDwords - 1) / kPacketDwords * kPacketDwords);
    out.ends.push_back(out.dwords.size());
    begin = end;
  }
  return out;
}

}  // namespace

Queue::Queue(std::shared_ptr<const Device> device, Way way, uint32_t engine_, uint64_t ring_bytes, bool for_kernels)
    : engine(engine_),
      device_(std::move(device)),
      for_kernels_(for_kernels),
      words_(device_->ordinal, 8 * kNumWords, rocm::Place::kHost),
      joined_(device_->ordinal, 8, rocm::Place::kSignal),
      hardware_(create_hardware_queue(way, *device_, engine_, ring_bytes, for_kernels)) {
  ring_ = {static_cast<uint32_t*>(hardware_->ring), hardware_->read_pointer, hardware_->write_pointer, hardware_->doorbell,
           &reserved_,                              &committed_,             0,                        hardware_->nbytes};
}

Queue::~Queue() = default;

// ---- packets into the ring -----------------------------------------------------------------------------------------

void Queue::add_to_ring(const uint32_t* dwords, uint64_t num_dwords, int64_t deadline_ns) {
  uint64_t begin = 0, start = 0, end = 0;
  while (true) {
    const int result = mori_sdma_ring_reserve(&ring_, 4 * num_dwords, &begin, &start, &end);
    if (result > 0) break;
    if (result < 0) throw bad_value("packet bytes", 4 * num_dwords, "a multiple of 4, at most half the ring");
    if (monotonic_ns() > deadline_ns)
      throw Error("timeout", {{"what", std::string("ring_space")},
                              {"seen", completed_bytes()},
                              {"wanted", committed_ + 4 * num_dwords - ring_.nbytes}});
    usleep(kShortSleep_us);
  }
  uint32_t* const place = mori_sdma_ring_at(&ring_, start);
  if (for_kernels_) device_->write(reinterpret_cast<uint64_t>(place), dwords, 4 * num_dwords);
  else std::memcpy(place, dwords, 4 * num_dwords);
  mori_sdma_ring_commit(&ring_, begin, end);
}

void Queue::submit(const Packets& packets, uint64_t ticket, int64_t timeout_ns) {
  const int64_t now = monotonic_ns();
  const int64_t deadline_ns = timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
  if (ticket) {
    Packets gate;
    gate.append(poll(go(), static_cast<uint32_t>(ticket)));
    add_to_ring(gate.dwords.data(), gate.dwords.size(), deadline_ns);
  }
  const uint64_t group_dwords = ring_.nbytes / 4 / 4;  // a quarter of the ring: the next group is written meanwhile
  for (size_t first = 0; first < packets.ends.size();) {
    const uint64_t begin = first == 0 ? 0 : packets.ends[first - 1];
    size_t last = first;
    while (last + 1 < packets.ends.size() && packets.ends[last + 1] - begin <= group_dwords) ++last;
    add_to_ring(packets.dwords.data() + begin, packets.ends[last] - begin, deadline_ns);
    first = last + 1;
  }
}

uint64_t Queue::mark(int64_t timeout_ns) {
  Packets packets;
  packets.append(fence(words_.address() + 8 * kDone, static_cast<uint32_t>(++marks_)));
  const uint64_t mark = marks_;
  submit(packets, 0, timeout_ns);
  return mark;
}

bool Queue::reached(uint64_t mark) const {
  const uint32_t done = static_cast<uint32_t>(__atomic_load_n(words_.word(kDone), __ATOMIC_ACQUIRE));
  return static_cast<int32_t>(done - static_cast<uint32_t>(mark)) >= 0;
}

uint64_t Queue::fetch(uint64_t address, int64_t timeout_ns) {
  Packets packets;
  packets.append(copy(words_.address() + 8 * kFetched, address, 8));
  submit(packets, 0, timeout_ns);
  return mark(timeout_ns);
}

uint64_t Queue::join(int64_t timeout_ns) {
  Packets packets;
  mori_sdma_packet add{};
  add.op = MORI_SDMA_ATOMIC;
  add.func = MORI_SDMA_ATOMIC_ADD;
  add.dst = joined();
  add.value = 1;
  packets.append(add);
  submit(packets, 0, timeout_ns);
  return ++joins_;
}

// ---- does it run? --------------------------------------------------------------------------------------------------

void Queue::probe(uint64_t scratch, int64_t timeout_ns) {
  const uint64_t pattern = words_.address() + 8 * kPattern, landing = words_.address() + 8 * kLanding;
  for (uint64_t i = 0; i < kProbeBytes / 8; ++i)
    *words_.word(kPattern + i) = (i + 1) * 0x9e3779b97f4a7c15ull ^ reinterpret_cast<uint64_t>(hardware_->doorbell);
  Packets packets;
  packets.append(copy(scratch, pattern, kProbeBytes));
  packets.append(fence(words_.address() + 8 * kDone, static_cast<uint32_t>(++marks_)));  // or the copies could overlap
  packets.append(copy(landing, scratch, kProbeBytes));
  packets.append(fence(words_.address() + 8 * kDone, static_cast<uint32_t>(++marks_)));
  submit(for_kernels_ ? padded(packets) : packets, 0, timeout_ns);
  wait_for_probe(marks_, monotonic_ns() + timeout_ns);
  if (std::memcmp(words_.word(kLanding), words_.word(kPattern), kProbeBytes) == 0) return;
  throw Error("inert_queue", {{"engine", int64_t{engine}}, {"how", std::string("its probe came back with wrong bytes")}});
}

void Queue::wait_for_probe(uint64_t mark, int64_t deadline_ns) {
  while (!reached(mark)) {
    if (monotonic_ns() > deadline_ns)
      throw Error("inert_queue", {{"engine", int64_t{engine}},
                                  {"how", "its probe did not come back: the read pointer stands at " +
                                              std::to_string(completed_bytes()) + " of " + std::to_string(committed_) +
                                              " bytes"}});
    usleep(kShortSleep_us);
  }
}

}  // namespace mori::rocm
