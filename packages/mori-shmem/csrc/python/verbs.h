// The verbs of a put program, the same for every target whose queues take packets. P has `program`, and `open()`, which
// gives it to be added to.
#pragma once
#include "python/bindings.h"

namespace mori::python {

template <class P>
void bind_verbs(py::class_<P>& bound) {
  bound
      .def_property_readonly("num_packets", [](const P& p) { return p.program.packets().ends.size(); })
      .def_property_readonly("nbytes", [](const P& p) { return 4 * p.program.packets().dwords.size(); })
      .def(
          "put", [](P& p, uint64_t dst, uint64_t src, uint64_t nbytes) { p.open().put(dst, src, nbytes); }, py::arg("dst"),
          py::arg("src"), py::arg("nbytes"))
      .def(
          "put_2d",
          [](P& p, uint64_t dst, uint64_t src, uint64_t row_bytes, uint64_t num_rows, uint64_t dst_pitch,
             uint64_t src_pitch) { p.open().put_2d(dst, src, row_bytes, num_rows, dst_pitch, src_pitch); },
          py::arg("dst"), py::arg("src"), py::arg("row_bytes"), py::arg("num_rows"), py::arg("dst_pitch"),
          py::arg("src_pitch"))
      .def(
          "fill", [](P& p, uint64_t dst, uint32_t pattern, uint64_t nbytes) { p.open().fill(dst, pattern, nbytes); },
          py::arg("dst"), py::arg("pattern"), py::arg("nbytes"))
      .def(
          "signal",
          [](P& p, uint64_t where, uint64_t value, const std::string& op) {
            p.open().signal(where, value, signal_op(op));
          },
          py::arg("where"), py::arg("value"), py::arg("op") = "set")
      .def(
          "wait",
          [](P& p, uint64_t where, uint64_t value, const std::string& cmp) {
            p.open().wait(where, value, comparison(cmp));
          },
          py::arg("where"), py::arg("value"), py::arg("cmp") = ">=")
      .def(
          "timestamp", [](P& p, uint64_t where) { p.open().timestamp(where); }, py::arg("where"))
      .def("packets", [](const P& p) {
        const auto& dwords = p.program.packets().dwords;
        return py::bytes(reinterpret_cast<const char*>(dwords.data()), 4 * dwords.size());
      });
}

}  // namespace mori::python
