// Rows spread over groups, by address: device/host.py checks the tensors behind the addresses.
#include "host/rows.h"

#include "python/bindings.h"

#include <tuple>

namespace mori::python {

namespace {

template <typename T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

using Map = std::tuple<uint64_t, uint64_t, uint64_t, int32_t, int32_t>;  // slots, rows, width, stride, null
using Code = std::tuple<std::string, uint64_t, uint64_t>;  // kind, width, scale block

SlotMap map_of(const Map& map) {
  return {at<int32_t>(std::get<0>(map)), std::get<1>(map), std::get<2>(map), std::get<3>(map), std::get<4>(map)};
}

Kind kind_of(const std::string& name) {
  static const char* const names[] = {"bf16", "fp16", "fp32", "e4m3fn", "e4m3fnuz", "e2m1"};
  for (int i = 0; i < 6; ++i)
    if (name == names[i]) return static_cast<Kind>(i);
  throw bad_value("kind", name, "bf16, fp16, fp32, e4m3fn, e4m3fnuz, e2m1");
}

RowCode code_of(const Code& code) { return {kind_of(std::get<0>(code)), std::get<1>(code), std::get<2>(code)}; }

}  // namespace

void bind_rows(py::module_& m) {
  m.def(
      "group_slots",
      [](uint64_t ids, const Map& map, int64_t first, int64_t group_size, int64_t num_groups) {
        return group_slots(at<const int32_t>(ids), map_of(map), first, group_size, num_groups);
      },
      py::arg("ids"), py::arg("map"), py::arg("first"), py::arg("group_size"), py::arg("num_groups"), NoGil());
  m.def(
      "shift_slots", [](const Map& map, const std::vector<int64_t>& first) { shift_slots(map_of(map), first); },
      py::arg("map"), py::arg("first"), NoGil());
  m.def(
      "scatter_rows",
      [](const Map& map, const std::vector<std::pair<uint64_t, uint64_t>>& fields,
         const std::vector<std::vector<uint64_t>>& targets) {
        std::vector<Field> sources;
        for (const auto& [address, row_bytes] : fields) sources.push_back({at<const char>(address), row_bytes});
        std::vector<std::vector<char*>> places;
        for (const auto& group : targets) {
          places.emplace_back();
          for (const uint64_t address : group) places.back().push_back(at<char>(address));
        }
        scatter_rows(map_of(map), sources, places);
      },
      py::arg("map"), py::arg("fields"), py::arg("targets"), NoGil());
  m.def(
      "copy_ranges",
      [](const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& ranges) {
        for (const auto& [to, from, nbytes] : ranges)
          if (nbytes != 0) std::memcpy(at<char>(to), at<const char>(from), nbytes);
      },
      py::arg("ranges"), NoGil());
  m.def(
      "sum_rows",
      [](uint64_t out, const std::string& out_kind, const Map& map, const std::vector<uint64_t>& tables, uint64_t pitch,
         const Code& code, uint64_t factors, uint64_t ids) {
        std::vector<const char*> places;
        for (const uint64_t address : tables) places.push_back(at<const char>(address));
        sum_rows(at<char>(out), kind_of(out_kind), map_of(map), places, pitch, code_of(code),
                 {at<const float>(factors), at<const int32_t>(ids)});
      },
      py::arg("out"), py::arg("out_kind"), py::arg("map"), py::arg("tables"), py::arg("pitch"), py::arg("code"),
      py::arg("factors") = 0, py::arg("ids") = 0, NoGil());
  m.def(
      "quantize_rows",
      [](uint64_t out, uint64_t rows, uint64_t num_rows, const Code& code) {
        quantize_rows(at<char>(out), at<const uint16_t>(rows), num_rows, code_of(code));
      },
      py::arg("out"), py::arg("rows"), py::arg("num_rows"), py::arg("code"), NoGil());
  m.def(
      "row_bytes", [](const Code& code) { return code_of(code).nbytes(); }, py::arg("code"));
  m.def(
      "count_ids",
      [](uint64_t ids, uint64_t num_ids, int64_t first, uint64_t num, uint64_t counts) {
        count_ids(at<const int32_t>(ids), num_ids, first, num, at<int32_t>(counts));
      },
      py::arg("ids"), py::arg("num_ids"), py::arg("first"), py::arg("num"), py::arg("counts"), NoGil());
}

}  // namespace mori::python
