// The native module. The files in python/ name the core for Python, with the types that _core.pyi documents, and let go of
// the GIL around what blocks or copies; nothing is computed there.
#include "host/clock.h"
#include "host/waits.h"
#include "python/bindings.h"

namespace py = pybind11;
using namespace mori;

namespace {

// Python runs signal handlers (Ctrl-C) in the main thread only; a wait there looks for them between its slices.
void answer_signals() {
  const auto main = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  between_slices = [main] {
    if (PyThread_get_thread_ident() != main) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of the host and rocm targets; see _core.pyi.";
  answer_signals();
  m.def("monotonic_ns", &monotonic_ns);
  python::bind_errors(m);
  python::bind_sdma(m);
  python::bind_memory(m);
  python::bind_fabric(m);
  python::bind_queues(m);
  python::bind_rocm(m);
  python::bind_rows(m);
  python::bind_repeated(m);
}
