// Names the core for Python; nothing is computed here.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_core, m) { m.doc() = "native core of the host target"; }
