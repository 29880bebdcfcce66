// What a 16-byte unit of a combined row holds, compiled for one of these; and how the rows of a quantised transport are
// made. ELEMENT is the dtype of rows and results, WIRE what travels.
#pragma once
#include "types.cuh"

#define BF16 0
#define FP16 1
#define FP32 2
#define E4M3FN 3
#define E4M3FNUZ 4

DEVICE float bits_float(unsigned b) { return __uint_as_float(b); }
DEVICE float half_float(unsigned h) {
  float f;
  asm("{\n.reg .b16 h;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(f) : "r"(h & 0xffff));
  return f;
}

// e4m3 codes are halves with a shorter exponent: shifted into place, only the bias differs.
DEVICE float fn_float(unsigned code) {
  if ((code & 0x7f) == 0x7f) return bits_float(0x7fc00000);
  return half_float((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f;
}
DEVICE float fnuz_float(unsigned code) {
  if (code == 0x80) return bits_float(0x7fc00000);
  return half_float((code & 0x80) << 8 | (code & 0x7f) << 7) * 128.0f;
}
// To the nearest code, ties to even; what is too large becomes the largest finite value, NaN stays NaN.
template <int BIAS, int MOST, int NOT_A_NUMBER>
DEVICE unsigned magnitude_code(float x) {
  const unsigned bits = __float_as_uint(x) & 0x7fffffff;
  if (bits > 0x7f800000) return NOT_A_NUMBER;
  if (bits < (unsigned)(128 - BIAS) << 23) return __float2uint_rn(bits_float(bits) * bits_float((unsigned)(127 + BIAS + 2) << 23));
  const unsigned rounded = bits + 0x7ffff + (bits >> 20 & 1);
  return min((rounded >> 20) - ((127 - BIAS) << 3), (unsigned)MOST);
}
DEVICE unsigned float_fn(float x) { return (__float_as_uint(x) >> 24 & 0x80) | magnitude_code<7, 0x7e, 0x7f>(x); }
DEVICE unsigned float_fnuz(float x) {  // has one zero, and one NaN in the place of the other
  const unsigned code = magnitude_code<8, 0x7f, 0x80>(x);
  return code & 0x80 || !code ? code : (__float_as_uint(x) >> 24 & 0x80) | code;
}

template <int KIND>
struct Element;

template <>
struct Element<BF16> {
  static constexpr int PER_UNIT = 8;
  static DEVICE void unpack(float* f, uint4 v) {
    const unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = bits_float(w[i] << 16), f[2 * i + 1] = bits_float(w[i] & 0xffff0000u);
  }
  static DEVICE uint4 pack(const float* f) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};

template <>
struct Element<FP16> {
  static constexpr int PER_UNIT = 8;
  static DEVICE void unpack(float* f, uint4 v) {
    const unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = half_float(w[i]), f[2 * i + 1] = half_float(w[i] >> 16);
  }
  static DEVICE uint4 pack(const float* f) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};

template <>
struct Element<FP32> {
  static constexpr int PER_UNIT = 4;
  static DEVICE void unpack(float* f, uint4 v) { f[0] = bits_float(v.x), f[1] = bits_float(v.y), f[2] = bits_float(v.z), f[3] = bits_float(v.w); }
  static DEVICE uint4 pack(const float* f) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
};

template <bool UZ>
struct Eight {
  static constexpr int PER_UNIT = 16;
  static DEVICE void unpack(float* f, uint4 v) {
    const unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const unsigned code = w[i / 4] >> 8 * (i % 4) & 0xff;
      f[i] = UZ ? fnuz_float(code) : fn_float(code);
    }
  }
  static DEVICE uint4 pack(const float* f) {
    unsigned w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++) w[i / 4] |= (UZ ? float_fnuz(f[i]) : float_fn(f[i])) << 8 * (i % 4);
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};
template <>
struct Element<E4M3FN> : Eight<false> {};
template <>
struct Element<E4M3FNUZ> : Eight<true> {};
