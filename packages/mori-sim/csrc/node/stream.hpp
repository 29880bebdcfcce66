// Streams, events and graphs: what must have happened before which operation may start.
//
// An operation is a step that the executor thread calls until it says that it is finished: a kernel's step submits it
// to the machine and then asks whether it has ended; a copy's step copies and is finished at once; a wait's step
// looks at memory. A Mark is the fact that an operation has finished; `after` lists the marks an operation waits for.
#pragma once
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mori_sim {

struct Mark {
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point when;  // valid once reached
};
using MarkPtr = std::shared_ptr<Mark>;

struct Operation {
  std::string what;
  std::vector<MarkPtr> after;
  MarkPtr done = std::make_shared<Mark>();
  std::function<bool(Operation&)> step;  // true: finished

  bool ready() const {
    for (const auto& mark : after)
      if (!mark->reached) return false;
    return true;
  }
};

// A captured graph: operations without their marks, and which earlier ones each depends on.
struct GraphNode {
  std::string what;
  std::function<std::function<bool(Operation&)>()> make_step;  // a fresh step for each replay
  std::vector<size_t> after;
};
struct Graph {
  std::vector<GraphNode> nodes;
};

struct Event {
  MarkPtr recorded;              // the operation before the record; null: never recorded, counts as reached
  Graph* capturing = nullptr;    // recorded while a stream was captured into this graph,
  size_t node = 0;               // after this node (num_nodes if none)
  bool has_node = false;
};

struct Stream {
  int device = 0;
  bool is_null = false;
  bool with_null = true;         // takes part in the null stream's ordering (not created non-blocking)
  std::deque<Operation> queue;
  MarkPtr last;                  // the newest operation's mark; null when nothing was ever queued
  std::vector<MarkPtr> extra;    // events the next operation must wait for
  std::shared_ptr<Graph> capturing;
  std::vector<size_t> captured_last;  // nodes the next captured operation depends on
};

}  // namespace mori_sim
