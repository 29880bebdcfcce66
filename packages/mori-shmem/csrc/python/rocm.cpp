// The rocm target: a device, windows and words on it, and queues of its copy engines.
#include "rocm/imported.h"
#include "rocm/queue.h"
#include "rocm/window.h"

#include "python/verbs.h"

#include <tuple>

namespace mori::python {

namespace {

using rocm::Device;
using DevicePtr = std::shared_ptr<Device>;

struct DeviceProgram {
  explicit DeviceProgram(DevicePtr owner) : device(std::move(owner)), program(device->space) {}
  Program& open() { return program; }
  DevicePtr device;
  Program program;
};

// A window as Python has it: closed for packets before its memory goes, which views of it keep.
struct DeviceWindow {
  DeviceWindow(DevicePtr owner, int rank, std::shared_ptr<Mapping> memory)
      : device(std::move(owner)),
        mapping(std::move(memory)),
        base(mapping->base),
        stride(mapping->stride),
        nbytes(mapping->nbytes),
        rank(rank),
        world_size(mapping->world_size) {}
  ~DeviceWindow() { close(); }

  static std::unique_ptr<DeviceWindow> create(DevicePtr device, int rank, int world_size, uint64_t nbytes, bool uncached) {
    auto memory = std::make_shared<rocm::DeviceWindow>(device->ordinal, rank, world_size, nbytes, uncached);
    auto window = std::make_unique<DeviceWindow>(std::move(device), rank, memory);
    window->created = memory.get();
    return window;
  }
  static std::unique_ptr<DeviceWindow> imported(DevicePtr device, int rank, const rocm::Pieces& mine,
                                                const std::vector<rocm::PeerPieces>& ranks) {
    auto memory = std::make_shared<rocm::ImportedWindow>(device->ordinal, rank, mine, ranks);
    auto window = std::make_unique<DeviceWindow>(std::move(device), rank, memory);
    window->device->space.add(memory);
    return window;
  }

  Mapping& open() {
    if (!mapping) throw Error("closed", {{"what", std::string("window")}});
    return *mapping;
  }
  void only_if_created() {
    open();
    if (!created) throw std::invalid_argument("this window maps memory of others: it has no handle of its own");
  }
  int export_fd() {
    only_if_created();
    return created->export_fd();
  }
  void import_peers(const std::vector<int>& fds) {
    only_if_created();
    created->import_peers(fds);
    device->space.add(mapping);
  }
  Span span(int of_rank, uint64_t offset_bytes, uint64_t span_bytes) {
    open();
    const uint64_t address = base + static_cast<uint64_t>(of_rank) * stride + offset_bytes;
    if (of_rank < 0 || of_rank >= world_size || span_bytes > nbytes || offset_bytes > nbytes - span_bytes)
      throw Error("out_of_range", {{"what", std::string("span")}, {"address", address}, {"nbytes", span_bytes},
                                   {"base", base}, {"stride", stride}, {"size", nbytes}});
    return {mapping, address, span_bytes};
  }
  void close() {
    if (mapping) device->space.remove(mapping.get());
    mapping.reset();
  }

  const DevicePtr device;
  std::shared_ptr<Mapping> mapping;
  rocm::DeviceWindow* created = nullptr;  // the mapping, where its memory is our own
  const uint64_t base, stride, nbytes;
  const int rank, world_size;
};

rocm::Place place(const std::string& name) {
  if (name == "host") return rocm::Place::kHost;
  if (name == "uncached") return rocm::Place::kUncachedDevice;
  if (name == "signal") return rocm::Place::kSignal;
  throw bad_value("place", name, "host, uncached, signal");
}

rocm::Way way(const std::string& name) {
  if (name == "rocr") return rocm::Way::kRocr;
  if (name == "hsakmt") return rocm::Way::kHsakmt;
  throw bad_value("way", name, "rocr, hsakmt");
}

void bind_device(py::module_& m) {
  m.def("rocm_device_count", &rocm::device_count);
  m.def("rocm_current_device", [] {
    int ordinal = 0;
    rocm::check_hip(rocm::hip().hipGetDevice(&ordinal), "hipGetDevice");
    return ordinal;
  });
  m.def(
      "rocm_set_device", [](int ordinal) { rocm::check_hip(rocm::hip().hipSetDevice(ordinal), "hipSetDevice"); },
      py::arg("ordinal"));
  m.def("rocm_take_error", [] {
    const int code = rocm::hip().hipGetLastError();
    return code == rocm::kHipSuccess ? std::string() : std::string(rocm::hip().hipGetErrorString(code));
  });
  py::class_<Device, DevicePtr>(m, "RocmDevice")
      .def(py::init<int>(), py::arg("ordinal"), NoGil())
      .def_readonly("ordinal", &Device::ordinal)
      .def_readonly("bus_id", &Device::bus_id)
      .def(
          "recommended_engines",
          [](const Device& d, const std::string& name, const std::string& peer_bus_id) {
            return rocm::recommended_engines(way(name), d, peer_bus_id);
          },
          py::arg("way"), py::arg("peer_bus_id"))
      .def(
          "write",
          [](const Device& d, uint64_t to, const std::string& bytes) { d.write(to, bytes.data(), bytes.size()); },
          py::arg("to"), py::arg("bytes"), NoGil())
      .def("is_idle", &Device::is_idle, py::arg("stream"), NoGil())
      .def("is_capturing", &Device::is_capturing, py::arg("stream"))
      .def("write_value", &Device::write_value, py::arg("stream"), py::arg("where"), py::arg("value"), NoGil())
      .def("wait_value", &Device::wait_value, py::arg("stream"), py::arg("where"), py::arg("at_least"), NoGil())
      .def("synchronize", &Device::synchronize, py::arg("stream"), NoGil());
}

void bind_memory_of_device(py::module_& m) {
  py::class_<rocm::Words>(m, "RocmWords", py::buffer_protocol())
      .def(py::init([](const Device& d, uint64_t nbytes, const std::string& name) {
             return std::make_unique<rocm::Words>(d.ordinal, nbytes, place(name));
           }),
           py::arg("device"), py::arg("nbytes"), py::arg("place"))
      .def_buffer([](rocm::Words& w) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(w.address()), static_cast<py::ssize_t>(w.nbytes));
      })
      .def_property_readonly("address", &rocm::Words::address)
      .def_readonly("nbytes", &rocm::Words::nbytes);
  py::class_<rocm::Pieces>(m, "RocmPieces")
      .def(py::init([](const Device& d, uint64_t address, uint64_t nbytes) {
             return std::make_unique<rocm::Pieces>(d.ordinal, address, nbytes);
           }),
           py::arg("device"), py::arg("address"), py::arg("nbytes"), NoGil())
      .def_readonly("lead", &rocm::Pieces::lead)
      .def_readonly("sizes", &rocm::Pieces::sizes)
      .def("export_fds", &rocm::Pieces::export_fds);
  py::class_<DeviceWindow>(m, "RocmWindow")
      .def(py::init(&DeviceWindow::create), py::arg("device"), py::arg("rank"), py::arg("world_size"), py::arg("nbytes"),
           py::arg("uncached"), NoGil())
      .def_static(
          "imported",
          [](DevicePtr d, int rank, const rocm::Pieces& mine, const std::vector<std::tuple<uint64_t, std::vector<uint64_t>, std::vector<int>>>& ranks) {
            std::vector<rocm::PeerPieces> pieces;
            for (const auto& [lead, sizes, fds] : ranks) pieces.push_back({lead, sizes, fds});
            return DeviceWindow::imported(std::move(d), rank, mine, pieces);
          },
          py::arg("device"), py::arg("rank"), py::arg("mine"), py::arg("ranks"), NoGil())
      .def_readonly("base", &DeviceWindow::base)
      .def_readonly("stride", &DeviceWindow::stride)
      .def_readonly("nbytes", &DeviceWindow::nbytes)
      .def_readonly("rank", &DeviceWindow::rank)
      .def_readonly("world_size", &DeviceWindow::world_size)
      .def_property_readonly("closed", [](const DeviceWindow& w) { return !w.mapping; })
      .def("export_fd", &DeviceWindow::export_fd)
      .def("import_peers", &DeviceWindow::import_peers, py::arg("fds"), NoGil())
      .def("span", &DeviceWindow::span, py::arg("rank"), py::arg("offset_bytes"), py::arg("nbytes"))
      .def("close", &DeviceWindow::close, NoGil());
}

void bind_queue_of_device(py::module_& m) {
  using rocm::Queue;
  py::class_<DeviceProgram> program(m, "RocmProgram");
  program.def(py::init<DevicePtr>(), py::arg("device"));
  bind_verbs(program);
  py::class_<Queue>(m, "RocmQueue")
      .def(py::init([](DevicePtr d, const std::string& name, uint32_t engine, uint64_t ring_bytes, bool for_kernels) {
             return std::make_unique<Queue>(std::move(d), way(name), engine, ring_bytes, for_kernels);
           }),
           py::arg("device"), py::arg("way"), py::arg("engine"), py::arg("ring_bytes"), py::arg("for_kernels"), NoGil())
      .def_readonly("engine", &Queue::engine)
      .def_property_readonly("ring", [](const Queue& q) { return reinterpret_cast<uint64_t>(q.hardware().ring); })
      .def_property_readonly("ring_bytes", [](const Queue& q) { return q.hardware().nbytes; })
      .def_property_readonly("read_pointer", [](const Queue& q) { return reinterpret_cast<uint64_t>(q.hardware().read_pointer); })
      .def_property_readonly("write_pointer", [](const Queue& q) { return reinterpret_cast<uint64_t>(q.hardware().write_pointer); })
      .def_property_readonly("doorbell", [](const Queue& q) { return reinterpret_cast<uint64_t>(q.hardware().doorbell); })
      .def_property_readonly("submitted_bytes", &Queue::submitted_bytes)
      .def_property_readonly("completed_bytes", &Queue::completed_bytes)
      .def_property_readonly("go", &Queue::go)
      .def_property_readonly("joined", &Queue::joined)
      .def_property_readonly("fetched", &Queue::fetched)
      .def("next_ticket", &Queue::next_ticket)
      .def(
          "probe", [](Queue& q, uint64_t scratch, double timeout_s) { q.probe(scratch, timeout_ns(timeout_s)); },
          py::arg("scratch"), py::arg("timeout_s"), NoGil())
      .def(
          "submit",
          [](Queue& q, const DeviceProgram& p, uint64_t ticket, double timeout_s) {
            const Packets packets = p.program.packets();  // a copy: another thread may add steps meanwhile
            const py::gil_scoped_release nogil;
            q.submit(packets, ticket, timeout_ns(timeout_s));
          },
          py::arg("program"), py::arg("ticket"), py::arg("timeout_s"))
      .def(
          "mark", [](Queue& q, double timeout_s) { return q.mark(timeout_ns(timeout_s)); }, py::arg("timeout_s"), NoGil())
      .def("reached", &Queue::reached, py::arg("mark"))
      .def(
          "fetch", [](Queue& q, uint64_t address, double timeout_s) { return q.fetch(address, timeout_ns(timeout_s)); },
          py::arg("address"), py::arg("timeout_s"), NoGil())
      .def(
          "join", [](Queue& q, double timeout_s) { return q.join(timeout_ns(timeout_s)); }, py::arg("timeout_s"), NoGil());
}

}  // namespace

void bind_rocm(py::module_& m) {
  bind_device(m);
  bind_memory_of_device(m);
  bind_queue_of_device(m);
}

}  // namespace mori::python
