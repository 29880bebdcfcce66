// Names the node for Python: reading code objects, memory as buffers, launches without a HIP caller, figures.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "node/device.hpp"
#include "node/node.hpp"

namespace py = pybind11;
using namespace mori_sim;

namespace {

Node& node() { return Node::instance(); }

std::vector<uint8_t> bytes_of(const py::bytes& data) {
  const std::string_view view = data;
  return {view.begin(), view.end()};
}

// Names come from a file that may hold anything.
py::str shown(const std::string& text) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

py::dict kernel_dict(const KernelInfo& k) {
  py::list arguments;
  for (const auto& a : k.arguments) {
    py::dict d;
    d["name"] = shown(a.name);
    d["offset"] = a.offset;
    d["nbytes"] = a.nbytes;
    d["kind"] = shown(a.kind);
    arguments.append(d);
  }
  py::dict d;
  d["name"] = shown(k.name);
  d["arguments"] = arguments;
  d["kernarg_nbytes"] = k.kernarg_nbytes;
  d["lds_nbytes"] = k.lds_nbytes;
  d["scratch_nbytes"] = k.scratch_nbytes;
  d["vgprs"] = k.num_vgprs;
  d["agprs"] = k.num_agprs;
  d["sgprs"] = k.num_sgprs;
  d["vgpr_spills"] = k.num_vgpr_spills;
  d["sgpr_spills"] = k.num_sgpr_spills;
  d["max_workgroup_size"] = k.max_workgroup_size;
  d["waves_per_simd"] = waves_per_simd(k);
  d["workgroups_per_cu"] = workgroups_per_cu(k, k.max_workgroup_size, 0);
  d["entry_offset"] = k.entry_offset;
  d["code_nbytes"] = k.code_nbytes;
  return d;
}

// [{kernel fields..., "code": [(offset, nbytes, text, category, why it would stop or "")]}]
py::list describe(const py::bytes& data, bool with_code) {
  const CodeObject object = CodeObject::parse(bytes_of(data));
  std::vector<uint8_t> image(object.image_nbytes());
  object.place(image.data(), 0);
  Code code(object.text_offset, image.data() + object.text_offset, object.text_nbytes);
  for (const auto& k : object.kernels) code.add_symbol(k.entry_offset, k.name);
  py::list kernels;
  for (const auto& k : object.kernels) {
    py::dict d = kernel_dict(k);
    py::list lines;
    unsigned nbytes = 4;
    for (uint64_t pc = k.entry_offset; with_code && pc + 4 <= k.entry_offset + k.code_nbytes; pc += nbytes) {
      const std::string text = code.text(pc, &nbytes);
      lines.append(py::make_tuple(pc, nbytes, shown(text), code.category(pc), shown(code.unsupported(pc))));
    }
    d["code"] = lines;
    d["target"] = shown(object.target);
    kernels.append(d);
  }
  return kernels;
}

// Device memory that Python owns; tensors made from its buffer keep it alive.
class DeviceMemory {
 public:
  DeviceMemory(size_t nbytes, int device, bool uncached) : nbytes_(nbytes), address_(node().memory.allocate(nbytes, node().physical(device), uncached)) {}
  ~DeviceMemory() {
    try {
      node().memory.release(address_);
    } catch (const std::exception&) {  // released behind our back, by hipFree of the same address
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  size_t nbytes() const { return nbytes_; }
  uint64_t address() const { return address_; }

 private:
  size_t nbytes_;
  uint64_t address_;
};

class LoadedModule {
 public:
  explicit LoadedModule(const py::bytes& data) {
    const auto bytes = bytes_of(data);
    module_ = node().load_module(bytes.data(), bytes.size());
  }
  ~LoadedModule() {
    py::gil_scoped_release release;
    try {
      node().unload_module(module_);
    } catch (const std::exception&) {  // after a fault nothing can be waited for
    }
  }
  LoadedModule(const LoadedModule&) = delete;
  LoadedModule& operator=(const LoadedModule&) = delete;

  // `packed` holds the explicit arguments as the metadata lays them out.
  void launch(const std::string& name, std::array<uint32_t, 3> grid, std::array<uint32_t, 3> block, const py::bytes& packed,
              uint32_t dynamic_lds, uintptr_t stream) {
    const auto arguments = bytes_of(packed);
    const LaunchShape shape{{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, dynamic_lds};
    py::gil_scoped_release release;
    node().launch(node().known(reinterpret_cast<void*>(stream)), node().find_kernel(module_, name), shape, nullptr,
                  arguments.empty() ? reinterpret_cast<const void*>("") : arguments.data(), arguments.size());
  }

 private:
  Module* module_;
};

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The simulated node of this process.";
  m.def("describe", &describe, py::arg("code_object"), py::arg("with_code") = true);
  m.def("unknown_behaviours", &unknown_behaviours);

  py::class_<DeviceMemory>(m, "DeviceMemory", py::buffer_protocol())
      .def(py::init<size_t, int, bool>(), py::arg("nbytes"), py::arg("device") = 0, py::arg("uncached") = false)
      .def_property_readonly("nbytes", &DeviceMemory::nbytes)
      .def_property_readonly("address", &DeviceMemory::address)
      .def_buffer([](DeviceMemory& d) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(d.address()), 1, py::format_descriptor<uint8_t>::format(), 1,
                               {d.nbytes()}, {size_t{1}});
      });
  py::class_<LoadedModule>(m, "Module")
      .def(py::init<const py::bytes&>())
      .def("launch", &LoadedModule::launch, py::arg("name"), py::arg("grid"), py::arg("block"), py::arg("packed"),
           py::arg("dynamic_lds") = 0, py::arg("stream") = 0);

  m.def("device_count", [] { return node().num_visible(); });
  m.def("synchronize", [] {
    py::gil_scoped_release release;
    for (int i = 0; i < node().num_visible(); ++i) node().synchronize_device(node().physical(i));
  });
  m.def("pending", [] { return node().anything_pending(); });
  m.def("is_device_memory", [](uint64_t address) {
    Range range;
    return node().memory.find(address, &range);
  });
  m.def("device_of", [](uint64_t address) -> std::optional<int> {  // by ordinal; None: not device memory
    Range range;
    if (!node().memory.find(address, &range) || range.home == kHostMemory) return std::nullopt;
    return node().ordinal(range.home);
  });
  m.def("describe_address", [](uint64_t address) { return node().memory.describe(address); });
  m.def("counters_json", [] { return node().counters_json(); });
  m.def("instructions", [] { return node().instructions(); });
  m.def("num_reports", [] { return node().num_reports(); });
  m.def("fault_text", [] { return node().fault_text(); });
}
