#include "host/rows.h"

#include <algorithm>
#include <cmath>

#include "host/clones.h"

namespace mori {

namespace {

constexpr uint64_t kBlock = 1024;  // fp32 sums of a block stay in the first-level cache

// For each kind: sums = or += value(codes) * scale, codes = code(values). Loops by themselves, so that each is cloned.
#define MORI_LOOPS(kind, type)                                                                                          \
  MORI_VECTOR_CLONES void set_##kind(float* __restrict sums, const void* from, float scale, uint64_t count) {           \
    const type* __restrict codes_in = static_cast<const type*>(from);                                                   \
    for (uint64_t i = 0; i < count; ++i) sums[i] = codes::kind##_value(codes_in[i]) * scale;                            \
  }                                                                                                                     \
  MORI_VECTOR_CLONES void add_##kind(float* __restrict sums, const void* from, float scale, uint64_t count) {           \
    const type* __restrict codes_in = static_cast<const type*>(from);                                                   \
    for (uint64_t i = 0; i < count; ++i) sums[i] += codes::kind##_value(codes_in[i]) * scale;                           \
  }                                                                                                                     \
  MORI_VECTOR_CLONES void code_##kind(void* to, const float* __restrict values, float scale, uint64_t count) {          \
    type* __restrict out = static_cast<type*>(to);                                                                      \
    for (uint64_t i = 0; i < count; ++i) out[i] = codes::kind##_code(values[i] * scale);                                \
  }

MORI_LOOPS(bf16, uint16_t)
MORI_LOOPS(fp16, uint16_t)
MORI_LOOPS(e4m3fn, uint8_t)
MORI_LOOPS(e4m3fnuz, uint8_t)
#undef MORI_LOOPS

MORI_VECTOR_CLONES void set_fp32(float* __restrict sums, const void* from, float scale, uint64_t count) {
  const float* __restrict values = static_cast<const float*>(from);
  for (uint64_t i = 0; i < count; ++i) sums[i] = values[i] * scale;
}
MORI_VECTOR_CLONES void add_fp32(float* __restrict sums, const void* from, float scale, uint64_t count) {
  const float* __restrict values = static_cast<const float*>(from);
  for (uint64_t i = 0; i < count; ++i) sums[i] += values[i] * scale;
}
void code_fp32(void* to, const float* values, float scale, uint64_t count) {
  float* out = static_cast<float*>(to);
  for (uint64_t i = 0; i < count; ++i) out[i] = values[i] * scale;
}

// Two codes a byte, the first one in the low half. Every range starts at an even element.
void set_e2m1(float* sums, const void* from, float scale, uint64_t count) {
  const uint8_t* pairs = static_cast<const uint8_t*>(from);
  for (uint64_t i = 0; i < count; ++i) sums[i] = codes::e2m1_value(pairs[i / 2] >> (i % 2 * 4) & 15) * scale;
}
void add_e2m1(float* sums, const void* from, float scale, uint64_t count) {
  const uint8_t* pairs = static_cast<const uint8_t*>(from);
  for (uint64_t i = 0; i < count; ++i) sums[i] += codes::e2m1_value(pairs[i / 2] >> (i % 2 * 4) & 15) * scale;
}
void code_e2m1(void* to, const float* values, float scale, uint64_t count) {
  uint8_t* pairs = static_cast<uint8_t*>(to);
  for (uint64_t i = 0; i < count; i += 2) {
    const uint8_t high = i + 1 < count ? codes::e2m1_code(values[i + 1] * scale) : 0;
    pairs[i / 2] = static_cast<uint8_t>(codes::e2m1_code(values[i] * scale) | high << 4);
  }
}

struct Loops {
  void (*set)(float*, const void*, float, uint64_t);
  void (*add)(float*, const void*, float, uint64_t);
  void (*code)(void*, const float*, float, uint64_t);
  uint64_t half_bytes;  // bytes of two numbers
  float largest;
};

const Loops& loops_of(Kind kind) {
  static const Loops table[] = {
      {set_bf16, add_bf16, code_bf16, 4, 0},          {set_fp16, add_fp16, code_fp16, 4, 0},
      {set_fp32, add_fp32, code_fp32, 8, 0},          {set_e4m3fn, add_e4m3fn, code_e4m3fn, 2, 448},
      {set_e4m3fnuz, add_e4m3fnuz, code_e4m3fnuz, 2, 240}, {set_e2m1, add_e2m1, code_e2m1, 1, 6},
  };
  return table[static_cast<int>(kind)];
}

// sums = or += the numbers [begin, begin + count) of a row.
void take(float* sums, const char* row, const RowCode& code, uint64_t begin, uint64_t count, float factor, bool first) {
  const Loops& loops = loops_of(code.kind);
  const auto one = first ? loops.set : loops.add;
  if (code.scale_block == 0) {
    one(sums, row + begin * loops.half_bytes / 2, factor, count);
    return;
  }
  const char* scales = row + code.scales_at();
  for (uint64_t at = begin; at < begin + count;) {
    const uint64_t block = at / code.scale_block;
    const uint64_t end = std::min(begin + count, (block + 1) * code.scale_block);
    float scale;
    std::memcpy(&scale, scales + 4 * block, sizeof scale);
    one(sums + (at - begin), row + at * loops.half_bytes / 2, scale * factor, end - at);
    at = end;
  }
}

float factor_of(const Factors& factors, uint64_t at, uint64_t slot, uint64_t width) {
  float factor = factors.factors[at + slot];
  for (uint64_t j = slot + 1; j < width; ++j)
    if (factors.ids[at + j] == factors.ids[at + slot]) factor += factors.factors[at + j];
  return factor;
}

MORI_VECTOR_CLONES uint32_t largest_magnitude(const uint16_t* __restrict row, uint64_t count) {
  uint32_t largest = 0;  // as bits: NaN and infinity are above every number
  for (uint64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(row[i] & 0x7fff));
  return largest << 16;
}

void quantize_row(char* out, const uint16_t* row, const RowCode& code) {
  const Loops& loops = loops_of(code.kind);
  alignas(64) float values[kBlock];
  const uint64_t step = code.scale_block == 0 ? kBlock : code.scale_block;
  for (uint64_t begin = 0; begin < code.width; begin += step) {
    const uint64_t end = std::min(code.width, begin + step);
    float factor = 1.0f;
    if (code.scale_block != 0) {
      const float largest = codes::from_bits(largest_magnitude(row + begin, end - begin));
      float scale = largest == 0.0f ? 1.0f : largest / loops.largest;
      factor = largest == 0.0f ? 1.0f : loops.largest / largest;
      if (!std::isfinite(largest)) scale = std::nanf(""), factor = 0.0f;
      if (!std::isfinite(factor)) scale = 1.0f, factor = 1.0f;  // so small that its inverse overflows: becomes zero
      std::memcpy(out + code.scales_at() + 4 * (begin / code.scale_block), &scale, sizeof scale);
    }
    for (uint64_t at = begin; at < end; at += kBlock) {
      const uint64_t count = std::min(kBlock, end - at);
      set_bf16(values, row + at, 1.0f, count);
      loops.code(out + at * loops.half_bytes / 2, values, factor, count);
    }
  }
}

}  // namespace

std::vector<int64_t> group_slots(const int32_t* ids, const SlotMap& map, int64_t first, int64_t group_size,
                                 int64_t num_groups) {
  std::vector<int64_t> counts(static_cast<size_t>(num_groups), 0);
  std::vector<uint64_t> last_row(static_cast<size_t>(num_groups), UINT64_MAX);
  const int64_t limit = group_size * num_groups;
  for (uint64_t row = 0; row < map.rows; ++row)
    for (uint64_t j = 0; j < map.width; ++j) {
      const int64_t id = ids[row * map.width + j] - first;
      int32_t slot = map.null;
      if (id >= 0 && id < limit) {
        const auto group = static_cast<size_t>(id / group_size);
        if (last_row[group] != row) {
          last_row[group] = row;
          slot = static_cast<int32_t>(static_cast<int64_t>(group) * map.stride + counts[group]++);
        }
      }
      map.slots[row * map.width + j] = slot;
    }
  return counts;
}

void shift_slots(const SlotMap& map, const std::vector<int64_t>& first) {
  for (uint64_t i = 0; i < map.size(); ++i)
    if (map.slots[i] != map.null) map.slots[i] += static_cast<int32_t>(first[map.slots[i] / map.stride]);
}

void scatter_rows(const SlotMap& map, const std::vector<Field>& fields, const std::vector<std::vector<char*>>& targets) {
  for (uint64_t row = 0; row < map.rows; ++row)
    for (uint64_t j = 0; j < map.width; ++j) {
      const int32_t slot = map.slots[row * map.width + j];
      if (slot == map.null) continue;
      const auto& target = targets[slot / map.stride];
      const auto index = static_cast<uint64_t>(slot % map.stride);
      for (size_t f = 0; f < fields.size(); ++f)
        if (target[f] != nullptr && fields[f].row_bytes != 0)
          std::memcpy(target[f] + index * fields[f].row_bytes, fields[f].source + row * fields[f].row_bytes,
                      fields[f].row_bytes);
    }
}

uint64_t RowCode::code_bytes() const { return (width * loops_of(kind).half_bytes + 1) / 2; }

void sum_rows(char* out, Kind out_kind, const SlotMap& map, const std::vector<const char*>& tables, uint64_t pitch,
              const RowCode& code, const Factors& factors) {
  const Loops& result = loops_of(out_kind);
  const uint64_t out_bytes = code.width * result.half_bytes / 2;
  std::vector<const char*> sources(map.width);
  std::vector<float> weights(map.width, 1.0f);
  alignas(64) float sums[kBlock];
  for (uint64_t row = 0; row < map.rows; ++row, out += out_bytes) {
    size_t num_sources = 0;
    for (uint64_t j = 0; j < map.width; ++j) {
      const int32_t slot = map.slots[row * map.width + j];
      if (slot == map.null || tables[slot / map.stride] == nullptr) continue;
      if (factors.factors != nullptr) weights[num_sources] = factor_of(factors, row * map.width, j, map.width);
      sources[num_sources++] = tables[slot / map.stride] + static_cast<uint64_t>(slot % map.stride) * pitch;
    }
    if (num_sources == 0) std::memset(out, 0, out_bytes);
    if (num_sources == 0) continue;
    for (uint64_t begin = 0; begin < code.width; begin += kBlock) {
      const uint64_t count = std::min(kBlock, code.width - begin);
      for (size_t i = 0; i < num_sources; ++i) take(sums, sources[i], code, begin, count, weights[i], i == 0);
      result.code(out + begin * result.half_bytes / 2, sums, 1.0f, count);
    }
  }
}

void quantize_rows(char* out, const uint16_t* rows, uint64_t num_rows, const RowCode& code) {
  for (uint64_t row = 0; row < num_rows; ++row)
    quantize_row(out + row * code.nbytes(), rows + row * code.width, code);
}

void count_ids(const int32_t* ids, uint64_t num_ids, int64_t first, uint64_t num, int32_t* counts) {
  std::fill_n(counts, num, 0);
  for (uint64_t i = 0; i < num_ids; ++i) {
    const int64_t which = ids[i] - first;
    if (which >= 0 && which < static_cast<int64_t>(num)) ++counts[which];
  }
}

}  // namespace mori
