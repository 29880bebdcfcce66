// The communicator itself.
#include "host/fabric.h"

#include "python/bindings.h"

namespace mori::python {

namespace {

std::shared_ptr<Fabric> make_fabric(int rank, int world_size, const std::vector<int>& control_fds,
                                    const std::vector<int>& pidfds, double timeout_s, int num_engines, int queues_per_peer,
                                    int max_queues, uint64_t ring_bytes, int64_t spin_us, int64_t inline_bytes) {
  Settings settings;
  settings.rank = rank;
  settings.world_size = world_size;
  settings.timeout_ns = timeout_ns(timeout_s);
  settings.num_engines = num_engines;
  settings.queues_per_peer = queues_per_peer;
  settings.max_queues = max_queues;
  settings.ring_bytes = ring_bytes;
  settings.spin_ns = spin_us < 0 ? -1 : spin_us * 1000;
  settings.inline_bytes = inline_bytes;
  return std::make_shared<Fabric>(settings, control_fds, pidfds);
}

}  // namespace

void bind_fabric(py::module_& m) {
  py::class_<Fabric, std::shared_ptr<Fabric>> fabric(m, "Fabric");
  fabric
      .def(py::init(&make_fabric), py::arg("rank"), py::arg("world_size"), py::arg("control_fds"), py::arg("pidfds"),
           py::kw_only(), py::arg("timeout_s") = 30.0, py::arg("num_engines") = 1, py::arg("queues_per_peer") = 8,
           py::arg("max_queues") = 64, py::arg("ring_bytes") = 262144, py::arg("spin_us") = -1,
           py::arg("inline_bytes") = -1)
      .def_property_readonly("rank", [](Fabric& f) { return f.node().settings.rank; })
      .def_property_readonly("world_size", [](Fabric& f) { return f.node().settings.world_size; })
      .def_property_readonly("num_engines", [](Fabric& f) { return f.node().settings.num_engines; })
      .def_property_readonly("queues_per_peer", [](Fabric& f) { return f.node().settings.queues_per_peer; })
      .def_property_readonly("max_queues", [](Fabric& f) { return f.node().settings.max_queues; })
      .def_property_readonly("num_queues", [](Fabric& f) { return f.node().num_queues(); })
      .def_property(
          "timeout_s", [](Fabric& f) { return static_cast<double>(f.node().timeout_ns.load()) * 1e-9; },
          [](Fabric& f, double seconds) { f.node().timeout_ns.store(timeout_ns(seconds)); })
      .def_property_readonly("closed", &Fabric::closed)
      .def(
          "map_window",
          [](std::shared_ptr<Fabric> f, const std::vector<int>& fds, uint64_t nbytes) {
            const py::gil_scoped_release nogil;
            auto mapping = f->map_window(fds, nbytes);
            const int rank = f->node().settings.rank;
            return std::make_shared<Window>(std::move(f), std::move(mapping), rank);
          },
          py::arg("fds"), py::arg("nbytes"))
      .def(
          "open_queues",
          [](const std::shared_ptr<Fabric>& f, int peer, const std::vector<int>& indices) {
            std::vector<std::shared_ptr<Queue>> opened;  // each keeps the fabric alive
            for (Queue* queue : f->open_queues(peer, indices)) opened.emplace_back(f, queue);
            return opened;
          },
          py::arg("peer"), py::arg("indices"));
  fabric
      .def(
          "signal",
          [](Fabric& f, uint64_t where, uint64_t value, const std::string& op) { f.signal(where, value, signal_op(op)); },
          py::arg("where"), py::arg("value"), py::arg("op") = "set")
      .def("read", &Fabric::read, py::arg("where"))
      .def(
          "wait",
          [](Fabric& f, uint64_t where, uint64_t value, const std::string& cmp, int peer, std::optional<double> timeout_s) {
            return f.wait(where, value, comparison(cmp), peer, timeout_ns(f.node(), timeout_s));
          },
          py::arg("where"), py::arg("value"), py::arg("cmp") = ">=", py::kw_only(), py::arg("peer") = -1,
          py::arg("timeout_s") = py::none(), NoGil())
      .def("signal_all", &Fabric::signal_all, py::arg("where"), py::arg("value"))
      .def(
          "wait_all",
          [](Fabric& f, const std::vector<uint64_t>& where, uint64_t value, const std::vector<int>& peers,
             std::optional<double> timeout_s) { return f.wait_all(where, value, peers, timeout_ns(f.node(), timeout_s)); },
          py::arg("where"), py::arg("value"), py::arg("peers"), py::arg("timeout_s") = py::none(), NoGil())
      .def("wake", &Fabric::wake, py::arg("rank"))
      .def(
          "barrier", [](Fabric& f, std::optional<double> timeout_s) { f.barrier(timeout_ns(f.node(), timeout_s)); },
          py::arg("timeout_s") = py::none(), NoGil())
      .def("peer_states", &Fabric::peer_states)
      .def("serve", &Fabric::serve, NoGil())
      .def("close", &Fabric::close, NoGil());
}

}  // namespace mori::python
