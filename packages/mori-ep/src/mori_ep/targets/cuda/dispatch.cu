// Dispatch: each token's row goes once to every rank that has an expert of it. One launch, one of two kernels; which one
// a rank launches depends on its own token count only, and its header tells the others:
//
//   dispatch_packets   few tokens. Rows leave at once, as packets into slot [source][token] of the receiver; nothing has
//                      to be known first. The last block sends the header. The receiver puts rows in their place.
//   dispatch_rows      many tokens. Blocks count, meet, send the header, and wait for all headers: then the place of each
//                      row at its receiver is known, and it is stored there. Then one `done` counter a block and rank.
//
// Either kernel, after its own sending, waits for all headers, unpacks the packets of whoever sends packets, and waits
// for `done` of the others. A receiver's arrays exist once: a peer stores into them only after it has my header of this
// call, so what my stream ran before this call has finished with the rows of the last.
#include "routing.cuh"
#include "rows.cuh"

// ---- what both kernels do with packets that have come ----

DEVICE int lowest(unsigned mask) { return __ffs(mask) - 1; }
DEVICE int nth_bit(unsigned mask, int n) {
  while (n--) mask &= mask - 1;
  return lowest(mask);
}

// All threads. Rows that came as packets go to their place; my own rows do if `local`: they are copied from the input.
DEVICE void unpack(const DispatchParams& p, const Headers& h, unsigned e) {
  const Common& c = p.c;
  const int units = p.shape.payload_units + p.shape.tail_units, groups = groups_of(units);
  const int width = c.threads_a_row, lanes = blockDim.x / width, lane = threadIdx.x / width, me = threadIdx.x % width;
  const RowArrays mine = received_at(p, c.rank);
  int* sources = (int*)(c.window[c.rank] + p.at_source);
  const int total = h.from_packets[c.world];
  if (lane >= lanes) return;
  for (int i = blockIdx.x + lane * gridDim.x; i < total; i += gridDim.x * lanes) {
    int s = 0;
    while (i >= h.from_packets[s + 1]) s++;
    int n = i - h.from_packets[s], word = 0;
    const int row = h.first[s] + n;
    if (row >= c.capacity) continue;
    const unsigned* mask = mask_of(c, h, s);
    for (int here; n >= (here = __popc(mask[word])); word++) n -= here;
    const int t = word * 32 + nth_bit(mask[word], n);
    if (me == 0) sources[row] = s * rows_a_rank(c) + t;
    if (s == c.rank) {
      for (int u = me; u < units; u += width) store_unit(p.shape, mine, row, u, load_unit(p.shape, p.input, t, u));
      continue;
    }
    char* slot = c.window[c.rank] + p.at_slots + ((e & 1) * (size_t)c.world + s) * p.slots_a_source + (size_t)t * slot_bytes(units);
    for (int g = me; g < groups; g += width) {
      const int u = group_unit(g), size = group_size(g, units);
      if (!size) continue;
      const Group v = wait_group(c, slot, g, size, e, s, WAIT_PACKETS, t, [] { return false; });
      store_unit(p.shape, mine, row, u, v.a);
      if (size > 1) store_unit(p.shape, mine, row, u + 32, v.b);
      if (size > 2) store_unit(p.shape, mine, row, u + 64, v.c);
    }
  }
}

// ---- few tokens ----

struct OwnMasks {  // in shared memory
  unsigned words[MAX_RANKS][MASK_WORDS];
  int before[MAX_RANKS][MASK_WORDS + 1];  // bits in the words before; the last one: rows in all
};

// All threads of the block.
DEVICE void make_masks(const DispatchParams& p, OwnMasks& own) {
  const Common& c = p.c;
  const int lane = threadIdx.x & 31, words = mask_words(c.tokens);
  for (int w = threadIdx.x >> 5; w < words; w += blockDim.x >> 5) {
    const int t = 32 * w + lane;
    const unsigned mask = t < c.tokens ? destinations(p, t) : 0;
    for (int d = 0; d < c.world; d++) {
      const unsigned bits = __ballot_sync(~0u, mask >> d & 1);
      if (lane == 0) own.words[d][w] = bits;
    }
  }
  __syncthreads();
  if (threadIdx.x < c.world) {
    int sum = 0;
    for (int w = 0; w < words; w++) own.before[threadIdx.x][w] = sum, sum += __popc(own.words[threadIdx.x][w]);
    own.before[threadIdx.x][MASK_WORDS] = sum;
  }
  __syncthreads();
}

// All threads of the block.
DEVICE void send_headers(const DispatchParams& p, const OwnMasks& own, unsigned e) {
  const Common& c = p.c;
  const int counts = count_packets(c), words = mask_words(c.tokens), packets = counts + p.mask_packets;
  for (int i = threadIdx.x; i < c.world * packets; i += blockDim.x) {
    const int d = i / packets, k = i % packets;
    if (!is_alive(c, d)) continue;
    unsigned v[3];
#pragma unroll
    for (int j = 0; j < 3; j++) {
      const int w = 3 * k + j, r = w - HEADER_ROWS, m = w - 3 * counts;
      v[j] = m >= 0 ? (m < words ? own.words[d][m] : 0) : w == HEADER_TOKENS ? c.tokens : w == HEADER_FLAGS ? p.flags : w == HEADER_DONE ? 0 : r < c.world ? own.before[r][MASK_WORDS] : 0;
    }
    store_packet(header_at(p, d, c.rank, e) + 16 * k, v[0], v[1], v[2], e);
  }
}

extern "C" __global__ void __launch_bounds__(640) dispatch_packets(const __grid_constant__ DispatchParams p) {
  __shared__ Headers headers;
  __shared__ OwnMasks own;
  const Common& c = p.c;
  const int units = p.shape.payload_units + p.shape.tail_units, groups = groups_of(units);
  const int width = c.threads_a_row, lanes = blockDim.x / width, lane = threadIdx.x / width, me = threadIdx.x % width;
  const int senders = gridDim.x - 1;  // the last block sends the header
  const unsigned e = this_call(c);
  const uint4 none = make_uint4(0, 0, 0, 0);
  if (blockIdx.x == senders) {
    make_masks(p, own);
    if (c.phases & SEND) send_headers(p, own, e);
  } else if (c.phases & SEND && lane < lanes) {
    for (int t = blockIdx.x + lane * senders; t < c.tokens; t += senders * lanes) {
      const size_t slot = p.at_slots + ((e & 1) * (size_t)c.world + c.rank) * p.slots_a_source + (size_t)t * slot_bytes(units);
      unsigned to = 0;
      bool known = false;
      for (int g = me; g < groups; g += width) {
        const int u = group_unit(g), size = group_size(g, units);
        if (!size) continue;
        const Group v = {load_unit(p.shape, p.input, t, u), size > 1 ? load_unit(p.shape, p.input, t, u + 32) : none,
                         size > 2 ? load_unit(p.shape, p.input, t, u + 64) : none};
        if (!known) to = destinations(p, t) & ~(1u << c.rank), known = true;  // while the payload is under way
        for (unsigned left = to; left; left &= left - 1) send_group(c.window[lowest(left)] + slot, g, size, v, e);
      }
    }
  }
  if (!(c.phases & RECEIVE)) return;
  __syncthreads();
  leave_call(c, e);
  receive_headers(p, headers, e);
  if (blockIdx.x == senders)
    enter_places(p, 0, c.tokens, [&](int d, int t) { return headers.mine[d] + own.before[d][t >> 5] + __popc(own.words[d][t >> 5] & ((1u << (t & 31)) - 1)); });
  if (blockIdx.x == 0) write_meta(p, headers);
  unpack(p, headers, e);
  if (blockIdx.x == 0) await_stored_rows(p, headers);
}

// ---- many tokens ----

#define UNROLL 14  // 16-byte loads in flight a lane: half of a row of 7168 bf16, all of one in fp8

struct Counting {  // in shared memory
  unsigned bits[32][MAX_RANKS];  // [warp]: which of its tokens go to rank d
  int before[32][MAX_RANKS];     // [warp]: rows to rank d in the warps before
  int total[MAX_RANKS];          // of this block
};

// All threads. Table entries of the block's tokens: places among the rows of this block.
DEVICE void count_tokens(const DispatchParams& p, Counting& n, int first, int count) {
  const Common& c = p.c;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (threadIdx.x < MAX_RANKS) n.total[threadIdx.x] = 0;
  for (int i0 = 0; i0 < count; i0 += blockDim.x) {
    const int i = i0 + threadIdx.x;
    const size_t t = first + i;
    const unsigned mask = i < count ? destinations(p, t) : 0;
    for (int d = 0; d < c.world; d++) {
      const unsigned bits = __ballot_sync(~0u, mask >> d & 1);
      if (lane == 0) n.bits[warp][d] = bits;
    }
    __syncthreads();
    if (threadIdx.x < c.world) {
      int sum = n.total[threadIdx.x];
      for (int w = 0; w < warps; w++) n.before[w][threadIdx.x] = sum, sum += __popc(n.bits[w][threadIdx.x]);
      n.total[threadIdx.x] = sum;
    }
    __syncthreads();
    enter_places(p, first + i0, min((int)blockDim.x, count - i0), [&](int d, int i) { return n.before[i >> 5][d] + __popc(n.bits[i >> 5][d] & ((1u << (i & 31)) - 1)); });
    __syncthreads();
  }
}

// One warp a rank: my rows in the blocks before this one, and in all.
DEVICE void sum_counts(const DispatchParams& p, int* before, int* total) {
  const int lane = threadIdx.x & 31;
  for (int d = threadIdx.x >> 5; d < p.c.world; d += blockDim.x >> 5) {
    int mine = 0, all = 0;
    for (int b = lane; b < gridDim.x; b += 32) {
      const int rows = __ldcg((const int*)p.block_counts + b * MAX_RANKS + d);
      all += rows, mine += b < blockIdx.x ? rows : 0;
    }
    for (int o = 16; o; o >>= 1) mine += __shfl_xor_sync(~0u, mine, o), all += __shfl_xor_sync(~0u, all, o);
    if (lane == 0) before[d] = mine, total[d] = all;
  }
}

struct Targets {  // of one token
  unsigned mask;  // equal in all lanes of a warp
  int row;        // lane r: the row at rank r
};
DEVICE size_t row_at(const Targets& to, int rank) { return __shfl_sync(~0u, to.row, rank); }

// All lanes of a warp. `base`: the row that this block begins with, at each rank. Completes the token's table entries.
DEVICE Targets targets_of(const DispatchParams& p, const int* base, size_t t) {
  const Common& c = p.c;
  const int lane = threadIdx.x & 31;
  unsigned entry = c.world * rows_a_rank(c);
  if (lane < c.top_k) entry = __ldcg((const unsigned*)p.table + t * c.top_k + lane);
  const int d = rank_of_entry(c, entry);
  const bool goes = d < c.world;
  const int row = goes ? (int)(entry - d * rows_a_rank(c)) + base[d] : 0;
  if (goes) p.table[t * c.top_k + lane] = d * rows_a_rank(c) + row;
  Targets to = {0, 0};
  for (int r = 0; r < c.world; r++) {
    const unsigned lanes = __ballot_sync(~0u, goes && d == r);
    const int there = __shfl_sync(~0u, row, lanes ? lowest(lanes) : 0);
    if (lane == r) to.row = there;
    if (lanes && there < c.capacity) to.mask |= 1u << r;
  }
  return to;
}

// A warp.
DEVICE void store_payload(const DispatchParams& p, size_t t, const Targets& to) {
  const int lane = threadIdx.x & 31, units = p.shape.payload_units;
  const uint4* from = (const uint4*)p.input.payload + t * units;
  int u0 = 0;
  for (; u0 + 32 * UNROLL <= units; u0 += 32 * UNROLL) {
    uint4 v[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) v[k] = load_once(from + u0 + lane + 32 * k);
    for (unsigned left = to.mask; left; left &= left - 1) {
      const int d = lowest(left);
      uint4* at = (uint4*)(p.c.window[d] + p.at_payload) + row_at(to, d) * units + u0 + lane;
#pragma unroll
      for (int k = 0; k < UNROLL; k++) at[32 * k] = v[k];
    }
  }
  for (; u0 < units; u0 += 32) {
    const bool mine = u0 + lane < units;
    const uint4 v = mine ? load_once(from + u0 + lane) : make_uint4(0, 0, 0, 0);
    for (unsigned left = to.mask; left; left &= left - 1) {
      const int d = lowest(left);
      uint4* at = (uint4*)(p.c.window[d] + p.at_payload) + row_at(to, d) * units + u0 + lane;
      if (mine) *at = v;
    }
  }
}
DEVICE void store_tail(const DispatchParams& p, size_t t, const Targets& to) {
  const int lane = threadIdx.x & 31, first = p.shape.payload_units, tail = p.shape.tail_units;
  for (int u0 = 0; u0 < tail; u0 += 32) {
    const bool mine = u0 + lane < tail;
    const uint4 v = mine ? load_unit(p.shape, p.input, t, first + u0 + lane) : make_uint4(0, 0, 0, 0);
    for (unsigned left = to.mask; left; left &= left - 1) {
      const int d = lowest(left);
      const size_t row = row_at(to, d);
      if (mine) store_unit(p.shape, received_at(p, d), row, first + u0 + lane, v);
    }
  }
  if (to.mask >> lane & 1) ((int*)(p.c.window[lane] + p.at_source))[to.row] = p.c.rank * rows_a_rank(p.c) + (int)t;
}

// Block 0, all threads.
DEVICE void send_counts(const DispatchParams& p, const int* total, unsigned e) {
  const Common& c = p.c;
  const int packets = count_packets(c) + p.mask_packets;
  for (int i = threadIdx.x; i < c.world * packets; i += blockDim.x) {
    const int d = i / packets, k = i % packets;
    if (!is_alive(c, d)) continue;
    const unsigned sent = *(volatile unsigned*)(c.state + TOKENS_SENT + d) + c.tokens;
    unsigned v[3];
#pragma unroll
    for (int j = 0; j < 3; j++) {
      const int w = 3 * k + j, r = w - HEADER_ROWS;
      v[j] = w == HEADER_TOKENS ? c.tokens : w == HEADER_FLAGS ? p.flags : w == HEADER_DONE ? sent : r < c.world ? total[r] : 0;
    }
    store_packet(header_at(p, d, c.rank, e) + 16 * k, v[0], v[1], v[2], e);
  }
  __syncthreads();
  if (threadIdx.x < c.world && is_alive(c, threadIdx.x)) *(volatile unsigned*)(c.state + TOKENS_SENT + threadIdx.x) += c.tokens;
}

extern "C" __global__ void __launch_bounds__(512) dispatch_rows(const __grid_constant__ DispatchParams p) {
  __shared__ Headers headers;
  __shared__ Counting counting;
  __shared__ int before[MAX_RANKS], total[MAX_RANKS], base[MAX_RANKS];
  const Common& c = p.c;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const unsigned e = this_call(c);
  const int run = (c.tokens + gridDim.x - 1) / gridDim.x;  // a block's tokens are neighbours
  const int first = min((long long)c.tokens, (long long)blockIdx.x * run), count = min(c.tokens, first + run) - first;
  if (threadIdx.x == 0) headers.missing = 0;
  if (c.phases & SEND) {
    count_tokens(p, counting, first, count);
    if (threadIdx.x < c.world) p.block_counts[blockIdx.x * MAX_RANKS + threadIdx.x] = counting.total[threadIdx.x];
    grid_meet(c);
    sum_counts(p, before, total);
    __syncthreads();
    if (blockIdx.x == 0) send_counts(p, total, e);
  }
  receive_headers(p, headers, e);
  if (c.phases & SEND) {
    if (threadIdx.x < c.world) base[threadIdx.x] = headers.mine[threadIdx.x] + before[threadIdx.x];
    __syncthreads();
    for (int i = warp; i < count && !headers.missing; i += warps) {  // who has sent no header may use its rows still
      const size_t t = first + i;
      const Targets to = targets_of(p, base, t);
      store_payload(p, t, to);
      store_tail(p, t, to);
    }
    __syncthreads();
    if (threadIdx.x < c.world && count && is_alive(c, threadIdx.x)) add_release_sys((unsigned*)(c.window[threadIdx.x] + p.at_done) + c.rank, count);
  }
  if (!(c.phases & RECEIVE)) return;
  __syncthreads();
  leave_call(c, e);
  if (blockIdx.x == 0) write_meta(p, headers);
  unpack(p, headers, e);
  if (blockIdx.x == 0) await_stored_rows(p, headers);
}

extern "C" __device__ const unsigned dispatch_params_bytes = sizeof(DispatchParams);
