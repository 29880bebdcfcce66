// libmori_sdma, where it lies and what it makes of a packet; and the sum of bf16.
#include <dlfcn.h>
#include <mori_sdma.h>

#include <cstring>

#include "host/reduce.h"
#include "python/bindings.h"

namespace mori::python {

namespace {

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

void sum(uint64_t out, const std::vector<uint64_t>& sources, uint64_t num_elements) {
  if (sources.empty()) throw bad_value("sources", uint64_t{0}, "one or more");
  std::vector<const uint16_t*> from;
  for (const uint64_t address : sources) from.push_back(reinterpret_cast<const uint16_t*>(address));
  sum_bf16(reinterpret_cast<uint16_t*>(out), from, num_elements);
}

}  // namespace

void bind_sdma(py::module_& m) {
  m.attr("MAX_COPY_BYTES") = mori_sdma_max_copy(0);
  m.attr("MIN_RING_BYTES") = kMinRingBytes;
  m.def("sdma_library_path", &sdma_library_path);
  m.def("describe_packet", &describe_packet, py::arg("packet"));
  m.def("sum_bf16", &sum, py::arg("out"), py::arg("sources"), py::arg("num_elements"), NoGil());
}

}  // namespace mori::python
