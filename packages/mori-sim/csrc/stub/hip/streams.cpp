// Streams, the values they write and wait for, and events.
#include <chrono>

#include "stub/hip/door.hpp"

using namespace mori_sim;

extern "C" {

int hipStreamCreateWithFlags(void** out, unsigned flags) {
  HIP("hipStreamCreateWithFlags", { need(out, "stream"); *out = node().create_stream(node().current_device(), (flags & 1) == 0); });
}
int hipStreamCreate(void** out) { return hipStreamCreateWithFlags(out, 0); }
int hipStreamCreateWithPriority(void** out, unsigned flags, int) { return hipStreamCreateWithFlags(out, flags); }
int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  HIP("hipDeviceGetStreamPriorityRange", {
    if (least != nullptr) *least = 1;
    if (greatest != nullptr) *greatest = -1;
  });
}
int hipStreamDestroy(void* stream) {
  HIP("hipStreamDestroy", {
    if (reinterpret_cast<uintptr_t>(stream) <= 2) throw ApiError(kInvalidHandle, "the null stream cannot be destroyed");
    node().destroy_stream(node().known(stream));
  });
}
int hipStreamSynchronize(void* stream) { HIP("hipStreamSynchronize", { node().synchronize(node().known(stream)); }); }
int hipStreamQuery(void* stream) {
  HIP("hipStreamQuery", { if (!node().finished(node().known(stream))) throw ApiError(kNotReady, "not finished"); });
}
int hipStreamWaitEvent(void* stream, void* event, unsigned) {
  HIP("hipStreamWaitEvent", { need(event, "event"); node().wait_event(node().known(stream), static_cast<Event*>(event)); });
}
int hipStreamGetDevice(void* stream, int* device) {
  HIP("hipStreamGetDevice", { need(device, "device"); *device = node().ordinal(node().known(stream)->device); });
}
int hipStreamWriteValue32(void* stream, void* where, uint32_t value, unsigned) {
  HIP("hipStreamWriteValue32", { node().write_value(node().known(stream), at(where), value, 4); });
}
int hipStreamWriteValue64(void* stream, void* where, uint64_t value, unsigned) {
  HIP("hipStreamWriteValue64", { node().write_value(node().known(stream), at(where), value, 8); });
}
int hipStreamWaitValue32(void* stream, void* where, uint32_t value, unsigned compare, uint32_t mask) {
  HIP("hipStreamWaitValue32", { node().wait_value(node().known(stream), at(where), value, 4, compare, mask); });
}
int hipStreamWaitValue64(void* stream, void* where, uint64_t value, unsigned compare, uint64_t mask) {
  HIP("hipStreamWaitValue64", { node().wait_value(node().known(stream), at(where), value, 8, compare, mask); });
}
int hipLaunchHostFunc(void* stream, void (*call)(void*), void* argument) {
  HIP("hipLaunchHostFunc", { node().host_call(node().known(stream), [=] { call(argument); }); });
}
int hipEventCreateWithFlags(void** out, unsigned) { HIP("hipEventCreateWithFlags", { need(out, "event"); *out = new Event(); }); }
int hipEventCreate(void** out) { return hipEventCreateWithFlags(out, 0); }
int hipEventDestroy(void* event) { HIP("hipEventDestroy", { need(event, "event"); delete static_cast<Event*>(event); }); }
int hipEventRecord(void* event, void* stream) {
  HIP("hipEventRecord", { need(event, "event"); node().record(static_cast<Event*>(event), node().known(stream)); });
}
int hipEventSynchronize(void* event) { HIP("hipEventSynchronize", { need(event, "event"); node().synchronize_mark(static_cast<Event*>(event)->recorded); }); }
int hipEventQuery(void* event) {
  HIP("hipEventQuery", {
    need(event, "event");
    const MarkPtr& mark = static_cast<Event*>(event)->recorded;
    if (mark != nullptr && !mark->reached) throw ApiError(kNotReady, "not finished");
    node().check_alive();
  });
}
int hipEventElapsedTime(float* ms, void* from, void* to) {
  HIP("hipEventElapsedTime", {
    need(ms, "time");
    const MarkPtr &first = static_cast<Event*>(from)->recorded, &second = static_cast<Event*>(to)->recorded;
    if (first == nullptr || second == nullptr) throw ApiError(kInvalidHandle, "an event was never recorded");
    if (!first->reached || !second->reached) throw ApiError(kNotReady, "not finished");
    *ms = std::chrono::duration<float, std::milli>(second->when - first->when).count();  // the simulator's time, not the device's
  });
}

}  // extern "C"
