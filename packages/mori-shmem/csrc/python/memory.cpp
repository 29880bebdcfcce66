// Windows and spans of them, through the buffer protocol.
#include <unistd.h>

#include "python/bindings.h"

namespace mori::python {

void bind_memory(py::module_& m) {
  m.def("create_memory", &create_memory, py::arg("nbytes"), py::arg("name") = "mori");
  m.attr("CONTROL_BYTES") = kControlBytes;
  m.attr("PAGE_BYTES") = sysconf(_SC_PAGESIZE);

  py::class_<Span>(m, "Span", py::buffer_protocol())
      .def_buffer([](Span& span) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(span.address), static_cast<py::ssize_t>(span.nbytes));
      })
      .def("__len__", [](const Span& span) { return span.nbytes; })
      .def_readonly("address", &Span::address)
      .def_readonly("nbytes", &Span::nbytes);

  py::class_<Window, std::shared_ptr<Window>>(m, "Window")
      .def_readonly("base", &Window::base)
      .def_readonly("stride", &Window::stride)
      .def_readonly("nbytes", &Window::nbytes)
      .def_readonly("rank", &Window::rank)
      .def_readonly("world_size", &Window::world_size)
      .def_property_readonly("closed", &Window::closed)
      .def(
          "span",
          [](const Window& w, int rank, uint64_t offset_bytes, uint64_t nbytes) {
            auto mapping = w.span(rank, offset_bytes, nbytes);
            return Span{std::move(mapping), w.base + static_cast<uint64_t>(rank) * w.stride + offset_bytes, nbytes};
          },
          py::arg("rank"), py::arg("offset_bytes"), py::arg("nbytes"))
      .def("close", &Window::close, NoGil());
}

}  // namespace mori::python
