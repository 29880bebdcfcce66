// A dispatched row as a run of 16-byte units, wherever its parts lie: payload units, then the tail of scales, expert ids
// and weights. Where each part of the tail is whole units, a unit is one access; else it is put together from words.
#pragma once
#include "params.cuh"

DEVICE uint4 load_once(const uint4* p) {  // data that is read by one thread, once
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// Where `word` of the tail of a row lies, and how many bytes of it there are.
DEVICE char* tail_word(const RowShape& s, const RowArrays& rows, size_t row, int word, int& nbytes) {
  nbytes = 4;
  if (word < s.scale_words) {
    nbytes = min(4, s.scale_bytes - 4 * word);
    return rows.scales + row * s.scale_bytes + 4 * word;
  }
  word -= s.scale_words;
  if (word < s.num_ids) return rows.ids + (row * s.num_ids + word) * 4;
  return rows.weights + (row * s.num_weights + word - s.num_ids) * 4;
}
DEVICE unsigned load_tail_word(const RowShape& s, const RowArrays& rows, size_t row, int word) {
  if (word >= s.tail_words) return 0;
  int nbytes;
  const char* p = tail_word(s, rows, row, word, nbytes);
  if (s.scale_bytes % 4 == 0 || word >= s.scale_words) return *(const unsigned*)p;
  unsigned v = 0;
  for (int i = 0; i < nbytes; i++) v |= (unsigned)(unsigned char)p[i] << 8 * i;
  return v;
}
DEVICE void store_tail_word(const RowShape& s, const RowArrays& rows, size_t row, int word, unsigned v) {
  if (word >= s.tail_words) return;
  int nbytes;
  char* p = tail_word(s, rows, row, word, nbytes);
  if (s.scale_bytes % 4 == 0 || word >= s.scale_words) {
    *(unsigned*)p = v;
    return;
  }
  for (int i = 0; i < nbytes; i++) p[i] = (char)(v >> 8 * i);
}

// The address of a whole unit.
DEVICE uint4* unit_of(const RowShape& s, const RowArrays& rows, size_t row, int u) {
  if (u < s.payload_units) return (uint4*)rows.payload + row * s.payload_units + u;
  int nbytes;
  return (uint4*)tail_word(s, rows, row, 4 * (u - s.payload_units), nbytes);
}
// Out of line: inlined wherever a unit is moved, they made the kernels five times as long. (Pointers one by one: a
// struct would go through memory.)
__device__ __noinline__ uint4 load_words(const RowShape& s, char* scales, char* ids, char* weights, size_t row, int word) {
  const RowArrays rows = {nullptr, scales, ids, weights};
  return make_uint4(load_tail_word(s, rows, row, word), load_tail_word(s, rows, row, word + 1), load_tail_word(s, rows, row, word + 2),
                    load_tail_word(s, rows, row, word + 3));
}
__device__ __noinline__ void store_words(const RowShape& s, char* scales, char* ids, char* weights, size_t row, int word, uint4 v) {
  const RowArrays rows = {nullptr, scales, ids, weights};
  store_tail_word(s, rows, row, word, v.x), store_tail_word(s, rows, row, word + 1, v.y);
  store_tail_word(s, rows, row, word + 2, v.z), store_tail_word(s, rows, row, word + 3, v.w);
}
DEVICE uint4 load_unit(const RowShape& s, const RowArrays& rows, size_t row, int u) {
  if (u < s.payload_units || s.aligned) return *unit_of(s, rows, row, u);
  return load_words(s, rows.scales, rows.ids, rows.weights, row, 4 * (u - s.payload_units));
}
DEVICE void store_unit(const RowShape& s, const RowArrays& rows, size_t row, int u, uint4 v) {
  if (u < s.payload_units || s.aligned)
    *unit_of(s, rows, row, u) = v;
  else
    store_words(s, rows.scales, rows.ids, rows.weights, row, 4 * (u - s.payload_units), v);
}

DEVICE RowArrays received_at(const DispatchParams& p, int rank) {
  char* w = p.c.window[rank];
  return {w + p.at_payload, w + p.at_scales, w + p.at_ids, w + p.at_weights};
}
