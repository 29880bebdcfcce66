// What the binding files share: their entry points, and Python's words turned into the core's.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "host/fabric.h"

namespace mori::python {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_errors(py::module_& m);
void bind_sdma(py::module_& m);
void bind_memory(py::module_& m);
void bind_fabric(py::module_& m);
void bind_queues(py::module_& m);
void bind_rocm(py::module_& m);
void bind_rows(py::module_& m);
void bind_repeated(py::module_& m);

struct Span {  // bytes of a window, through the buffer protocol
  std::shared_ptr<const Mapping> mapping;
  uint64_t address, nbytes;
};

uint32_t comparison(const std::string& name);
SignalOp signal_op(const std::string& name);
int64_t timeout_ns(double seconds);
int64_t timeout_ns(Node& node, const std::optional<double>& seconds);  // the node's own where there is none

}  // namespace mori::python
