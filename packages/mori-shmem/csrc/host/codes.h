// Numbers of few bits: what each code means as fp32, and the code nearest to an fp32 value.
//
// Rounding is to nearest, ties to even. The 8-bit floats and e2m1 keep to their largest finite value instead of growing
// past it; fp16 and bf16 go to infinity. NaN stays NaN where there is a code for it (e2m1 has none: it gives the largest
// value). Written without branches, so that loops over them become vector code.
//
//          exponent bias   largest   NaN
//   e4m3fn       7           448     0x7f, 0xff
//   e4m3fnuz     8           240     0x80, which is why there is no -0
//   e2m1         1             6     none
#pragma once
#include <cstdint>
#include <cstring>

namespace mori {

enum class Kind { kBf16, kFp16, kFp32, kE4m3fn, kE4m3fnuz, kE2m1 };

namespace codes {

inline uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

inline float from_bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

constexpr uint32_t kInf = 0x7f800000;

// |value| as exponent and mantissa of a small float: `mantissa` bits of it, exponents offset by `shift`, and steps of
// 1/unit below the smallest normal number. No overflow is looked at.
template <int mantissa, int shift>
inline uint32_t small(float magnitude, float smallest_normal, float unit) {
  constexpr int drop = 23 - mantissa;
  const uint32_t word = bits(magnitude);
  const uint32_t rounded = word + ((1u << (drop - 1)) - 1) + (word >> drop & 1);
  const uint32_t normal = (rounded - (static_cast<uint32_t>(shift) << 23)) >> drop;
  const uint32_t subnormal = bits(magnitude * unit + 8388608.0f) & 0xffff;  // 2^23: the sum rounds to whole units
  return magnitude >= smallest_normal ? normal : subnormal;
}

inline float bf16_value(uint16_t code) { return from_bits(static_cast<uint32_t>(code) << 16); }

inline uint16_t bf16_code(float value) {
  const uint32_t word = bits(value);
  const uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((word & 0x7fffffff) > kInf ? 0x7fc0 : rounded);
}

inline float fp16_value(uint16_t code) {
  const uint32_t magnitude = code & 0x7fff;
  const uint32_t finite = bits(from_bits(magnitude << 13) * 0x1p112f);
  const uint32_t special = magnitude << 13 | kInf;
  return from_bits((magnitude >= 0x7c00 ? special : finite) | static_cast<uint32_t>(code & 0x8000) << 16);
}

inline uint16_t fp16_code(float value) {
  const uint32_t word = bits(value), magnitude = word & 0x7fffffff;
  const uint32_t code = small<10, 112>(from_bits(magnitude < kInf ? magnitude : 0), 0x1p-14f, 0x1p24f);
  const uint32_t finite = code < 0x7c00 ? code : 0x7c00;
  const uint32_t special = magnitude > kInf ? 0x7e00 : 0x7c00;
  return static_cast<uint16_t>((magnitude < kInf ? finite : special) | (word >> 16 & 0x8000));
}

inline float e4m3fn_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7f;
  const uint32_t finite = bits(from_bits(magnitude << 20) * 0x1p120f);
  return from_bits((magnitude == 0x7f ? 0x7fc00000 : finite) | static_cast<uint32_t>(code & 0x80) << 24);
}

inline uint8_t e4m3fn_code(float value) {
  const uint32_t word = bits(value), magnitude = word & 0x7fffffff;
  const float held = from_bits(magnitude < 0x43e00000 ? magnitude : 0x43e00000);  // 448
  const uint32_t code = magnitude > kInf ? 0x7f : small<3, 120>(held, 0x1p-6f, 0x1p9f);
  return static_cast<uint8_t>(code | (word >> 24 & 0x80));
}

inline float e4m3fnuz_value(uint8_t code) {
  const uint32_t finite = bits(from_bits(static_cast<uint32_t>(code & 0x7f) << 20) * 0x1p119f);
  return from_bits(code == 0x80 ? 0x7fc00000 : finite | static_cast<uint32_t>(code & 0x80) << 24);
}

inline uint8_t e4m3fnuz_code(float value) {
  const uint32_t word = bits(value), magnitude = word & 0x7fffffff;
  const float held = from_bits(magnitude < 0x43700000 ? magnitude : 0x43700000);  // 240
  const uint32_t code = small<3, 119>(held, 0x1p-7f, 0x1p10f);
  const uint32_t with_sign = code == 0 ? 0 : code | (word >> 24 & 0x80);
  return static_cast<uint8_t>(magnitude > kInf ? 0x80 : with_sign);
}

inline float e2m1_value(uint8_t code) {
  const float magnitude = from_bits(static_cast<uint32_t>(code & 7) << 22) * 0x1p126f;
  return from_bits(bits(magnitude) | static_cast<uint32_t>(code & 8) << 28);
}

inline uint8_t e2m1_code(float value) {
  const uint32_t word = bits(value), magnitude = word & 0x7fffffff;
  const float held = from_bits(magnitude < 0x40c00000 ? magnitude : 0x40c00000);  // 6
  return static_cast<uint8_t>(small<1, 126>(held, 1.0f, 2.0f) | (word >> 28 & 8));
}

}  // namespace codes
}  // namespace mori
