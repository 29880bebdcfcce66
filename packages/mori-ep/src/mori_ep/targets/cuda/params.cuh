// Arguments of the kernels, by value. params.py has the same fields in the same order; sizes are compared on loading.
// Offsets (`at_`) are bytes in the window and equal on all ranks (regions.py); pointers are this rank's own memory.
#pragma once
#include "signal.cuh"

#define MAX_RANKS 8
#define MAX_TOP_K 32
#define MASK_WORDS 16                     // a source that sends packets has at most 512 tokens
#define HEADER_PACKETS 16                 // (3 + MAX_RANKS) / 3 of counts, MASK_WORDS / 3 of masks
#define SEND 1u                           // phases
#define RECEIVE 2u

struct Common {
  unsigned nbytes;                        // of the whole struct of arguments
  unsigned phases;                        // SEND | RECEIVE, or one of them for a call in two halves
  int world, rank;
  int tokens, max_tokens, top_k;          // of this rank in this call; capacity a source; entries a token in the tables
  int capacity;                           // rows that `out` can hold
  int threads_a_row;                      // threads that carry one row together
  unsigned alive;                         // bit r: rank r takes part
  char* window[MAX_RANKS];                // each rank's part as mapped here
  unsigned* state;                        // this direction's own words: see protocol.cuh
  Fault* fault;
  uint64_t timeout_ns;
};

struct RowShape {                         // one row: payload | scales | expert ids | weights
  int payload_units;                      // 16 bytes each
  int scale_bytes, scale_words;           // scale_words = bytes rounded up to words
  int num_ids, num_weights;               // top_k each; num_weights 0: no weights travel
  int tail_words, tail_units;             // of scales, ids and weights together
  int aligned;                            // every part of the tail is whole units: moved 16 bytes at a time
};

struct RowArrays {                        // [rows][...] of each part
  char *payload, *scales, *ids, *weights;
};

struct DispatchParams {
  Common c;
  RowShape shape;
  RowArrays input;                        // my tokens
  const int* replay;                      // a destination table to follow, or null: the ids decide
  int mask_packets;                       // in every header, whether used or not: enough for all that sends packets
  int room;                               // rows that one rank may send to one other
  unsigned experts_a_rank, experts_inverse;  // 2^32 / experts_a_rank, rounded up
  unsigned flags;                         // what my header says of me: ROWS_AS_PACKETS | COMBINE_BY_PACKETS
  uint64_t at_header, at_slots, slots_a_source;  // packets: [2][world][HEADER_PACKETS], [2][world] of slots_a_source bytes
  uint64_t at_done;                       // u32 [world]: tokens of source s whose rows are stored, so far
  uint64_t at_payload, at_scales, at_ids, at_weights, at_source;  // receive arrays, [capacity][...]
  int* table;                             // [tokens][top_k]: where each row went
  int* meta;                              // see META_* in protocol.cuh
  int* count;                             // rows received
  unsigned* block_counts;                 // [grid][MAX_RANKS], scratch of the row kernel
};

struct CombineParams {
  Common c;
  const char* y;                          // [count][payload_units] rows of my experts, in dispatch order
  const char* weights;                    // [count][top_k] floats, or null
  int y_rows;                             // rows that there are of y (and of weights); below count: a fault
  int payload_units;                      // of a row of y
  int wire_units, scale_units;            // of a staged row: as it is read by peers, and its scales
  int stages;                             // 1: y must be copied to the window before peers can read it
  int guard;                              // 1: do not end before all peers have read my rows
  unsigned sign;                          // what my rows are: signs.py
  uint64_t at_slots, slots_a_source;      // packets: [2][world] of slots_a_source bytes
  uint64_t at_y, at_y_scales, at_y_weights;  // what peers read: rows, their scales, their weights
  uint64_t at_entered, at_ready, at_finished;  // u64 [world] each: see combine.cu
  const int* table;                       // of the dispatch: where my tokens' rows are
  const int* source;                      // of the dispatch: whose my rows are
  const int* meta;                        // of the dispatch, or null: nobody takes packets
  const int* count;
  char* out;                              // [tokens][payload_units]
  float* out_weights;                     // [tokens][top_k]
};
