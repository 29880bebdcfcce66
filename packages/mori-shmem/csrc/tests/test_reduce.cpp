// The sum of bf16 against a plain loop over single numbers, at sizes around the block and with every kind of value.
#include "host/reduce.h"

#include <cmath>
#include <cstring>
#include <random>

#include "check.h"

namespace {

float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Nearest bf16 by looking at both neighbours; ties to the even one.
uint16_t nearest(float value) {
  if (std::isnan(value)) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t below = static_cast<uint16_t>(bits >> 16);
  const uint32_t rest = bits & 0xffff;
  if (rest < 0x8000 || (rest == 0x8000 && below % 2 == 0)) return below;
  return static_cast<uint16_t>(below + 1);
}

}  // namespace

TEST(sums_in_the_order_given_and_rounds_once) {
  std::mt19937 random(3);
  for (const size_t count : {1u, 7u, 1023u, 1024u, 1025u, 5000u})
    for (const size_t num_sources : {1u, 2u, 3u, 8u}) {
      std::vector<std::vector<uint16_t>> sources(num_sources, std::vector<uint16_t>(count + 1));
      std::vector<const uint16_t*> pointers;
      for (auto& source : sources) {
        for (uint16_t& value : source)
          value = static_cast<uint16_t>(random() % 16 ? 0x3c00 + random() % 0x800 + (random() % 2) * 0x8000 : random());
        pointers.push_back(source.data() + 1);  // not aligned
      }
      std::vector<uint16_t> out(count + 1, 0xabcd);
      mori::sum_bf16(out.data(), pointers, count);
      for (size_t i = 0; i < count; ++i) {
        float sum = widen(pointers[0][i]);
        for (size_t s = 1; s < num_sources; ++s) sum += widen(pointers[s][i]);
        CHECK(out[i] == nearest(sum));
      }
      CHECK(out[count] == 0xabcd);
    }
}

TEST(special_values) {
  const uint16_t inf = 0x7f80, minus_inf = 0xff80, nan = 0xff81, zero = 0, minus_zero = 0x8000, most = 0x7f7f;
  const auto sum = [](uint16_t a, uint16_t b) {
    uint16_t out;
    mori::sum_bf16(&out, {&a, &b}, 1);
    return out;
  };
  CHECK(sum(inf, 0x3f80) == inf && sum(inf, minus_inf) == 0x7fc0 && sum(nan, zero) == 0x7fc0 && sum(0x7fff, zero) == 0x7fc0);
  CHECK(sum(most, most) == inf && sum(minus_zero, minus_zero) == minus_zero && sum(zero, minus_zero) == zero);
  CHECK(sum(0x0001, 0x0001) == 0x0002);  // denormals stay
}

TEST(the_result_may_replace_a_source) {
  std::vector<uint16_t> a(3000, 0x3f80), b(3000, 0x4000);
  mori::sum_bf16(b.data(), {a.data(), b.data()}, 3000);
  for (const uint16_t value : b) CHECK(value == 0x4040);
}

TEST_MAIN
