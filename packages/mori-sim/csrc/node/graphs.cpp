// Graphs: what a stream was told while it was captured, replayed as one operation.
#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "node/node.hpp"

namespace mori_sim {

void Node::begin_capture(Stream* stream) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  if (stream->is_null || stream->capturing) throw ApiError(kStreamCaptureUnsupported, "the null stream, or a stream in capture, cannot be captured");
  stream->capturing = std::make_shared<Graph>();
  stream->captured_last.clear();
}

std::shared_ptr<Graph> Node::end_capture(Stream* stream) {
  std::lock_guard lock(queue_mutex_);
  if (!stream->capturing) throw ApiError(kStreamCaptureUnmatched, "the stream is not being captured");
  const std::shared_ptr<Graph> graph = stream->capturing;
  for (const auto& other : streams_)
    if (other->capturing == graph) {
      other->capturing.reset();
      other->captured_last.clear();
    }
  return graph;
}

// One operation that steps the graph's nodes in dependency order; nodes without an order between them run together.
void Node::launch_graph(Stream* stream, const std::shared_ptr<Graph>& graph) {
  enqueue(stream, "graph", [graph] {
    struct Progress {
      std::vector<Operation> operations;
      std::vector<bool> ended;
    };
    auto progress = std::make_shared<Progress>();
    for (const auto& node : graph->nodes) {
      progress->operations.emplace_back();
      progress->operations.back().what = node.what;
      progress->operations.back().step = node.make_step();
    }
    progress->ended.resize(graph->nodes.size());
    return [graph, progress](Operation&) {
      bool all = true;
      for (size_t i = 0; i < graph->nodes.size(); ++i) {
        if (progress->ended[i]) continue;
        const auto& after = graph->nodes[i].after;
        const bool ready = std::all_of(after.begin(), after.end(), [&](size_t j) { return progress->ended[j]; });
        if (ready && progress->operations[i].step(progress->operations[i])) {
          progress->ended[i] = true;
        } else {
          all = false;
        }
      }
      return all;
    };
  });
}

}  // namespace mori_sim
