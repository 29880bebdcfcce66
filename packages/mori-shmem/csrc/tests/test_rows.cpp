// Rows by ids, against plain loops over single rows; small codes, against all of their values.
#include "host/rows.h"

#include <cmath>
#include <cstring>
#include <random>

#include "check.h"

using namespace mori;

namespace {

constexpr int32_t kStride = 1000, kNull = -1;

std::vector<float> values_of(int num_codes, float (*value)(uint8_t)) {
  std::vector<float> values;
  for (int code = 0; code < num_codes; ++code) values.push_back(value(static_cast<uint8_t>(code)));
  return values;
}

// The code whose value is nearest; of two the one with the even code, both magnitudes being in order.
uint8_t nearest(const std::vector<float>& values, float x) {
  int best = -1;
  for (int code = 0; code < static_cast<int>(values.size()); ++code) {
    if (std::isnan(values[code]) || std::signbit(values[code]) != std::signbit(x)) continue;
    if (best < 0 || std::fabs(values[code] - x) < std::fabs(values[best] - x) ||
        (std::fabs(values[code] - x) == std::fabs(values[best] - x) && code % 2 == 0))
      best = code;
  }
  return static_cast<uint8_t>(best);
}

}  // namespace

TEST(small_codes_are_the_nearest_ones) {
  std::mt19937 random(5);
  const auto fn = values_of(256, codes::e4m3fn_value);
  const auto fnuz = values_of(256, codes::e4m3fnuz_value);
  const auto e2m1 = values_of(16, codes::e2m1_value);
  CHECK(fn[0x7e] == 448.0f && fn[1] == 0x1p-9f && std::isnan(fn[0x7f]) && std::isnan(fn[0xff]));
  CHECK(fnuz[0x7f] == 240.0f && fnuz[1] == 0x1p-10f && std::isnan(fnuz[0x80]));
  CHECK(e2m1[7] == 6.0f && e2m1[1] == 0.5f && e2m1[9] == -0.5f);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::ldexp(static_cast<float>(random() % 4096) - 2048.0f, static_cast<int>(random() % 24) - 20);
    CHECK(codes::e4m3fn_code(x) == nearest(fn, x));
    if (x == 0.0f || codes::e4m3fnuz_code(x) != 0) CHECK(codes::e4m3fnuz_code(x) == nearest(fnuz, x));
    CHECK(codes::e2m1_code(x) == nearest(e2m1, x));
  }
  CHECK(codes::e4m3fnuz_code(-1e-9f) == 0);  // there is no -0
  CHECK(codes::e4m3fn_code(NAN) == 0x7f && codes::e4m3fnuz_code(NAN) == 0x80);
  CHECK(codes::e4m3fn_code(INFINITY) == 0x7e && codes::e4m3fn_code(-1e9f) == 0xfe);
}

TEST(fp16_goes_there_and_back) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = codes::fp16_value(static_cast<uint16_t>(code));
    if (std::isnan(value)) {
      CHECK((code & 0x7c00) == 0x7c00 && (code & 0x3ff) != 0);
    } else {
      CHECK(codes::fp16_code(value) == code);
    }
  }
  CHECK(codes::fp16_code(65520.0f) == 0x7c00 && codes::fp16_code(65519.0f) == 0x7bff);
}

TEST(slots_scatter_and_sum_bring_rows_back) {
  std::mt19937 random(7);
  for (const uint64_t width : {1u, 3u, 8u, 9u})
    for (const uint64_t rows : {0u, 1u, 37u}) {
      const int64_t groups = 3, size = 4;
      std::vector<int32_t> ids(rows * width), slots(rows * width);
      for (int32_t& id : ids) id = static_cast<int32_t>(random() % 16) - 2;  // -2, -1 and 12, 13 belong to nobody
      const SlotMap map{slots.data(), rows, width, kStride, kNull};
      const auto counts = group_slots(ids.data(), map, 0, size, groups);
      std::vector<int64_t> seen(groups, 0);
      for (uint64_t row = 0; row < rows; ++row)
        for (uint64_t j = 0; j < width; ++j) {
          const int32_t id = ids[row * width + j], slot = slots[row * width + j];
          bool named = false;
          for (uint64_t i = 0; i < j; ++i) named |= ids[row * width + i] >= 0 && ids[row * width + i] / size == id / size;
          if (id < 0 || id >= groups * size || named) {
            CHECK(slot == kNull);
          } else {
            CHECK(slot == id / size * kStride + seen[id / size]);
            ++seen[id / size];
          }
        }
      CHECK(seen == counts);

      const uint64_t hidden = 1100;  // more than one block
      std::vector<uint16_t> x(rows * hidden);
      for (uint16_t& value : x) value = codes::bf16_code(static_cast<float>(random() % 17) - 8.0f);
      std::vector<std::vector<uint16_t>> tables(groups, std::vector<uint16_t>((rows + 1) * hidden, 0x7fc0));
      std::vector<std::vector<char*>> targets;
      std::vector<const char*> sources;
      for (auto& table : tables) targets.push_back({reinterpret_cast<char*>(table.data())});
      for (auto& table : tables) sources.push_back(reinterpret_cast<const char*>(table.data()));
      scatter_rows(map, {{reinterpret_cast<const char*>(x.data()), hidden * 2}}, targets);
      std::vector<uint16_t> out(rows * hidden + 1, 0x1234);
      sum_rows(reinterpret_cast<char*>(out.data()), Kind::kBf16, map, sources, hidden * 2, {Kind::kBf16, hidden, 0});
      for (uint64_t row = 0; row < rows; ++row) {
        int copies = 0;
        for (uint64_t j = 0; j < width; ++j) copies += slots[row * width + j] != kNull;
        for (uint64_t h = 0; h < hidden; ++h)
          CHECK(codes::bf16_value(out[row * hidden + h]) == copies * codes::bf16_value(x[row * hidden + h]));
      }
      CHECK(out.back() == 0x1234);
      for (int64_t group = 0; group < groups; ++group)  // nothing beyond the rows of a group
        CHECK(tables[group][static_cast<uint64_t>(counts[group]) * hidden] == 0x7fc0);
    }
}

TEST(quantised_rows_are_near_and_end_where_they_should) {
  std::mt19937 random(11);
  for (const uint64_t hidden : {1u, 127u, 128u, 129u, 1500u})
    for (const Kind kind : {Kind::kE4m3fn, Kind::kE4m3fnuz, Kind::kE2m1}) {
      const RowCode code{kind, hidden, kind == Kind::kE2m1 ? 32u : 128u};
      std::vector<uint16_t> x(2 * hidden);
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = codes::bf16_code(std::ldexp(static_cast<float>(random() % 2001) - 1000.0f, i < hidden ? -20 : 4));
      std::vector<char> wire(2 * code.nbytes() + 1, 0x55);
      quantize_rows(wire.data(), x.data(), 2, code);
      CHECK(wire.back() == 0x55);
      std::vector<int32_t> slots{0, 1};
      std::vector<float> back(2 * hidden);
      sum_rows(reinterpret_cast<char*>(back.data()), Kind::kFp32, {slots.data(), 2, 1, kStride, kNull}, {wire.data()},
               code.nbytes(), code);
      double error = 0, size = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double weight = i < hidden ? 0x1p24 : 1;  // both rows count
        error += std::pow((back[i] - codes::bf16_value(x[i])) * weight, 2);
        size += std::pow(codes::bf16_value(x[i]) * weight, 2);
      }
      CHECK(std::sqrt(error) <= (kind == Kind::kE2m1 ? 0.2 : 0.04) * std::sqrt(size));
    }
}

TEST(one_bad_number_makes_its_block_nan_and_no_other) {
  const RowCode code{Kind::kE4m3fn, 256, 128};
  std::vector<uint16_t> x(256, codes::bf16_code(3.0f));
  x[5] = 0x7f80;  // infinity
  std::vector<char> wire(code.nbytes());
  quantize_rows(wire.data(), x.data(), 1, code);
  std::vector<int32_t> slots{0};
  std::vector<float> back(256);
  sum_rows(reinterpret_cast<char*>(back.data()), Kind::kFp32, {slots.data(), 1, 1, kStride, kNull}, {wire.data()},
           code.nbytes(), code);
  for (int i = 0; i < 128; ++i) CHECK(std::isnan(back[i]));
  for (int i = 128; i < 256; ++i) CHECK(back[i] == 3.0f);
}

TEST(factors_of_repeated_ids_add_up) {
  std::vector<int32_t> ids{4, 9, 4}, slots(3);
  const SlotMap map{slots.data(), 1, 3, kStride, kNull};
  group_slots(ids.data(), map, 4, 1, 6);  // a group for each id from 4 on
  CHECK(slots[0] == 0 && slots[1] == 5 * kStride && slots[2] == kNull);
  const float rows[2] = {1.0f, 10.0f}, factors[3] = {0.5f, 2.0f, 0.25f};
  std::vector<const char*> tables(6, nullptr);
  tables[0] = reinterpret_cast<const char*>(&rows[0]);
  tables[5] = reinterpret_cast<const char*>(&rows[1]);
  float out = 0;
  sum_rows(reinterpret_cast<char*>(&out), Kind::kFp32, map, tables, 4, {Kind::kFp32, 1, 0}, {factors, ids.data()});
  CHECK(out == 20.75f);
}

TEST_MAIN
