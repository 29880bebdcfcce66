// How the core's errors become Python's: one exception class, CoreError, with `kind` and `info`.
#include "host/errors.h"

#include "python/bindings.h"

namespace mori::python {

namespace {

PyObject* core_error = nullptr;  // lives as long as the process, as the module does

void raise(const Error& error) {
  py::dict info;
  for (const auto& [name, fact] : error.facts)
    info[py::str(name)] = std::visit([](const auto& value) -> py::object { return py::cast(value); }, fact);
  py::object instance = py::reinterpret_borrow<py::object>(core_error)(error.kind, info);
  instance.attr("kind") = error.kind;
  instance.attr("info") = info;
  PyErr_SetObject(core_error, instance.ptr());
}

}  // namespace

void bind_errors(py::module_& m) {
  core_error = PyErr_NewException("mori_shmem._core.CoreError", PyExc_Exception, nullptr);
  m.attr("CoreError") = py::reinterpret_borrow<py::object>(core_error);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace mori::python
