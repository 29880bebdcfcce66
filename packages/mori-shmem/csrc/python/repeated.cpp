// A kernel launch for calls that are like one that Python has checked and prepared.
//
// What a call costs the host is mostly Python: looking at tensors, putting addresses into the kernel's arguments. A call that
// is like one before (each tensor of the same type, dtype, shape and device, contiguous) passes the same checks and differs in
// addresses only, so that is all that is done here: look, write the addresses, launch. Where anything is not as it was, nothing
// has happened and None is returned: Python then goes the whole way, and says what is wrong. (So it does after a launch that
// has failed, with the same arguments.)
//
// One thread at a time: the caller holds the op's lock. The GIL is let go for the launch, which waits where the driver's queue
// is full.
#include "python/bindings.h"

#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace mori::python {

namespace {

using Launch = int (*)(void* config, void* function, void** arguments, void** extra);  // cuLaunchKernelEx

struct Like {         // one tensor of the call; without a type: None
  py::object type, dtype, device;
  std::vector<Py_ssize_t> shape;
  uint64_t* place;    // of its address, in the kernel's arguments; null: they do not have it
  uint64_t required;  // the address that it must have; 0: any multiple of 16
};

struct Repeated {
  std::vector<Like> tensors;
  py::object result, owner;     // of the addresses that follow
  Launch launch;
  void *config, *function, **arguments;
  uint64_t* stream;             // in config
  const uint32_t* fault;        // not 0: something is to be raised
  py::object device;            // where the kernel runs
  py::object current_device, current_stream;  // () -> device, (device) -> raw stream
};

struct Names {
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
};
const Names& names() {
  static const Names* const made = new Names;
  return *made;
}

py::object taken(PyObject* made) { return py::reinterpret_steal<py::object>(made); }

bool has_shape(PyObject* tensor, const std::vector<Py_ssize_t>& wanted) {
  const py::object shape = taken(PyObject_GetAttr(tensor, names().shape));
  if (!shape || !PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != static_cast<Py_ssize_t>(wanted.size())) return false;
  for (size_t i = 0; i < wanted.size(); ++i)
    if (PyLong_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), i)) != wanted[i]) return false;
  return true;
}

bool same(const py::object& a, const py::object& b) { return a && PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ) == 1; }

// Its address, if it is like the one before; 0: it is not, or there is nothing at it.
uint64_t address_if_like(PyObject* tensor, const Like& like) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != like.type.ptr()) return 0;
  if (taken(PyObject_GetAttr(tensor, names().dtype)).ptr() != like.dtype.ptr() || !has_shape(tensor, like.shape)) return 0;
  if (!same(taken(PyObject_CallMethodNoArgs(tensor, names().get_device)), like.device)) return 0;
  if (taken(PyObject_CallMethodNoArgs(tensor, names().is_contiguous)).ptr() != Py_True) return 0;
  const py::object address = taken(PyObject_CallMethodNoArgs(tensor, names().data_ptr));
  const uint64_t found = address ? PyLong_AsUnsignedLongLong(address.ptr()) : 0;
  return like.required ? (found == like.required ? found : 0) : (found % 16 ? 0 : found);
}

// Whether it is launched. Nothing is written before everything has been looked at.
bool repeat(const Repeated& call, PyObject* const* given) {
  if (*call.fault != 0 || !same(taken(PyObject_CallNoArgs(call.current_device.ptr())), call.device)) return false;
  uint64_t addresses[8] = {};
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Like& like = call.tensors[i];
    if (!like.type) {
      if (given[i] != Py_None) return false;
    } else if ((addresses[i] = address_if_like(given[i], like)) == 0) {
      return false;
    }
  }
  const py::object stream = taken(PyObject_CallOneArg(call.current_stream.ptr(), call.device.ptr()));
  const uint64_t raw = stream ? PyLong_AsUnsignedLongLong(stream.ptr()) : 0;
  if (PyErr_Occurred()) return false;
  for (size_t i = 0; i < call.tensors.size(); ++i)
    if (call.tensors[i].place != nullptr) std::memcpy(call.tensors[i].place, &addresses[i], 8);
  std::memcpy(call.stream, &raw, 8);
  int code;
  Py_BEGIN_ALLOW_THREADS
  code = call.launch(call.config, call.function, call.arguments, nullptr);
  Py_END_ALLOW_THREADS
  return code == 0;
}

PyObject* call_repeated(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const auto& call = *static_cast<const Repeated*>(PyCapsule_GetPointer(self, nullptr));
  if (count == static_cast<Py_ssize_t>(call.tensors.size()) && repeat(call, given)) return Py_NewRef(call.result.ptr());
  PyErr_Clear();  // the whole way will meet it again
  Py_RETURN_NONE;
}

template <typename T>
T at(uint64_t address) {
  return reinterpret_cast<T>(address);
}

using LikeArgs = std::tuple<py::object, py::object, py::object, std::vector<Py_ssize_t>, uint64_t, uint64_t>;

py::object repeated_launch(const std::vector<std::optional<LikeArgs>>& tensors, const std::vector<uint64_t>& launch, py::object owner,
                           py::object result, uint64_t fault, py::object device, py::object current_device, py::object current_stream) {
  if (tensors.size() > 8) throw bad_value("tensors", std::to_string(tensors.size()), "8 at most");
  if (launch.size() != 5) throw bad_value("launch", std::to_string(launch.size()), "5 addresses");
  auto call = std::make_unique<Repeated>();
  for (const auto& given : tensors) {
    call->tensors.emplace_back();
    if (given) {
      auto& like = call->tensors.back();
      uint64_t place = 0;
      std::tie(like.type, like.dtype, like.device, like.shape, place, like.required) = *given;
      like.place = at<uint64_t*>(place);
    }
  }
  call->result = std::move(result), call->owner = std::move(owner);
  call->launch = at<Launch>(launch[0]);
  call->config = at<void*>(launch[1]), call->function = at<void*>(launch[2]), call->arguments = at<void**>(launch[3]);
  call->stream = at<uint64_t*>(launch[4]);
  call->fault = at<const uint32_t*>(fault);
  call->device = std::move(device);
  call->current_device = std::move(current_device), call->current_stream = std::move(current_stream);
  const py::object capsule = taken(PyCapsule_New(
      call.release(), nullptr, [](PyObject* self) { delete static_cast<Repeated*>(PyCapsule_GetPointer(self, nullptr)); }));
  static PyMethodDef method = {"repeated", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_repeated)), METH_FASTCALL,
                               "(tensors...) -> the result, launched; or None: not like the call before, nothing done"};
  return taken(PyCFunction_New(&method, capsule.ptr()));
}

}  // namespace

void bind_repeated(py::module_& m) {
  m.def("repeated_launch", &repeated_launch, py::arg("tensors"), py::arg("launch"), py::arg("owner"), py::arg("result"), py::arg("fault"),
        py::arg("device"), py::arg("current_device"), py::arg("current_stream"));
}

}  // namespace mori::python
