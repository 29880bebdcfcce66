// libhsa-runtime64.so.1: the part of ROCr through which its users make SDMA queues of their own (interface 1.31).
//
// Agent 1 is the CPU, agent n + 2 is device n. A queue's ring lies in system memory, or in the device's where the
// description asks for it; either is uncached.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "node/copy_engines.hpp"
#include "node/device.hpp"
#include "node/node.hpp"

using namespace mori_sim;

namespace {

enum Status {
  kOk = 0, kInvalidArgument = 0x1001, kInvalidQueueCreation = 0x1002, kInvalidAgent = 0x1004,
  kInvalidQueue = 0x1007, kOutOfResources = 0x1008, kNotInitialised = 0x100B,
};
enum AgentInfo { kName = 0, kNode = 16, kDeviceType = 17, kDriverNode = 0xA004, kBdf = 0xA006, kDomain = 0xA00F };
enum QueueInfo { kEngineType = 13, kSdmaEngine = 14, kReadPointer = 15, kWritePointer = 16 };
constexpr uint8_t kSdmaQueue = 1;
constexpr uint16_t kRingInDeviceMemory = 1;
constexpr uint32_t kAnyEngine = UINT32_MAX, kSingleProducer = 1, kCpu = 0, kGpu = 1;
constexpr uint64_t kCpuAgent = 1, kFirstDeviceAgent = 2;
constexpr int64_t kDoorbellSignal = -1;

struct HsaQueue {
  uint32_t type, features;
  void* base;
  uint64_t doorbell_signal;
  uint32_t nbytes, reserved;
  uint64_t id;
};
struct Signal {
  int64_t kind;
  uint64_t* doorbell;
  uint64_t rest[6];
};
struct Description {
  uint16_t version, flags;
  uint8_t engine_type, reserved0[3];
  uint32_t nbytes;
  int priority;
  void (*callback)(int, HsaQueue*, void*);
  void* callback_data;
  HsaQueue* queue;
  uint32_t engine_id, reserved1[7];
  uint32_t traffic_class;
  uint8_t reserved2[20];
};
static_assert(sizeof(HsaQueue) == 40 && sizeof(Signal) == 64 && sizeof(Description) == 96);

struct Made {
  HsaQueue queue{};
  Signal signal{};
  CopyQueue* engine_queue = nullptr;
  uint64_t ring = 0;
};

std::mutex g_mutex;
int g_opened = 0;
std::map<HsaQueue*, std::unique_ptr<Made>> g_queues;

bool is_device(uint64_t agent) {
  return agent >= kFirstDeviceAgent && agent < kFirstDeviceAgent + static_cast<uint64_t>(Node::instance().settings.num_devices);
}
int device_of(uint64_t agent) { return static_cast<int>(agent - kFirstDeviceAgent); }

int answer(void* value, uint32_t word) {
  std::memcpy(value, &word, sizeof word);
  return kOk;
}

bool all_zero(const void* bytes, size_t nbytes) {
  const auto* const p = static_cast<const uint8_t*>(bytes);
  return std::count(p, p + nbytes, 0) == static_cast<std::ptrdiff_t>(nbytes);
}

int refuse(int status, const std::string& why) {
  std::fprintf(stderr, "mori-sim: hsa_amd_queue_create: %s\n", why.c_str());
  return status;
}

int create(uint64_t agent, Description& wanted) {
  wanted.queue = nullptr;
  if (!is_device(agent)) return kInvalidAgent;
  if (wanted.version != 1 || wanted.flags > kRingInDeviceMemory || wanted.nbytes == 0 || (wanted.nbytes & (wanted.nbytes - 1)) ||
      !all_zero(wanted.reserved0, sizeof wanted.reserved0) || !all_zero(wanted.reserved1, sizeof wanted.reserved1) ||
      !all_zero(wanted.reserved2, sizeof wanted.reserved2) || wanted.traffic_class != 0)
    return refuse(kInvalidArgument, "a description of version 1, a power of two of bytes, and zeros where they belong are needed");
  if (wanted.engine_type != kSdmaQueue) return refuse(kInvalidQueueCreation, "only SDMA queues (engine type 1) are simulated");
  Node& node = Node::instance();
  const bool in_device = wanted.flags & kRingInDeviceMemory;
  auto made = std::make_unique<Made>();
  made->ring = node.memory.allocate(std::max<uint64_t>(wanted.nbytes, 4096), in_device ? device_of(agent) : kHostMemory, true,
                                    in_device ? RangeKind::mapped_to_gpu : RangeKind::host);
  node.memory.set_rights(made->ring, 3);
  try {
    const int engine = wanted.engine_id == kAnyEngine ? -1 : static_cast<int>(std::min(wanted.engine_id, 1000u));
    made->engine_queue = node.copy_engines().create(device_of(agent), engine, false, made->ring, wanted.nbytes);
  } catch (const QueueLimit& error) {
    node.memory.release(made->ring);
    return refuse(kOutOfResources, error.what());
  } catch (const std::invalid_argument& error) {
    node.memory.release(made->ring);
    return refuse(kInvalidQueueCreation, error.what());
  }
  made->signal.kind = kDoorbellSignal;
  made->signal.doorbell = made->engine_queue->ring.doorbell;
  made->queue = {kSingleProducer, 0, reinterpret_cast<void*>(made->ring), reinterpret_cast<uint64_t>(&made->signal), wanted.nbytes, 0,
                 made->engine_queue->id};
  wanted.queue = &made->queue;
  g_queues[&made->queue] = std::move(made);
  return kOk;
}

}  // namespace

extern "C" {

int hsa_init() {
  try {
    Node::instance();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mori-sim: hsa_init: %s\n", error.what());
    return kOutOfResources;
  }
  std::lock_guard lock(g_mutex);
  ++g_opened;
  return kOk;
}
int hsa_shut_down() {
  std::lock_guard lock(g_mutex);
  if (g_opened == 0) return kNotInitialised;
  --g_opened;
  return kOk;
}
int hsa_status_string(int status, const char** text) {
  static const std::map<int, const char*> words = {
      {kOk, "HSA_STATUS_SUCCESS"}, {kInvalidArgument, "HSA_STATUS_ERROR_INVALID_ARGUMENT"},
      {kInvalidQueueCreation, "HSA_STATUS_ERROR_INVALID_QUEUE_CREATION"}, {kInvalidAgent, "HSA_STATUS_ERROR_INVALID_AGENT"},
      {kInvalidQueue, "HSA_STATUS_ERROR_INVALID_QUEUE"}, {kOutOfResources, "HSA_STATUS_ERROR_OUT_OF_RESOURCES"},
      {kNotInitialised, "HSA_STATUS_ERROR_NOT_INITIALIZED"}};
  const auto found = words.find(status);
  if (found == words.end() || text == nullptr) return kInvalidArgument;
  *text = found->second;
  return kOk;
}
int hsa_iterate_agents(int (*callback)(uint64_t, void*), void* data) {
  if (g_opened == 0) return kNotInitialised;
  if (callback == nullptr) return kInvalidArgument;
  const uint64_t end = kFirstDeviceAgent + static_cast<uint64_t>(Node::instance().settings.num_devices);
  for (uint64_t agent = kCpuAgent; agent < end; ++agent)
    if (const int status = callback(agent, data)) return status;
  return kOk;
}
int hsa_agent_get_info(uint64_t agent, int attribute, void* value) {
  if (g_opened == 0) return kNotInitialised;
  if (agent != kCpuAgent && !is_device(agent)) return kInvalidAgent;
  if (value == nullptr) return kInvalidArgument;
  const bool gpu = agent != kCpuAgent;
  switch (attribute) {
    case kName: std::memset(value, 0, 64); std::strcpy(static_cast<char*>(value), gpu ? "gfx950" : "CPU"); return kOk;
    case kDeviceType: return answer(value, gpu ? kGpu : kCpu);
    case kNode: case kDriverNode: return answer(value, static_cast<uint32_t>(agent - kCpuAgent));
    case kBdf: return answer(value, gpu ? static_cast<uint32_t>(0x10 + device_of(agent) * 0x10) << 8 : 0);
    case kDomain: return answer(value, 0);
    default: return kInvalidArgument;
  }
}
int hsa_amd_memory_get_preferred_copy_engine(uint64_t to, uint64_t from, uint32_t* engines) {
  if (g_opened == 0) return kNotInitialised;
  if (engines == nullptr || to == from) return kInvalidArgument;
  if (!is_device(from) || (to != kCpuAgent && !is_device(to))) return kInvalidAgent;
  *engines = to == kCpuAgent ? (1u << mi355x::kOrdinaryEngines) - 1
                             : CopyEngines::recommended_engines(Node::instance().settings.num_devices, device_of(from), device_of(to));
  return kOk;
}

// As the runtime does it: the first failure is returned, and the queues before it are there.
int hsa_amd_queue_create(uint64_t agent, Description* descriptions, uint32_t count) {
  if (g_opened == 0) return kNotInitialised;
  if (descriptions == nullptr || count == 0) return kInvalidArgument;
  std::lock_guard lock(g_mutex);
  for (uint32_t i = 0; i < count; ++i)
    if (const int status = create(agent, descriptions[i])) return status;
  return kOk;
}
int hsa_queue_destroy(HsaQueue* queue) {
  std::lock_guard lock(g_mutex);
  const auto found = g_queues.find(queue);
  if (found == g_queues.end()) return kInvalidQueue;
  Node::instance().copy_engines().destroy(found->second->engine_queue);
  Node::instance().memory.release(found->second->ring);
  g_queues.erase(found);
  return kOk;
}
int hsa_amd_queue_get_info(HsaQueue* queue, int attribute, void* value) {
  std::lock_guard lock(g_mutex);
  const auto found = g_queues.find(queue);
  if (found == g_queues.end()) return kInvalidQueue;
  if (value == nullptr) return kInvalidArgument;
  const CopyQueue& q = *found->second->engine_queue;
  const uint64_t address = reinterpret_cast<uint64_t>(attribute == kReadPointer ? q.ring.rptr : q.ring.wptr);
  switch (attribute) {
    case kEngineType: return answer(value, kSdmaQueue);
    case kSdmaEngine: return answer(value, static_cast<uint32_t>(q.engine));
    case kReadPointer: case kWritePointer: std::memcpy(value, &address, sizeof address); return kOk;
    default: return kInvalidArgument;
  }
}

}  // extern "C"
