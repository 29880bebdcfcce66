// Which ranks a token goes to, and the numbers that all ranks derive from each other's headers.
#pragma once
#include "protocol.cuh"

// A table entry names a row: rank * rows_a_rank + row, with rows_a_rank = world * max_tokens. A slot that went nowhere
// (no expert, or an earlier slot of the token goes to the same rank) holds world * rows_a_rank.
DEVICE unsigned rows_a_rank(const Common& c) { return (unsigned)c.world * c.max_tokens; }
DEVICE int rank_of_entry(const Common& c, unsigned entry) {  // world for an entry that names no row
  int rank = 0;
#pragma unroll
  for (int r = 1; r <= MAX_RANKS; r++) rank += r <= c.world && entry >= r * rows_a_rank(c);
  return rank;
}
DEVICE bool is_alive(const Common& c, int rank) { return c.alive >> rank & 1; }

// The rank that slot k of token t goes to, or -1.
DEVICE int route(const DispatchParams& p, size_t t, int k) {
  int rank;
  if (p.replay) {
    rank = rank_of_entry(p.c, p.replay[t * p.c.top_k + k]);
    if (rank == p.c.world) return -1;
  } else {
    const unsigned id = ((const unsigned*)p.input.ids)[t * p.c.top_k + k];
    if (id >= p.experts_a_rank * p.c.world) return -1;
    rank = p.experts_a_rank == 1 ? id : __umulhi(id, p.experts_inverse);
  }
  return is_alive(p.c, rank) ? rank : -1;
}
DEVICE unsigned destinations(const DispatchParams& p, size_t t) {  // bit r: the token has a row at rank r
  unsigned mask = 0;
  if (p.c.top_k == 8 && p.shape.aligned && !p.replay && p.experts_a_rank > 1) {  // all ids at once
    const uint4* ids = (const uint4*)p.input.ids + 2 * t;
    const uint4 a = ids[0], b = ids[1];
    const unsigned id[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, experts = p.experts_a_rank * p.c.world;
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (id[k] < experts) mask |= 1u << __umulhi(id[k], p.experts_inverse);
    return mask & p.c.alive;
  }
  for (int k = 0; k < p.c.top_k; k++) {
    const int rank = route(p, t, k);
    if (rank >= 0) mask |= 1u << rank;
  }
  return mask;
}

// All threads of the block: the table entries of `count` tokens. A lane takes one slot, and looks at the slots before it
// in its neighbours. place(rank, i) is the number of token first + i's row among those counted so far.
template <typename Place>
DEVICE void enter_places(const DispatchParams& p, size_t first, int count, Place place) {
  const Common& c = p.c;
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, tokens_a_warp = 32 / c.top_k;
  const int mine = lane / c.top_k, k = lane - mine * c.top_k;
  for (int i0 = (threadIdx.x >> 5) * tokens_a_warp; i0 < count; i0 += warps * tokens_a_warp) {
    const int i = i0 + mine;
    const bool valid = mine < tokens_a_warp && i < count;
    const int d = valid ? route(p, first + i, k) : -1;
    bool fresh = d >= 0;
    for (int j = 1; j < c.top_k; j++) {
      const int earlier = __shfl_up_sync(~0u, d, j);
      fresh = fresh && !(j <= k && earlier == d);
    }
    if (valid) p.table[(first + i) * c.top_k + k] = (int)(fresh ? d * rows_a_rank(c) + place(d, i) : c.world * rows_a_rank(c));
  }
}

// ---- headers ----
// Words: tokens, flags, what `done` will reach, rows to each rank; then, from a packet of their own on, the masks: bit t
// of the words for rank d says that token t has a row there. A header has all its packets, also where there are no masks.
#define HEADER_TOKENS 0
#define HEADER_FLAGS 1
#define HEADER_DONE 2
#define HEADER_ROWS 3
DEVICE int count_packets(const Common& c) { return (HEADER_ROWS + c.world + 2) / 3; }
DEVICE int mask_words(int tokens) { return (tokens + 31) / 32; }
DEVICE char* header_at(const DispatchParams& p, int at_rank, int source, unsigned e) {
  return p.c.window[at_rank] + p.at_header + ((size_t)(e & 1) * p.c.world + source) * HEADER_PACKETS * 16;
}

struct Headers {  // in shared memory
  unsigned words[MAX_RANKS][3 * HEADER_PACKETS + 3];
  int first[MAX_RANKS + 1];        // my row that source s begins with
  int from_packets[MAX_RANKS + 1]; // the same, counting only rows that come as packets
  int mine[MAX_RANKS];             // the row that my own begin with at rank r
  int missing;                     // 1: one has not come
};
DEVICE bool sends_packets(const Headers& h, int source) { return h.words[source][HEADER_FLAGS] & ROWS_AS_PACKETS; }
DEVICE int rows_to(const Headers& h, int source, int rank) { return (int)h.words[source][HEADER_ROWS + rank]; }
DEVICE const unsigned* mask_of(const Common& c, const Headers& h, int source) { return h.words[source] + 3 * count_packets(c); }
// A header of another kind of call: its rows cannot be told apart. Ends this rank's waits.
DEVICE void check_call(const DispatchParams& p, int source, unsigned flags) {
  if (!((flags ^ p.flags) & CALL_DIGEST)) return;
  write_fault(p.c, source, DIFFERENT_CALL, 0, flags >> 8, p.flags >> 8);
  *(volatile unsigned*)(p.c.state + GAVE_UP) = 1;
}

// All threads of the block. Waits for every rank's header of this call.
DEVICE void receive_headers(const DispatchParams& p, Headers& h, unsigned e) {
  const Common& c = p.c;
  const int packets = count_packets(c) + p.mask_packets;
  for (int i = threadIdx.x; i < c.world * packets; i += blockDim.x) {
    const int source = i / packets, k = i % packets;
    const char* q = header_at(p, c.rank, source, e) + 16 * k;
    Packet v = {0, 0, 0, 0};
    Patience patience;
    while (is_alive(c, source)) {  // one look a packet and block: looks at one address are served one after the other
      v = load_packet(q);
      if (v.tag == e || patience.is_over(c, source, WAIT_HEADER, 0, v.tag, e)) break;
    }
    if (v.tag != e && is_alive(c, source)) h.missing = 1;
    if (v.tag != e) v = {0, 0, 0, 0};
    else if (k == 0) check_call(p, source, v.y);
    unsigned* words = h.words[source] + 3 * k;
    words[0] = v.x, words[1] = v.y, words[2] = v.z;
  }
  __syncthreads();
  if (threadIdx.x <= c.world) {
    int all = 0, packed = 0;
    for (int s = 0; s < threadIdx.x; s++) {
      const int rows = rows_to(h, s, c.rank);
      all += rows, packed += sends_packets(h, s) ? rows : 0;
    }
    h.first[threadIdx.x] = all, h.from_packets[threadIdx.x] = packed;
  } else if (threadIdx.x >= 16 && threadIdx.x < 16 + c.world) {
    int before = 0;
    for (int s = 0; s < c.rank; s++) before += rows_to(h, s, threadIdx.x - 16);
    h.mine[threadIdx.x - 16] = before;
  }
  __syncthreads();
}

// One block, all threads: the numbers that a combine and the caller need.
DEVICE void write_meta(const DispatchParams& p, const Headers& h) {
  const Common& c = p.c;
  const int total = h.first[c.world];
  if (threadIdx.x <= c.world) p.meta[META_FIRST + threadIdx.x] = min(h.first[threadIdx.x], c.capacity);
  if (threadIdx.x < c.world) {
    for (int d = 0; d < c.world; d++)
      if (rows_to(h, threadIdx.x, d) > p.room) write_fault(c, threadIdx.x, OVERFLOW, d, rows_to(h, threadIdx.x, d), p.room);
    p.meta[META_MINE + threadIdx.x] = h.mine[threadIdx.x];
    p.meta[META_SENT + threadIdx.x] = rows_to(h, c.rank, threadIdx.x);
  }
  if (threadIdx.x == 0) {
    unsigned mask = 0;
    for (int s = 0; s < c.world; s++) mask |= h.words[s][HEADER_FLAGS] & COMBINE_BY_PACKETS ? 1u << s : 0;
    p.meta[META_PACKETS] = mask;
    *p.count = min(total, c.capacity);
  }
}

// Every block that has nothing left to do but wait may call this with its first warp.
DEVICE void await_stored_rows(const DispatchParams& p, const Headers& h) {
  const int s = threadIdx.x;
  if (s < p.c.world && is_alive(p.c, s) && !sends_packets(h, s) && h.words[s][HEADER_TOKENS])
    wait_reached(p.c, (const unsigned*)(p.c.window[p.c.rank] + p.at_done) + s, h.words[s][HEADER_DONE], s, WAIT_ROWS);
}
