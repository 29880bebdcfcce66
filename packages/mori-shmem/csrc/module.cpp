// Names the core for Python, with the types that _core.pyi documents, and lets go of the GIL around what blocks or copies.
#include <dlfcn.h>
#include <mori_sdma.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cmath>
#include <optional>

#include "host/clock.h"
#include "host/fabric.h"
#include "host/reduce.h"
#include "host/waits.h"
#include "python_errors.h"

namespace py = pybind11;
using namespace mori;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// ---- Python's words into the core's --------------------------------------------------------------------------------

uint32_t comparison(const std::string& name) {
  static const char* const names[] = {"<", "<=", "==", "!=", ">=", ">"};
  for (uint32_t i = 0; i < 6; ++i)
    if (name == names[i]) return MORI_SDMA_LESS + i;
  throw bad_value("cmp", name, "<, <=, ==, !=, >=, >");
}

SignalOp signal_op(const std::string& name) {
  if (name == "set") return SignalOp::kSet;
  if (name == "add") return SignalOp::kAdd;
  throw bad_value("op", name, "set, add");
}

int64_t timeout_ns(double seconds) {
  if (std::isnan(seconds) || seconds < 0) throw bad_value("timeout_s", seconds, "0 or more seconds");
  return seconds > 1e9 ? INT64_MAX : static_cast<int64_t>(seconds * 1e9);
}

int64_t timeout_ns(Node& node, const std::optional<double>& seconds) {
  return seconds ? timeout_ns(*seconds) : node.timeout_ns.load();
}

struct Span {
  std::shared_ptr<const Mapping> mapping;
  uint64_t address, nbytes;
};

struct FabricProgram {
  explicit FabricProgram(std::shared_ptr<Fabric> owner) : fabric(std::move(owner)), program(fabric->space()) {}
  Program& open() {
    const Use use(fabric->node());
    return program;
  }
  std::shared_ptr<Fabric> fabric;
  Program program;
};

// One verb, submitted at once.
template <class Verb>
void submit_one(Queue& queue, Verb verb) {
  const Use use(queue.node);
  Program program(queue.node.space);
  verb(program);
  queue.submit(program.packets());
}

std::shared_ptr<Fabric> make_fabric(int rank, int world_size, const std::vector<int>& control_fds,
                                    const std::vector<int>& pidfds, double timeout_s, int num_engines, int queues_per_peer,
                                    int max_queues, uint64_t ring_bytes, int64_t spin_us, int64_t inline_bytes) {
  Settings settings;
  settings.rank = rank;
  settings.world_size = world_size;
  settings.timeout_ns = timeout_ns(timeout_s);
  settings.num_engines = num_engines;
  settings.queues_per_peer = queues_per_peer;
  settings.max_queues = max_queues;
  settings.ring_bytes = ring_bytes;
  settings.spin_ns = spin_us < 0 ? -1 : spin_us * 1000;
  settings.inline_bytes = inline_bytes;
  return std::make_shared<Fabric>(settings, control_fds, pidfds);
}

// Python runs signal handlers (Ctrl-C) in the main thread only; a wait there looks for them between its slices.
void answer_signals() {
  const auto main = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  between_slices = [main] {
    if (PyThread_get_thread_ident() != main) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

std::string sdma_library_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&mori_sdma_abi_version), &info) == 0) throw system_error("dladdr", ENOENT);
  return info.dli_fname;
}

py::dict describe_packet(const std::string& bytes) {
  std::vector<uint32_t> dwords(bytes.size() / 4);
  std::memcpy(dwords.data(), bytes.data(), 4 * dwords.size());
  mori_sdma_packet p;
  const mori_sdma_reason reason = mori_sdma_decode(dwords.data(), dwords.size(), 0, &p);
  py::dict fields;
  fields["packet"] = dwords.empty() ? "nothing" : mori_sdma_op_name(p.op, p.sub_op);
  fields["reason"] = mori_sdma_reason_name(reason);
  fields["num_dwords"] = p.num_dwords;
  fields["func"] = p.func;
  fields["dst"] = p.dst;
  fields["src"] = p.src;
  fields["nbytes"] = p.nbytes;
  fields["value"] = p.value;
  fields["compare"] = p.compare;
  return fields;
}

// ---- The names -----------------------------------------------------------------------------------------------------

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

void bind_program(py::module_& m) {
  using P = FabricProgram;
  py::class_<P>(m, "Program")
      .def(py::init<std::shared_ptr<Fabric>>(), py::arg("fabric"))
      .def_property_readonly("num_packets", [](const P& p) { return p.program.packets().ends.size(); })
      .def_property_readonly("nbytes", [](const P& p) { return 4 * p.program.packets().dwords.size(); })
      .def(
          "put", [](P& p, uint64_t dst, uint64_t src, uint64_t nbytes) { p.open().put(dst, src, nbytes); }, py::arg("dst"),
          py::arg("src"), py::arg("nbytes"))
      .def(
          "put_2d",
          [](P& p, uint64_t dst, uint64_t src, uint64_t row_bytes, uint64_t num_rows, uint64_t dst_pitch,
             uint64_t src_pitch) { p.open().put_2d(dst, src, row_bytes, num_rows, dst_pitch, src_pitch); },
          py::arg("dst"), py::arg("src"), py::arg("row_bytes"), py::arg("num_rows"), py::arg("dst_pitch"),
          py::arg("src_pitch"))
      .def(
          "fill", [](P& p, uint64_t dst, uint32_t pattern, uint64_t nbytes) { p.open().fill(dst, pattern, nbytes); },
          py::arg("dst"), py::arg("pattern"), py::arg("nbytes"))
      .def(
          "signal",
          [](P& p, uint64_t where, uint64_t value, const std::string& op) {
            p.open().signal(where, value, signal_op(op));
          },
          py::arg("where"), py::arg("value"), py::arg("op") = "set")
      .def(
          "wait",
          [](P& p, uint64_t where, uint64_t value, const std::string& cmp) {
            p.open().wait(where, value, comparison(cmp));
          },
          py::arg("where"), py::arg("value"), py::arg("cmp") = ">=")
      .def(
          "timestamp", [](P& p, uint64_t where) { p.open().timestamp(where); }, py::arg("where"))
      .def("packets", [](const P& p) {
        const auto& dwords = p.program.packets().dwords;
        return py::bytes(reinterpret_cast<const char*>(dwords.data()), 4 * dwords.size());
      });
}

void bind_queue(py::module_& m) {
  py::class_<Queue, std::shared_ptr<Queue>>(m, "Queue")
      .def_readonly("peer", &Queue::peer)
      .def_readonly("index", &Queue::index)
      .def_property_readonly("ring_bytes", [](const Queue& q) { return q.node.settings.ring_bytes; })
      .def_property_readonly("submitted_bytes", &Queue::submitted_bytes)
      .def_property_readonly("completed_bytes", &Queue::completed_bytes)
      .def(
          "put",
          [](Queue& q, uint64_t dst, uint64_t src, uint64_t nbytes) {
            submit_one(q, [&](Program& p) { p.put(dst, src, nbytes); });
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), NoGil())
      .def(
          "put_2d",
          [](Queue& q, uint64_t dst, uint64_t src, uint64_t row_bytes, uint64_t num_rows, uint64_t dst_pitch,
             uint64_t src_pitch) {
            submit_one(q, [&](Program& p) { p.put_2d(dst, src, row_bytes, num_rows, dst_pitch, src_pitch); });
          },
          py::arg("dst"), py::arg("src"), py::arg("row_bytes"), py::arg("num_rows"), py::arg("dst_pitch"),
          py::arg("src_pitch"), NoGil())
      .def(
          "fill",
          [](Queue& q, uint64_t dst, uint32_t pattern, uint64_t nbytes) {
            submit_one(q, [&](Program& p) { p.fill(dst, pattern, nbytes); });
          },
          py::arg("dst"), py::arg("pattern"), py::arg("nbytes"), NoGil())
      .def(
          "signal",
          [](Queue& q, uint64_t where, uint64_t value, const std::string& op) {
            submit_one(q, [&](Program& p) { p.signal(where, value, signal_op(op)); });
          },
          py::arg("where"), py::arg("value"), py::arg("op") = "set", NoGil())
      .def(
          "wait",
          [](Queue& q, uint64_t where, uint64_t value, const std::string& cmp) {
            submit_one(q, [&](Program& p) { p.wait(where, value, comparison(cmp)); });
          },
          py::arg("where"), py::arg("value"), py::arg("cmp") = ">=", NoGil())
      .def(
          "timestamp",
          [](Queue& q, uint64_t where) { submit_one(q, [&](Program& p) { p.timestamp(where); }); }, py::arg("where"),
          NoGil())
      .def(
          "submit",
          [](Queue& q, const FabricProgram& p) {
            if (&p.fabric->node() != &q.node) throw bad_value("program", std::string("another fabric's"), "of this fabric");
            const Packets packets = p.program.packets();  // a copy: another thread may add steps meanwhile
            const py::gil_scoped_release nogil;
            q.submit(packets);
          },
          py::arg("program"))
      .def(
          "submit_raw",
          [](Queue& q, const std::string& bytes) {
            if (bytes.empty() || bytes.size() % 4) throw bad_value("packets", uint64_t{bytes.size()}, "a multiple of 4 bytes");
            Packets raw;
            raw.dwords.resize(bytes.size() / 4);
            std::memcpy(raw.dwords.data(), bytes.data(), bytes.size());
            raw.ends.push_back(raw.dwords.size());
            const py::gil_scoped_release nogil;
            q.submit(raw);
          },
          py::arg("packets"))
      .def(
          "quiet", [](Queue& q, std::optional<double> timeout_s) { q.quiet(timeout_ns(q.node, timeout_s)); },
          py::arg("timeout_s") = py::none(), NoGil())
      .def("check",
           [](Queue& q) {
             const Use use(q.node);
             q.check();
           })
      .def(
          "set_faults",
          [](Queue& q, uint64_t drop_every, int64_t delay_us, bool reorder) {
            q.set_faults({drop_every, delay_us, reorder});
          },
          py::kw_only(), py::arg("drop_every") = 0, py::arg("delay_us") = 0, py::arg("reorder") = false, NoGil());
}

void bind_fabric(py::module_& m) {
  py::class_<Fabric, std::shared_ptr<Fabric>> fabric(m, "Fabric");
  fabric
      .def(py::init(&make_fabric), py::arg("rank"), py::arg("world_size"), py::arg("control_fds"), py::arg("pidfds"),
           py::kw_only(), py::arg("timeout_s") = 30.0, py::arg("num_engines") = 1, py::arg("queues_per_peer") = 8,
           py::arg("max_queues") = 64, py::arg("ring_bytes") = 262144, py::arg("spin_us") = -1,
           py::arg("inline_bytes") = -1)
      .def_property_readonly("rank", [](Fabric& f) { return f.node().settings.rank; })
      .def_property_readonly("world_size", [](Fabric& f) { return f.node().settings.world_size; })
      .def_property_readonly("num_engines", [](Fabric& f) { return f.node().settings.num_engines; })
      .def_property_readonly("queues_per_peer", [](Fabric& f) { return f.node().settings.queues_per_peer; })
      .def_property_readonly("max_queues", [](Fabric& f) { return f.node().settings.max_queues; })
      .def_property_readonly("num_queues", [](Fabric& f) { return f.node().num_queues(); })
      .def_property(
          "timeout_s", [](Fabric& f) { return static_cast<double>(f.node().timeout_ns.load()) * 1e-9; },
          [](Fabric& f, double seconds) { f.node().timeout_ns.store(timeout_ns(seconds)); })
      .def_property_readonly("closed", &Fabric::closed)
      .def(
          "map_window",
          [](std::shared_ptr<Fabric> f, const std::vector<int>& fds, uint64_t nbytes) {
            const py::gil_scoped_release nogil;
            auto mapping = f->map_window(fds, nbytes);
            const int rank = f->node().settings.rank;
            return std::make_shared<Window>(std::move(f), std::move(mapping), rank);
          },
          py::arg("fds"), py::arg("nbytes"))
      .def(
          "open_queues",
          [](const std::shared_ptr<Fabric>& f, int peer, const std::vector<int>& indices) {
            std::vector<std::shared_ptr<Queue>> opened;  // each keeps the fabric alive
            for (Queue* queue : f->open_queues(peer, indices)) opened.emplace_back(f, queue);
            return opened;
          },
          py::arg("peer"), py::arg("indices"));
  fabric
      .def(
          "signal",
          [](Fabric& f, uint64_t where, uint64_t value, const std::string& op) { f.signal(where, value, signal_op(op)); },
          py::arg("where"), py::arg("value"), py::arg("op") = "set")
      .def("read", &Fabric::read, py::arg("where"))
      .def(
          "wait",
          [](Fabric& f, uint64_t where, uint64_t value, const std::string& cmp, int peer, std::optional<double> timeout_s) {
            return f.wait(where, value, comparison(cmp), peer, timeout_ns(f.node(), timeout_s));
          },
          py::arg("where"), py::arg("value"), py::arg("cmp") = ">=", py::kw_only(), py::arg("peer") = -1,
          py::arg("timeout_s") = py::none(), NoGil())
      .def("wake", &Fabric::wake, py::arg("rank"))
      .def(
          "barrier", [](Fabric& f, std::optional<double> timeout_s) { f.barrier(timeout_ns(f.node(), timeout_s)); },
          py::arg("timeout_s") = py::none(), NoGil())
      .def("peer_states", &Fabric::peer_states)
      .def("serve", &Fabric::serve, NoGil())
      .def("close", &Fabric::close, NoGil());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of the host target; see _core.pyi.";
  bind_errors(m);
  answer_signals();
  m.attr("MAX_COPY_BYTES") = mori_sdma_max_copy(0);
  m.attr("MIN_RING_BYTES") = kMinRingBytes;
  m.def("monotonic_ns", &monotonic_ns);
  m.def("sdma_library_path", &sdma_library_path);
  m.def("describe_packet", &describe_packet, py::arg("packet"));
  m.def(
      "sum_bf16",
      [](uint64_t out, const std::vector<uint64_t>& sources, uint64_t num_elements) {
        if (sources.empty()) throw bad_value("sources", uint64_t{0}, "one or more");
        std::vector<const uint16_t*> from;
        for (const uint64_t address : sources) from.push_back(reinterpret_cast<const uint16_t*>(address));
        sum_bf16(reinterpret_cast<uint16_t*>(out), from, num_elements);
      },
      py::arg("out"), py::arg("sources"), py::arg("num_elements"), NoGil());
  bind_memory(m);
  bind_fabric(m);
  bind_program(m);
  bind_queue(m);
}
