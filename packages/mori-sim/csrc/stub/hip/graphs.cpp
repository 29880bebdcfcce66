// Stream capture and graphs.
#include <memory>

#include "stub/hip/door.hpp"

using namespace mori_sim;

namespace {

struct GraphHandle {
  std::shared_ptr<Graph> graph;
};

}  // namespace

extern "C" {

int hipStreamBeginCapture(void* stream, int) { HIP("hipStreamBeginCapture", { node().begin_capture(node().known(stream)); }); }
int hipStreamEndCapture(void* stream, void** graph) {
  HIP("hipStreamEndCapture", { need(graph, "graph"); *graph = new GraphHandle{node().end_capture(node().known(stream))}; });
}
int hipStreamIsCapturing(void* stream, int* status) {
  HIP("hipStreamIsCapturing", { need(status, "status"); *status = node().known(stream)->capturing != nullptr; });
}
int hipGraphInstantiate(void** executable, void* graph, void*, char*, size_t) {
  HIP("hipGraphInstantiate", { need(executable, "graph"); need(graph, "graph"); *executable = new GraphHandle(*static_cast<GraphHandle*>(graph)); });
}
int hipGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) { return hipGraphInstantiate(executable, graph, nullptr, nullptr, 0); }
int hipGraphLaunch(void* executable, void* stream) {
  HIP("hipGraphLaunch", { need(executable, "graph"); node().launch_graph(node().known(stream), static_cast<GraphHandle*>(executable)->graph); });
}
int hipGraphDestroy(void* graph) { HIP("hipGraphDestroy", { need(graph, "graph"); delete static_cast<GraphHandle*>(graph); }); }
int hipGraphExecDestroy(void* graph) { return hipGraphDestroy(graph); }
int hipGraphGetNodes(void* graph, void**, size_t* count) {
  HIP("hipGraphGetNodes", { need(graph, "graph"); need(count, "count"); *count = static_cast<GraphHandle*>(graph)->graph->nodes.size(); });
}

}  // extern "C"
