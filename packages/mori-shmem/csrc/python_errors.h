// How the core's errors become Python's: one exception class, CoreError, with `kind` and `info`.
#pragma once
#include <pybind11/pybind11.h>

namespace mori {

void bind_errors(pybind11::module_& module);

}  // namespace mori
