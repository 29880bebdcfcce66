// Small floats and conversions, with the rounding of gfx950 as far as it is known. Included inside the namespace of
// each lane set (no include guard games: everything is `static inline`, so every set gets its own code).
//
// fp8 = OCP e4m3 (no infinity, 0x7f is NaN), bf8 = OCP e5m2, fp6 = e2m3, bf6 = e3m2, fp4 = e2m1.

static inline uint32_t bits_of(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }
static inline float float_of(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline uint64_t bits_of(double f) { uint64_t u; __builtin_memcpy(&u, &f, 8); return u; }
static inline double double_of(uint64_t u) { double f; __builtin_memcpy(&f, &u, 8); return f; }

static inline bool is_nan32(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }
static inline bool is_snan32(uint32_t u) { return is_nan32(u) && !(u & 0x400000u); }

static inline float half_to_float(uint16_t h) {
  uint32_t s = (h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
  uint32_t normal = s | (e + 112) << 23 | m << 13;
  uint32_t special = s | 0x7f800000u | m << 13;
  float denorm = static_cast<float>(static_cast<int32_t>(m)) * 5.9604644775390625e-08f;
  uint32_t d = bits_of(denorm) | s;
  return float_of(e == 0 ? d : e == 31 ? special : normal);
}

// round: 0 nearest even, 1 towards +inf, 2 towards -inf, 3 towards zero (HW_REG_MODE's numbers)
static inline uint16_t half_from_double(double x, unsigned round, bool overflow_clamps) {
  uint64_t u = bits_of(x);
  uint16_t s = static_cast<uint16_t>(u >> 48 & 0x8000);
  uint64_t a = u & 0x7fffffffffffffffull;
  if (a > 0x7ff0000000000000ull) return static_cast<uint16_t>(s | 0x7e00 | (a >> 42 & 0x3ff));
  if (a == 0x7ff0000000000000ull) return static_cast<uint16_t>(s | 0x7c00);
  int e = static_cast<int>(a >> 52) - 1023;
  if (e < -30) {  // below half of the least denormal, or zero
    if (a && ((round == 1 && !s) || (round == 2 && s))) return static_cast<uint16_t>(s | 1);
    return s;
  }
  uint64_t m = (a & 0xfffffffffffffull) | 0x10000000000000ull;
  int drop = 42 + (e < -14 ? -14 - e : 0);
  uint64_t kept = m >> drop, rest = m & ((1ull << drop) - 1), halfway = 1ull << (drop - 1);
  bool up = round == 0 ? rest > halfway || (rest == halfway && (kept & 1))
            : round == 1 ? rest && !s
            : round == 2 ? rest && s
                         : false;
  uint32_t code = static_cast<uint32_t>((e < -14 ? 0 : (e + 14)) << 10) + static_cast<uint32_t>(kept) + up;
  if (code >= 0x7c00) {
    bool to_max = overflow_clamps || round == 3 || (round == 1 && s) || (round == 2 && !s);
    code = to_max ? 0x7bff : 0x7c00;
  }
  return static_cast<uint16_t>(s | code);
}

static inline uint16_t half_from_float_rne(float f) {  // no branches: vectorises
  uint32_t u = bits_of(f), s = u >> 16 & 0x8000, a = u & 0x7fffffffu;
  uint32_t normal = (a + 0xfffu + (a >> 13 & 1)) >> 13;
  uint32_t code = normal - (112u << 10);
  uint32_t den = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
  code = a < 0x38800000u ? den : code;
  code = a >= 0x477ff000u ? 0x7c00u : code;
  code = a > 0x7f800000u ? (0x7e00u | (a >> 13 & 0x3ff)) : code;
  return static_cast<uint16_t>(s | code);
}

static inline float brain_to_float(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }
static inline uint16_t brain_from_float(float f) {
  uint32_t u = bits_of(f);
  uint32_t r = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(is_nan32(u) ? (u >> 16 | 0x40u) : r);
}
static inline uint16_t brain_from_float_sr(float f, uint32_t random) {
  uint32_t u = bits_of(f);
  if ((u & 0x7f800000u) == 0x7f800000u) return static_cast<uint16_t>(is_nan32(u) ? (u >> 16 | 0x40u) : u >> 16);
  return static_cast<uint16_t>((u + (random & 0xffffu)) >> 16);
}

// One encoder for all small formats. kInf: has infinities (bf8). kNan: has NaN (fp8, bf8).
template <int E, int M, int BIAS, bool kInf, bool kNan>
struct Small {
  static constexpr uint32_t kMax = kInf ? (((1u << E) - 1) << M) - 1 : kNan ? (1u << (E + M)) - 2 : (1u << (E + M)) - 1;
  static constexpr uint32_t kOver = kInf ? kMax + 1 : kNan ? kMax + 1 : kMax;  // Inf, NaN or the largest
  static constexpr uint32_t kNanCode = kNan ? (1u << (E + M)) - 1 : kMax;
  static constexpr uint32_t kSign = 1u << (E + M);

  static inline uint32_t encode(float f, bool saturate) {
    constexpr int drop = 23 - M;
    constexpr uint32_t least_normal = static_cast<uint32_t>(127 + 1 - BIAS) << 23;
    const float magic = float_of(static_cast<uint32_t>(127 + 23 - (BIAS - 1 + M)) << 23);  // ulp = least denormal
    uint32_t u = bits_of(f), a = u & 0x7fffffffu;
    uint32_t normal = ((a + ((1u << (drop - 1)) - 1) + (a >> drop & 1)) >> drop) - (static_cast<uint32_t>(127 - BIAS) << M);
    uint32_t den = bits_of(float_of(a < least_normal ? a : 0u) + magic) - bits_of(magic);
    uint32_t code = a < least_normal ? den : normal;
    uint32_t over = saturate ? kMax : kOver;
    bool inf = a == 0x7f800000u;
    code = a < 0x7f800000u && code > kMax ? over : code;
    code = inf ? (kInf && !saturate ? kOver : over) : code;
    code = a > 0x7f800000u ? kNanCode : code;
    return code | (u >> 31 ? kSign : 0u);
  }
  // Stochastic: random bits are added below the kept mantissa, then truncation.
  static inline uint32_t encode_sr(float f, uint32_t random, bool saturate) {
    uint32_t u = bits_of(f), a = u & 0x7fffffffu, s = u >> 31 ? kSign : 0u;
    if (a > 0x7f800000u) return kNanCode | s;
    if (a == 0x7f800000u) return (saturate ? kMax : kOver) | s;
    int e = static_cast<int>(a >> 23) - 127;
    int drop = 23 - M + (e < 1 - BIAS ? 1 - BIAS - e : 0);
    if (a < 0x00800000u) return s;
    uint64_t m = (a & 0x7fffffu) | 0x800000u;
    if (drop > 40) return s;
    m = m << 20;                          // room for the random bits of deep denormals
    uint64_t r = drop <= 12 ? static_cast<uint64_t>(random >> (32 - drop - 20 < 0 ? 0 : 32 - drop - 20))
                            : static_cast<uint64_t>(random) << (drop + 20 - 32);
    r &= (1ull << (drop + 20)) - 1;
    uint64_t kept = (m + r) >> (drop + 20);
    uint32_t code = static_cast<uint32_t>((e < 1 - BIAS ? 0 : (e + BIAS - 1)) << M) + static_cast<uint32_t>(kept);
    if (code > kMax) code = saturate ? kMax : kOver;
    return code | s;
  }
  static inline float decode(uint32_t c) {
    uint32_t e = c >> M & ((1u << E) - 1), m = c & ((1u << M) - 1);
    float v;
    if (kInf && e == (1u << E) - 1) v = m ? float_of(0x7fc00000u) : float_of(0x7f800000u);
    else if (!kInf && kNan && (c & (kSign - 1)) == kNanCode) v = float_of(0x7fc00000u);
    else if (e == 0) v = static_cast<float>(m) * float_of(static_cast<uint32_t>(127 + 1 - BIAS - M) << 23);
    else v = float_of((e + 127 - BIAS) << 23 | m << (23 - M));
    return c & kSign ? -v : v;
  }
};
using Fp8 = Small<4, 3, 7, false, true>;
using Bf8 = Small<5, 2, 15, true, true>;
using Fp6 = Small<2, 3, 1, false, false>;
using Bf6 = Small<3, 2, 3, false, false>;
using Fp4 = Small<2, 1, 1, false, false>;

// 2^(127 - scale) and 2^(scale - 127) for an e8m0 scale byte; 0xff is NaN.
static inline double scale_value(uint32_t s) {
  if (s == 255) return double_of(0x7ff8000000000000ull);
  return double_of(static_cast<uint64_t>(static_cast<int64_t>(s) - 127 + 1023) << 52);
}
