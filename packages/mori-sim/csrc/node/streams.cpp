// Streams: what is queued on one, what that must wait for, and waiting for it.
#include <algorithm>
#include <mutex>
#include <vector>

#include "node/node.hpp"

namespace mori_sim {

Stream* Node::null_stream(int device) {
  std::lock_guard lock(queue_mutex_);
  Stream*& stream = null_streams_[device];
  if (stream == nullptr) {
    streams_.push_back(std::make_unique<Stream>());
    stream = streams_.back().get();
    stream->device = device;
    stream->is_null = true;
  }
  return stream;
}

Stream* Node::create_stream(int device, bool with_null) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  streams_.push_back(std::make_unique<Stream>());
  Stream* stream = streams_.back().get();
  stream->device = device;
  stream->with_null = with_null;
  live_streams_.insert(stream);
  return stream;
}

Stream* Node::known(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return null_stream(current_device());  // null, legacy, per-thread
  std::lock_guard lock(queue_mutex_);
  if (live_streams_.count(handle) == 0) throw ApiError(kInvalidHandle, "not a stream of this process");
  return static_cast<Stream*>(handle);
}

void Node::destroy_stream(Stream* stream) {
  synchronize(stream);
  std::lock_guard lock(queue_mutex_);
  live_streams_.erase(stream);
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), [&](const auto& s) { return s.get() == stream; }), streams_.end());
}

void Node::synchronize_mark(const MarkPtr& mark) {
  if (mark != nullptr) {
    std::unique_lock lock(queue_mutex_);
    done_.wait(lock, [&] { return mark->reached || sticky_ != 0 || stopping_; });
  }
  check_alive();
}

void Node::synchronize(Stream* stream) {
  check_alive();
  MarkPtr last;
  {
    std::lock_guard lock(queue_mutex_);
    if (stream->capturing) throw ApiError(kStreamCaptureUnsupported, "a stream cannot be synchronized while it is captured");
    last = stream->last;
  }
  synchronize_mark(last);
}

void Node::synchronize_device(int device) {
  check_alive();
  std::vector<MarkPtr> marks;
  {
    std::lock_guard lock(queue_mutex_);
    for (const auto& stream : streams_)
      if (stream->device == device && stream->last) marks.push_back(stream->last);
  }
  for (const auto& mark : marks) synchronize_mark(mark);
}

bool Node::finished(Stream* stream) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  return !stream->last || stream->last->reached;
}

bool Node::anything_pending() {
  std::lock_guard lock(queue_mutex_);
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& s) { return !s->queue.empty(); });
}

void Node::enqueue(Stream* stream, std::string what, std::function<std::function<bool(Operation&)>()> make_step) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  if (stream->capturing) {
    stream->capturing->nodes.push_back({std::move(what), std::move(make_step), stream->captured_last});
    stream->captured_last = {stream->capturing->nodes.size() - 1};
    return;
  }
  Operation operation;
  operation.what = std::move(what);
  operation.step = make_step();
  operation.after.swap(stream->extra);
  for (const auto& other : streams_)
    if (other->device == stream->device && other.get() != stream && other->last && !other->last->reached &&
        ((stream->is_null && other->with_null) || (stream->with_null && other->is_null)))
      operation.after.push_back(other->last);
  stream->last = operation.done;
  stream->queue.push_back(std::move(operation));
  start_executor();
  work_.notify_one();
}

}  // namespace mori_sim
