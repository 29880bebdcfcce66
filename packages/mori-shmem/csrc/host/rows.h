// Rows of a table that are spread over groups (ranks, say) by ids, and brought back: the loops of an exchange whose pattern
// is in the data.
//
// A slot map says for each of n rows and k slots where that slot's copy of the row is: group * stride + index within the
// group, or `null` for a slot that has none. Sizes are 64-bit throughout: rows times row bytes passes 2^32.
#pragma once
#include <cstdint>
#include <vector>

#include "host/codes.h"

namespace mori {

struct SlotMap {
  int32_t* slots;  // [rows][width]
  uint64_t rows, width;
  int32_t stride, null;

  uint64_t size() const { return rows * width; }
};

// Fill the map from ids [rows][width]: id i belongs to group (i - first) / group_size; ids outside of all groups, and a
// row's later ids of the same group, get `null`. Rows are numbered within a group in their order. Returns how many rows
// each group has.
std::vector<int64_t> group_slots(const int32_t* ids, const SlotMap& map, int64_t first, int64_t group_size,
                                 int64_t num_groups);

// Add first[group] to every index.
void shift_slots(const SlotMap& map, const std::vector<int64_t>& first);

// What is copied along with a row: `source` has a row of `row_bytes` for each row of the map.
struct Field {
  const char* source;
  uint64_t row_bytes;
};

// Copy each field of each row to targets[group][field] + index * row_bytes, for every slot that has a place. A target of 0
// leaves the group's rows out.
void scatter_rows(const SlotMap& map, const std::vector<Field>& fields, const std::vector<std::vector<char*>>& targets);

// How a row of `width` numbers is stored: their codes, then (scale_block > 0) one fp32 scale per block of them, 4-aligned.
struct RowCode {
  Kind kind;
  uint64_t width;
  uint64_t scale_block;

  uint64_t code_bytes() const;
  uint64_t scales_at() const { return (code_bytes() + 3) / 4 * 4; }
  uint64_t num_scales() const { return scale_block == 0 ? 0 : (width + scale_block - 1) / scale_block; }
  uint64_t nbytes() const { return scale_block == 0 ? code_bytes() : scales_at() + 4 * num_scales(); }
};

// out[row] = sum over the row's slots, in their order, of the row at tables[group] + index * pitch: added in fp32, rounded
// once to `out_kind`. A row without any gives zeros. A table of 0 leaves the group out. `factors` (may be null) holds a
// factor for each slot; those of slots with no place of their own whose id is the same are added to it.
struct Factors {
  const float* factors = nullptr;  // [rows][width]
  const int32_t* ids = nullptr;
};
void sum_rows(char* out, Kind out_kind, const SlotMap& map, const std::vector<const char*>& tables, uint64_t pitch,
              const RowCode& code, const Factors& factors = {});

// Rows of bf16 to rows of `code`, pitch = code.nbytes(). With scales, a block's largest magnitude gets the largest code;
// a block of zeros has scale 1, and one with an infinity or a NaN becomes NaN as a whole.
void quantize_rows(char* out, const uint16_t* rows, uint64_t num_rows, const RowCode& code);

// counts[i] = how many of the ids are first + i, for i < num.
void count_ids(const int32_t* ids, uint64_t num_ids, int64_t first, uint64_t num, int32_t* counts);

}  // namespace mori
