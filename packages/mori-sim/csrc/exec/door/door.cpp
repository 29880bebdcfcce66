// Python's way to the decoder and to a bare machine over NumPy arrays: for instruction tests and the bench.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>

#include "exec/lane_table.hpp"
#include "exec/machine.hpp"
#include "isa/decode.hpp"

namespace py = pybind11;

namespace mori_sim {
namespace {

class ListedMemory : public Memory {  // ranges given by the test, each with a kind per device
 public:
  void add(uint64_t addr, uint64_t nbytes, int home, bool uncached, bool writable, bool shared) {
    Region r;
    r.begin = addr;
    r.end = addr + nbytes;
    r.host = reinterpret_cast<uint8_t*>(addr);
    r.home_device = home;
    r.kind = uncached ? MemoryKind::uncached : MemoryKind::local;
    r.writable = writable;
    r.shared = shared;
    regions_[addr] = r;
    ++generation_;
  }
  void remove(uint64_t addr) {
    regions_.erase(addr);
    ++generation_;
  }
  bool resolve(int device, uint64_t addr, Region* out) override {
    auto it = regions_.upper_bound(addr);
    if (it == regions_.begin()) return false;
    --it;
    if (addr >= it->second.end) return false;
    *out = it->second;
    if (out->kind != MemoryKind::uncached) out->kind = out->home_device < 0 ? MemoryKind::host : out->home_device == device ? MemoryKind::local : MemoryKind::peer;
    return true;
  }
  uint64_t generation() const override { return generation_; }

 private:
  std::map<uint64_t, Region> regions_;
  uint64_t generation_ = 1;
};

struct BareMachine {
  ListedMemory memory;
  Machine machine;
  explicit BareMachine(const Options& o) : machine(memory, o) {}
};

void set_three(uint32_t (&to)[3], const py::sequence& from) {
  for (size_t i = 0; i < 3; ++i) to[i] = i < from.size() ? from[i].cast<uint32_t>() : 1;
}

Options options_from(const py::dict& d) {
  Options o;
  for (auto item : d) {
    const std::string k = py::str(item.first);
    auto v = item.second;
    if (k == "order") {
      const std::string s = py::str(v);
      if (s == "round_robin") o.order = Options::Order::round_robin;
      else if (s == "random") o.order = Options::Order::random;
      else if (s == "rank_delayed") o.order = Options::Order::rank_delayed;
      else throw py::value_error("order: " + s);
    } else if (k == "mfma_order") {
      const std::string s = py::str(v);
      if (s == "exact") o.mfma_order = Options::MfmaOrder::exact;
      else if (s == "sequential") o.mfma_order = Options::MfmaOrder::sequential;
      else if (s == "blocked") o.mfma_order = Options::MfmaOrder::blocked;
      else throw py::value_error("mfma_order: " + s);
    } else if (k == "seed") o.seed = v.cast<uint64_t>();
    else if (k == "delayed_rank") o.delayed_rank = v.cast<int>();
    else if (k == "delay_factor") o.delay_factor = v.cast<unsigned>();
    else if (k == "slice") o.slice = v.cast<unsigned>();
    else if (k == "num_xcds") o.num_xcds = v.cast<unsigned>();
    else if (k == "cus_per_xcd") o.cus_per_xcd = v.cast<unsigned>();
    else if (k == "xcd_seed") o.xcd_seed = v.cast<uint64_t>();
    else if (k == "strict") o.strict = v.cast<bool>();
    else if (k == "stop_at_first_report") o.stop_at_first_report = v.cast<bool>();
    else if (k == "end_of_kernel_publishes") o.end_of_kernel_publishes = v.cast<bool>();
    else if (k == "mfma_block") o.mfma_block = v.cast<unsigned>();
    else if (k == "fp8_saturates") o.fp8_saturates = v.cast<bool>();
    else throw py::value_error("unknown option " + k);
  }
  return o;
}

py::dict decode_at(py::bytes code, size_t offset) {
  std::string b = code;
  std::vector<uint32_t> w((b.size() + 3) / 4);
  std::memcpy(w.data(), b.data(), b.size());
  Op op;
  py::dict d;
  const bool ok = offset / 4 < w.size() && decode(&w[offset / 4], static_cast<unsigned>(w.size() - offset / 4), &op);
  d["ok"] = ok;
  d["nbytes"] = op.nbytes;
  d["text"] = text(op, 0);
  d["category"] = category_name(op.category);
  d["name"] = op.info ? op.info->name : "";
  d["unsupported"] = ok ? bind(&op) : "not an instruction";
  return d;
}

py::list opcodes() {
  static const char* const kFormats[] = {"none", "sop1", "sop2", "sopc", "sopk", "sopp", "smem", "vop1", "vop2", "vopc", "vop3",
                                         "vop3sd", "vop3p", "vop3px2", "mubuf", "mtbuf", "flat", "global", "scratch", "ds"};
  size_t n;
  const OpInfo* t = all_infos(&n);
  py::list l;
  for (size_t i = 0; i < n; ++i)
    l.append(py::make_tuple(kFormats[static_cast<int>(t[i].format)], t[i].opcode, t[i].name, t[i].dst.bits, t[i].src0.bits, t[i].src1.bits, t[i].src2.bits,
                            std::string(1, t[i].dst.type), std::string(1, t[i].src0.type)));
  return l;
}

const char* state_name(Machine::State s) { return s == Machine::State::idle ? "idle" : s == Machine::State::running ? "running" : "fault"; }

void bind_exec(py::module_& m) {
  m.def("decode_at", &decode_at, py::arg("code"), py::arg("offset") = 0);
  m.def("opcodes", &opcodes);
  m.def("lane_set", &lane_set_name);
  m.def("unknown_behaviours", &unknown_behaviours);
  py::class_<Code, std::shared_ptr<Code>>(m, "Code")
      .def(py::init([](uint64_t base, py::bytes b) {
        std::string s = b;
        return std::make_shared<Code>(base, s.data(), s.size());
      }))
      .def("text", [](const Code& c, uint64_t pc) { return c.text(pc); })
      .def("add_line", &Code::add_line);
  py::class_<BareMachine>(m, "BareMachine")
      .def(py::init([](const py::dict& o) { return std::make_unique<BareMachine>(options_from(o)); }), py::arg("options") = py::dict())
      .def("add_memory", [](BareMachine& b, uint64_t a, uint64_t n, int home, bool uncached, bool writable, bool shared) { b.memory.add(a, n, home, uncached, writable, shared); },
           py::arg("addr"), py::arg("nbytes"), py::arg("home") = 0, py::arg("uncached") = false, py::arg("writable") = true, py::arg("shared") = false)
      .def("remove_memory", [](BareMachine& b, uint64_t a) { b.memory.remove(a); })
      .def("submit",
           [](BareMachine& b, std::shared_ptr<Code> code, uint64_t entry, py::sequence grid, py::sequence block, uint64_t kernarg, py::dict kw) {
             Dispatch d;
             d.code = std::move(code);
             d.entry = entry;
             d.kernarg = kernarg;
             set_three(d.num_workgroups, grid);
             set_three(d.block, block);
             auto num = [&](const char* k, uint64_t def) { return kw.contains(k) ? kw[k].cast<uint64_t>() : def; };
             d.name = kw.contains("name") ? kw["name"].cast<std::string>() : "kernel";
             d.device = static_cast<int>(num("device", 0));
             d.rank = static_cast<int>(num("rank", static_cast<uint64_t>(d.device)));
             d.lds_bytes = static_cast<uint32_t>(num("lds", 0));
             d.scratch_bytes = static_cast<uint32_t>(num("scratch", 0));
             d.rsrc1 = static_cast<uint32_t>(num("rsrc1", 0xf0u << 12 | 1u << 21 | 1u << 23 | 31));
             d.rsrc2 = static_cast<uint32_t>(num("rsrc2", 0x84));
             d.rsrc3 = static_cast<uint32_t>(num("rsrc3", 0));
             d.properties = static_cast<uint16_t>(num("properties", 8));
             d.preload = static_cast<uint16_t>(num("preload", 0));
             d.dispatch_packet = num("dispatch_packet", 0);
             d.queue = num("queue", 0);
             return b.machine.submit(std::move(d));
           },
           py::arg("code"), py::arg("entry"), py::arg("grid"), py::arg("block"), py::arg("kernarg"), py::arg("extra") = py::dict())
      .def("run", [](BareMachine& b, uint64_t n) { py::gil_scoped_release r; return state_name(b.machine.run(n)); }, py::arg("instructions") = 1 << 20)
      .def("done", [](BareMachine& b, DispatchId id) { return b.machine.done(id); })
      .def("fault", [](BareMachine& b) { return b.machine.fault(); })
      .def("clear_fault", [](BareMachine& b) { b.machine.clear_fault(); })
      .def("watchdog_report", [](BareMachine& b) { return b.machine.watchdog_report(); })
      .def("quiet_seconds", [](BareMachine& b) { return b.machine.quiet_seconds(); })
      .def("counters_json", [](BareMachine& b) { return b.machine.counters_json(); })
      .def("instructions", [](BareMachine& b) { return b.machine.instructions(); })
      .def("reports",
           [](BareMachine& b) {
             py::list l;
             for (const Report& r : b.machine.reports()) l.append(py::make_tuple(r.rule, r.text, r.kernel, r.pc, r.addr));
             return l;
           })
      .def("clear_reports", [](BareMachine& b) { b.machine.clear_reports(); })
      .def("engine_pointer", [](BareMachine& b, uint64_t p) { b.machine.engine_pointer(p); })
      .def("agent_polled", [](BareMachine& b, const std::string& a, int d, uint64_t p, uint64_t n) { b.machine.agent_polled(a, d, p, n); })
      .def("agent_observed", [](BareMachine& b, const std::string& a, int d, uint64_t p, uint64_t value) { b.machine.agent_observed(a, d, p, value); })
      .def("agent_reads", [](BareMachine& b, const std::string& a, int d, uint64_t p, uint64_t n, const std::string& w) { b.machine.agent_reads(a, d, p, n, w); })
      .def("agent_writes", [](BareMachine& b, const std::string& a, int d, uint64_t p, uint64_t n, const std::string& w) { b.machine.agent_writes(a, d, p, n, w); })
      .def("agent_joined", [](BareMachine& b, const std::string& a, DispatchId id) { b.machine.agent_joined(a, id); })
      .def("memory_released", [](BareMachine& b, uint64_t a, uint64_t n) { b.machine.memory_released(a, n); });
}

}  // namespace
}  // namespace mori_sim

PYBIND11_MODULE(_exec, m) { mori_sim::bind_exec(m); }
