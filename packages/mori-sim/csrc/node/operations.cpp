// What a stream does besides kernels: copies, fills, values written and waited for, host calls, events.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "node/node.hpp"

namespace mori_sim {

constexpr uint64_t kSparseBytes = 64 << 20;

void Node::check_reachable(int device, uint64_t address, uint64_t nbytes, uint8_t rights, const char* what) {
  Range range;
  const bool tracked = memory.find(address, &range) || memory.reserved(address);
  if (!tracked) {  // an ordinary host pointer: only a run into tracked memory could be noticed
    if (address == 0) throw ApiError(kInvalidValue, std::string(what) + ": null pointer");
    return;
  }
  if (address + nbytes > range.end || range.end == 0) {
    if (!memory.covers(device, address, nbytes, rights))
      throw ApiError(kInvalidValue, std::string(what) + " of " + std::to_string(nbytes) + " bytes: " + memory.describe(std::max(address, range.end)));
  }
}

void Node::copy(Stream* stream, uint64_t to, uint64_t from, uint64_t nbytes) {
  if (nbytes == 0) return;
  check_reachable(stream->device, to, nbytes, 2, "copy to");
  check_reachable(stream->device, from, nbytes, 1, "copy from");
  const int device = stream->device;
  enqueue(stream, "copy", [=] {
    return [=](Operation&) {
      const auto waves_held = hold_waves();
      reads("host", device, from, nbytes, "hipMemcpy");
      std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
      writes("host", device, to, nbytes, "hipMemcpy");
      return true;
    };
  });
}

void Node::fill(Stream* stream, uint64_t to, uint64_t value, unsigned width, uint64_t count) {
  if (count == 0) return;
  check_reachable(stream->device, to, count * width, 2, "fill of");
  const int device = stream->device;
  enqueue(stream, "fill", [=] {
    return [=](Operation&) {
      const auto waves_held = hold_waves();
      auto* out = reinterpret_cast<uint8_t*>(to);
      const uint64_t nbytes = count * width;  // zeroed, large memory that nobody touches has no pages
      uint64_t done = value == 0 && nbytes >= kSparseBytes ? nbytes - nbytes % sysconf(_SC_PAGESIZE) : 0;
      if (done > 0 && madvise(out, done, MADV_REMOVE) != 0) done = 0;
      if (width == 1) std::memset(out + done, static_cast<int>(value), nbytes - done);
      else
        for (uint64_t at = done; at < nbytes; at += width) std::memcpy(out + at, &value, width);
      writes("host", device, to, nbytes, "hipMemset");
      return true;
    };
  });
}

void Node::write_value(Stream* stream, uint64_t to, uint64_t value, unsigned width) {
  check_reachable(stream->device, to, width, 2, "hipStreamWriteValue to");
  if (to % width) throw ApiError(kInvalidValue, "hipStreamWriteValue: the address is not aligned");
  const int device = stream->device;
  enqueue(stream, "write value", [=] {
    return [=](Operation&) {
      const auto waves_held = hold_waves();
      if (width == 4) __atomic_store_n(reinterpret_cast<uint32_t*>(to), static_cast<uint32_t>(value), __ATOMIC_RELEASE);
      else __atomic_store_n(reinterpret_cast<uint64_t*>(to), value, __ATOMIC_RELEASE);
      writes("host", device, to, width, "hipStreamWriteValue");
      return true;
    };
  });
}

void Node::wait_value(Stream* stream, uint64_t at, uint64_t value, unsigned width, unsigned compare, uint64_t mask) {
  check_reachable(stream->device, at, width, 1, "hipStreamWaitValue on");
  if (at % width || compare > 3) throw ApiError(kInvalidValue, "hipStreamWaitValue: unaligned address or unknown comparison");
  const int device = stream->device;
  if (width == 4) mask &= 0xffffffffu, value &= 0xffffffffu;
  enqueue(stream, "wait value", [=] {
    return [=](Operation&) {
      const auto waves_held = hold_waves();
      const uint64_t seen = mask & (width == 4 ? __atomic_load_n(reinterpret_cast<uint32_t*>(at), __ATOMIC_ACQUIRE)
                                               : __atomic_load_n(reinterpret_cast<uint64_t*>(at), __ATOMIC_ACQUIRE));
      const bool met = compare == 0   ? (width == 4 ? static_cast<int32_t>(seen - value) >= 0 : static_cast<int64_t>(seen - value) >= 0)
                       : compare == 1 ? seen == value
                       : compare == 2 ? (seen & value) != 0
                                      : ~(seen | value) != 0;
      if (met) polled("host", device, at, width);
      return met;
    };
  });
}

void Node::host_call(Stream* stream, std::function<void()> call) {
  enqueue(stream, "host function", [=] { return [=](Operation&) { call(); return true; }; });
}

void Node::record(Event* event, Stream* stream) {
  check_alive();
  {
    std::lock_guard lock(queue_mutex_);
    if (stream->capturing) {
      event->capturing = stream->capturing.get();
      event->has_node = !stream->captured_last.empty();
      if (event->has_node) event->node = stream->captured_last.back();
      return;
    }
  }
  event->capturing = nullptr;
  enqueue(stream, "event", [] { return [](Operation&) { return true; }; });
  std::lock_guard lock(queue_mutex_);
  event->recorded = stream->last;
}

void Node::wait_event(Stream* stream, Event* event) {
  check_alive();
  std::unique_lock lock(queue_mutex_);
  if (event->capturing != nullptr) {  // joins the capture the event was recorded in
    if (!stream->capturing) {
      for (const auto& other : streams_)
        if (other->capturing.get() == event->capturing) stream->capturing = other->capturing;
      if (!stream->capturing) throw ApiError(kStreamCaptureUnmatched, "the event belongs to a capture that has ended");
    }
    if (event->has_node) stream->captured_last.push_back(event->node);
    return;
  }
  const MarkPtr mark = event->recorded;
  lock.unlock();
  if (mark == nullptr || mark->reached) return;
  {
    std::lock_guard again(queue_mutex_);
    stream->extra.push_back(mark);
  }
  enqueue(stream, "wait for an event", [] { return [](Operation&) { return true; }; });
}

}  // namespace mori_sim
