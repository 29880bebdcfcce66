#include "node/copy_engines.hpp"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "coherence/checker.hpp"
#include "node/device.hpp"
#include "node/node.hpp"
#include "node/packets.hpp"

namespace mori_sim {
namespace {

constexpr int kNumEngines = mi355x::kOrdinaryEngines + mi355x::kXgmiEngines;
constexpr size_t kMostLanding = 8;      // copies under way in one queue
constexpr int kSpinsBeforeSleep = 50;
constexpr int kShortestSleep_us = 20, kLongestSleep_us = 500;
constexpr uint64_t kDoorbellPageBytes = 8192;
constexpr size_t kMaxQueues = kDoorbellPageBytes / 8;

// From -> to, by socket, as the kernel driver's table for eight of these devices has it: the first engine; the second is next to it.
constexpr int kEngineTo[8][8] = {{-1, 14, 12, 2, 4, 8, 10, 6}, {14, -1, 2, 10, 8, 4, 6, 12}, {10, 2, -1, 12, 14, 6, 4, 8},
                                 {2, 12, 10, -1, 6, 14, 8, 4}, {4, 8, 14, 6, -1, 10, 12, 2}, {8, 4, 6, 14, 12, -1, 2, 10},
                                 {10, 6, 4, 8, 12, 2, -1, 14}, {6, 12, 8, 4, 2, 10, 14, -1}};

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

struct Access {  // what one packet's execution needs to reach memory and to tell the checker
  Node& node;
  CopyQueue& queue;
  const mori_sdma_packet& packet;
  std::string what;
};

void* resolve(void* user, uint64_t address, uint64_t nbytes, uint32_t access) {
  auto& a = *static_cast<Access*>(user);
  if (!a.node.memory.covers(a.queue.device, address, nbytes, access == MORI_SDMA_READ ? 1 : 3)) return nullptr;
  const bool looks = a.packet.op == MORI_SDMA_POLL;  // at a word, until it is met: nothing has to come before
  if (access != MORI_SDMA_OVERWRITE && !looks) a.node.reads(a.queue.name, a.queue.device, address, nbytes, a.what);
  return reinterpret_cast<void*>(address);
}

void written(void* user, uint64_t address, uint64_t nbytes, uint32_t) {
  auto& a = *static_cast<Access*>(user);
  a.node.writes(a.queue.name, a.queue.device, address, nbytes, a.what);
}

}  // namespace

uint32_t CopyEngines::recommended_engines(int num_devices, int from, int to) {
  const uint32_t all_xgmi = ((1u << mi355x::kXgmiEngines) - 1) << mi355x::kOrdinaryEngines;
  if (num_devices != 8) return all_xgmi;  // the driver knows better only for the full board
  return 3u << kEngineTo[from][to];
}

uint64_t CopyEngines::random() {
  random_state_ = random_state_ * 6364136223846793005ull + 1442695040888963407ull;
  return random_state_ >> 33;
}

// ---------------------------------------------------------------------------------------------- queues
CopyQueue* CopyEngines::create(int device, int engine, bool xgmi, uint64_t ring, uint64_t nbytes) {
  PacketLibrary::get();
  if (nbytes < 256 || (nbytes & (nbytes - 1)) || ring % 256 || !node_.memory.covers(device, ring, nbytes, 3))
    throw std::invalid_argument("a ring of " + std::to_string(nbytes) + " bytes: it must be mapped, 256-byte aligned and a power of two from 256 bytes");
  if (engine >= kNumEngines)
    throw std::invalid_argument("engine " + std::to_string(engine) + ": there are " + std::to_string(kNumEngines));
  std::lock_guard lock(mutex_);
  const auto used = [&](int e) {
    return std::count_if(queues_.begin(), queues_.end(), [&](const auto& q) { return q->device == device && q->engine == e; });
  };
  if (engine < 0)
    for (int e = xgmi ? mi355x::kOrdinaryEngines : 0; e < (xgmi ? kNumEngines : mi355x::kOrdinaryEngines); ++e)
      if (engine < 0 || used(e) < used(engine)) engine = e;
  if (used(engine) >= node_.settings.queues_per_engine || queues_.size() >= kMaxQueues)
    throw QueueLimit("no more SDMA queue to allocate: engine " + std::to_string(engine) + " of device " + std::to_string(device) +
                     " has all of its " + std::to_string(node_.settings.queues_per_engine));
  auto queue = std::make_unique<CopyQueue>();
  queue->id = next_id_++;
  queue->device = device;
  queue->engine = engine;
  queue->name = "sdma engine " + std::to_string(engine) + " of device " + std::to_string(device) + ", queue " + std::to_string(queue->id);
  queue->ahead = queue->name + " (at its write pointer)";
  queue->words = node_.memory.allocate(4096, kHostMemory, true, RangeKind::host);
  queue->ring.base = reinterpret_cast<uint32_t*>(ring);
  queue->ring.nbytes = nbytes;
  queue->ring.rptr = reinterpret_cast<uint64_t*>(queue->words);
  queue->ring.wptr = reinterpret_cast<uint64_t*>(queue->words + 64);
  queue->error = reinterpret_cast<int64_t*>(queue->words + 128);
  queue->ring.doorbell = free_doorbell(device, queue->id);
  *queue->ring.doorbell = 0;
  node_.engine_pointer(reinterpret_cast<uint64_t>(queue->ring.doorbell));
  node_.engine_pointer(reinterpret_cast<uint64_t>(queue->ring.wptr));
  queues_.push_back(std::move(queue));
  if (!thread_.joinable()) {
    random_state_ = node_.settings.machine.seed * 2 + 1 + static_cast<uint64_t>(device);
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "mori-sim sdma");
      serve_all();
    });
  }
  wake_.notify_all();
  return queues_.back().get();
}

// One place after the other, so that who rings for a queue that is gone rings for nobody.
uint64_t* CopyEngines::free_doorbell(int device, uint64_t id) {
  uint64_t& page = doorbell_pages_[device];
  if (page == 0) page = node_.memory.allocate(kDoorbellPageBytes, kHostMemory, true, RangeKind::host);
  while (true) {
    uint64_t* const place = reinterpret_cast<uint64_t*>(page) + (id++ % kMaxQueues);
    if (std::none_of(queues_.begin(), queues_.end(), [&](const auto& q) { return q->ring.doorbell == place; })) return place;
  }
}

void CopyEngines::destroy(CopyQueue* queue) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(queues_.begin(), queues_.end(), [&](const auto& q) { return q.get() == queue; });
  if (found == queues_.end()) throw std::invalid_argument("not a queue of this process");
  node_.forget(reinterpret_cast<uint64_t>(queue->ring.doorbell), 8);
  node_.memory.release(queue->words);
  queues_.erase(found);
}

void CopyEngines::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

// ---------------------------------------------------------------------------------------------- the engine thread
void CopyEngines::serve_all() {
  int idle_rounds = 0;
  while (true) {
    bool moved = false;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !queues_.empty(); });
      if (stopping_) return;
      for (const auto& queue : queues_) moved |= serve(*queue);
    }
    idle_rounds = moved ? 0 : idle_rounds + 1;
    if (idle_rounds > kSpinsBeforeSleep)
      usleep(static_cast<useconds_t>(std::min(kLongestSleep_us, kShortestSleep_us * (idle_rounds / kSpinsBeforeSleep))));
  }
}

bool CopyEngines::drawn_delay_has_passed(CopyQueue& queue) {
  if (node_.settings.copy_delay_us <= 0) return true;
  const uint64_t now = now_ns();
  if (!queue.delay_drawn) {
    queue.not_before_ns = now + static_cast<uint64_t>(node_.settings.copy_delay_us * 1000.0 * static_cast<double>(random() & 0xffff) / 65536.0);
    queue.delay_drawn = true;
  }
  if (now < queue.not_before_ns) return false;
  queue.delay_drawn = false;
  return true;
}

// One packet at most. True when anything happened.
bool CopyEngines::serve(CopyQueue& queue) {
  if (node_.settings.missing_engines >> queue.engine & 1) return false;
  if (node_.sticky_code() != 0) return false;
  const PacketLibrary& packets = PacketLibrary::get();
  const uint32_t flags = node_.settings.short_copies ? MORI_SDMA_COPY_22BIT : 0;
  const uint32_t* dwords = nullptr;
  uint64_t available = 0;
  mori_sdma_fault bad{};
  if (const mori_sdma_reason reason = packets.ring_next(&queue.ring, &dwords, &available); reason != MORI_SDMA_OK) {
    bad.reason = reason;
    fault(queue, bad);
    return false;
  }
  if (available == 0) {
    if (queue.landing.empty() || (random() & 15) != 0) return false;
    land(queue, queue.landing.size() - 1);  // idle: what was noted lands by and by
    return true;
  }
  if (__atomic_load_n(queue.ring.doorbell, __ATOMIC_ACQUIRE) != queue.seen_doorbell && !look_at_pointers(queue)) {
    bad.reason = MORI_SDMA_BAD_POINTER;
    fault(queue, bad);
    return false;
  }
  mori_sdma_packet packet{};
  if (const mori_sdma_reason reason = packets.decode(dwords, available, flags, &packet); reason != MORI_SDMA_OK) {
    bad.reason = reason;
    packets.fault_dwords(&bad, dwords, available);
    fault(queue, bad);
    return false;
  }
  if (!drawn_delay_has_passed(queue)) return false;
  node_.reads(queue.name, queue.device, reinterpret_cast<uint64_t>(dwords), uint64_t{packet.num_dwords} * 4, "packet fetch");
  node_.reads(queue.ahead, queue.device, reinterpret_cast<uint64_t>(dwords), uint64_t{packet.num_dwords} * 4, kPossibleFetch);
  if (packet.op == MORI_SDMA_COPY && node_.settings.lazy_copies) {
    queue.landing.push_back(packet);
    if (queue.landing.size() > kMostLanding) land(queue, kMostLanding / 2);
  } else {
    if (packet.op != MORI_SDMA_NOP) land(queue, 0);
    if (!run(queue, packet, dwords, available)) return false;
  }
  const auto waves_held = node_.hold_waves();
  packets.ring_retire(&queue.ring, packet.num_dwords);
  node_.writes(queue.name, queue.device, reinterpret_cast<uint64_t>(queue.ring.rptr), 8, "read pointer");
  return true;
}

// What the engine acts on from now on. False: the doorbell is ahead of the write pointer.
bool CopyEngines::look_at_pointers(CopyQueue& queue) {
  node_.delay_record();
  const auto waves_held = node_.hold_waves();
  const uint64_t doorbell = __atomic_load_n(queue.ring.doorbell, __ATOMIC_ACQUIRE);
  const uint64_t written = __atomic_load_n(queue.ring.wptr, __ATOMIC_ACQUIRE);
  const uint64_t pointer = reinterpret_cast<uint64_t>(queue.ring.wptr);
  queue.seen_doorbell = doorbell;
  node_.observed(queue.name, queue.device, reinterpret_cast<uint64_t>(queue.ring.doorbell), doorbell);
  node_.observed(queue.ahead, queue.device, pointer, written);
  // A pointer above the doorbell is another wave's, which has not rung yet: this doorbell says nothing of it.
  if (written == doorbell) node_.reads(queue.name, queue.device, pointer, 8, kPossibleFetch);
  return written >= doorbell;
}

// Lets noted copies land in random order until only `leave` are under way.
void CopyEngines::land(CopyQueue& queue, size_t leave) {
  while (queue.landing.size() > leave) {
    const size_t pick = random() % queue.landing.size();
    const mori_sdma_packet packet = queue.landing[pick];
    queue.landing.erase(queue.landing.begin() + static_cast<std::ptrdiff_t>(pick));
    if (!run(queue, packet, nullptr, 0)) return;
  }
}

// False: blocked (to be tried again) or faulted.
bool CopyEngines::run(CopyQueue& queue, const mori_sdma_packet& packet, const uint32_t* dwords, uint64_t available) {
  const PacketLibrary& packets = PacketLibrary::get();
  Access access{node_, queue, packet, node_.settings.machine.strict ? packets.op_name(packet.op, packet.sub_op) : ""};
  const mori_sdma_memory memory{&access, resolve, written, nullptr, nullptr};
  mori_sdma_fault bad{};
  const auto waves_held = node_.hold_waves();
  const int outcome = packets.execute(&packet, &memory, &bad);
  if (outcome == MORI_SDMA_DONE) {
    if (packet.op == MORI_SDMA_POLL) node_.polled(queue.name, queue.device, packet.dst, 4);
    return true;
  }
  if (outcome == MORI_SDMA_FAULT) {
    if (dwords != nullptr) packets.fault_dwords(&bad, dwords, available);
    fault(queue, bad);
  }
  return false;
}

void CopyEngines::fault(CopyQueue& queue, const mori_sdma_fault& bad) {
  const PacketLibrary& packets = PacketLibrary::get();
  char line[160];
  std::snprintf(line, sizeof line, ": %s; read pointer %llu, write pointer %llu, doorbell %llu", packets.reason_name(bad.reason),
                static_cast<unsigned long long>(*queue.ring.rptr), static_cast<unsigned long long>(*queue.ring.wptr),
                static_cast<unsigned long long>(*queue.ring.doorbell));
  std::string text = queue.name + line;
  if (bad.num_dwords > 0) {
    text += "\n  packet " + std::string(packets.op_name(bad.dwords[0] & 0xff, bad.dwords[0] >> 8 & 0xff)) + ":";
    for (uint32_t i = 0; i < bad.num_dwords; ++i) {
      std::snprintf(line, sizeof line, " %08x", bad.dwords[i]);
      text += line;
    }
  }
  if (bad.nbytes > 0) text += "\n  access of " + std::to_string(bad.nbytes) + " bytes: " + node_.memory.describe_access(queue.device, bad.address, bad.nbytes);
  *queue.error = 1;
  node_.fail(kIllegalAddress, text);
}

}  // namespace mori_sim
