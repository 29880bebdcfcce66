// Programs and queues: each verb of a queue is a program of one step, submitted at once.
#include <cstring>

#include "python/verbs.h"

namespace mori::python {

namespace {

struct FabricProgram {
  explicit FabricProgram(std::shared_ptr<Fabric> owner) : fabric(std::move(owner)), program(fabric->space()) {}
  Program& open() {
    const Use use(fabric->node());
    return program;
  }
  std::shared_ptr<Fabric> fabric;
  Program program;
};

// One verb, submitted at once.
template <class Verb>
void submit_one(Queue& queue, Verb verb) {
  const Use use(queue.node);
  Program program(queue.node.space);
  verb(program);
  queue.submit(program.packets());
}

void bind_program(py::module_& m) {
  py::class_<FabricProgram> program(m, "Program");
  program.def(py::init<std::shared_ptr<Fabric>>(), py::arg("fabric"));
  bind_verbs(program);
}

}  // namespace

void bind_queues(py::module_& m) {
  bind_program(m);
  py::class_<Queue, std::shared_ptr<Queue>>(m, "Queue")
      .def_readonly("peer", &Queue::peer)
      .def_readonly("index", &Queue::index)
      .def_property_readonly("ring_bytes", [](const Queue& q) { return q.node.settings.ring_bytes; })
      .def_property_readonly("submitted_bytes", &Queue::submitted_bytes)
      .def_property_readonly("completed_bytes", &Queue::completed_bytes)
      .def(
          "put",
          [](Queue& q, uint64_t dst, uint64_t src, uint64_t nbytes) {
            submit_one(q, [&](Program& p) { p.put(dst, src, nbytes); });
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), NoGil())
      .def(
          "put_2d",
          [](Queue& q, uint64_t dst, uint64_t src, uint64_t row_bytes, uint64_t num_rows, uint64_t dst_pitch,
             uint64_t src_pitch) {
            submit_one(q, [&](Program& p) { p.put_2d(dst, src, row_bytes, num_rows, dst_pitch, src_pitch); });
          },
          py::arg("dst"), py::arg("src"), py::arg("row_bytes"), py::arg("num_rows"), py::arg("dst_pitch"),
          py::arg("src_pitch"), NoGil())
      .def(
          "fill",
          [](Queue& q, uint64_t dst, uint32_t pattern, uint64_t nbytes) {
            submit_one(q, [&](Program& p) { p.fill(dst, pattern, nbytes); });
          },
          py::arg("dst"), py::arg("pattern"), py::arg("nbytes"), NoGil())
      .def(
          "signal",
          [](Queue& q, uint64_t where, uint64_t value, const std::string& op) {
            submit_one(q, [&](Program& p) { p.signal(where, value, signal_op(op)); });
          },
          py::arg("where"), py::arg("value"), py::arg("op") = "set", NoGil())
      .def(
          "wait",
          [](Queue& q, uint64_t where, uint64_t value, const std::string& cmp) {
            submit_one(q, [&](Program& p) { p.wait(where, value, comparison(cmp)); });
          },
          py::arg("where"), py::arg("value"), py::arg("cmp") = ">=", NoGil())
      .def(
          "timestamp",
          [](Queue& q, uint64_t where) { submit_one(q, [&](Program& p) { p.timestamp(where); }); }, py::arg("where"),
          NoGil())
      .def(
          "submit",
          [](Queue& q, const FabricProgram& p) {
            if (&p.fabric->node() != &q.node) throw bad_value("program", std::string("another fabric's"), "of this fabric");
            const Packets packets = p.program.packets();  // a copy: another thread may add steps meanwhile
            const py::gil_scoped_release nogil;
            q.submit(packets);
          },
          py::arg("program"))
      .def(
          "submit_raw",
          [](Queue& q, const std::string& bytes) {
            if (bytes.empty() || bytes.size() % 4) throw bad_value("packets", uint64_t{bytes.size()}, "a multiple of 4 bytes");
            Packets raw;
            raw.dwords.resize(bytes.size() / 4);
            std::memcpy(raw.dwords.data(), bytes.data(), bytes.size());
            raw.ends.push_back(raw.dwords.size());
            const py::gil_scoped_release nogil;
            q.submit(raw);
          },
          py::arg("packets"))
      .def(
          "quiet", [](Queue& q, std::optional<double> timeout_s) { q.quiet(timeout_ns(q.node, timeout_s)); },
          py::arg("timeout_s") = py::none(), NoGil())
      .def("check",
           [](Queue& q) {
             const Use use(q.node);
             q.check();
           })
      .def(
          "set_faults",
          [](Queue& q, uint64_t drop_every, int64_t delay_us, bool reorder) {
            q.set_faults({drop_every, delay_us, reorder});
          },
          py::kw_only(), py::arg("drop_every") = 0, py::arg("delay_us") = 0, py::arg("reorder") = false, NoGil());
}

}  // namespace mori::python
