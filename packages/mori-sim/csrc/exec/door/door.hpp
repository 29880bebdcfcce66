// Python's way to the decoder and to a bare machine (numpy arrays as memory): for tests and the bench.
#pragma once
#include <pybind11/pybind11.h>

namespace mori_sim {
void bind_exec(pybind11::module_& m);
}
