// Combine: the owner of a token adds up, in fp32, one row of each rank that the token went to, in the order of the slots
// that name the ranks, and rounds once. One launch, one of two kernels, as the number of its own tokens says:
//
//   combine_packets    few tokens. Whoever has rows of the owner pushes them into its slots as packets; it adds them up
//                      as they come. The dispatch's header has told all ranks that this owner wants packets.
//   combine_pull       many tokens. The owner reads the rows in the windows of the ranks that made them.
//
// Either kernel first serves the others: packets for owners that want them, and for those that pull the words
//   entered[source]    source has begun combine e: it has finished reading what it pulled in e - 1
//   ready[source]      rows and weights of source may be read. Where they are copied to the window first (`stages`, or
//                      weights, or a quantised transport) that happens between entered and ready.
//   finished[source]   source has read all it needs of this combine; used where `guard` is set, on all ranks alike: with
//                      rows in the registered buffer, which the caller may fill again as soon as combine is over
// All grow: they hold the number of the call, and below it the source's sign, what its rows are (signs.py). A rank that
// waits for the words of all compares all their signs: so whatever does not go together is found on every rank, by words
// that travel anyway. A packet that stays away may be one that its sender does not have: a wait for it that takes long
// looks at its sender's sign. (A word of a later call is of a rank that has found nothing in this one.)
// Packet slots exist twice by parity of e; `entered` of all ranks ends a combine, so a slot of e is not written for e + 2
// before it has been read.
#include "elements.cuh"
#include "routing.cuh"
#include "rows.cuh"

#ifndef ELEMENT
#define ELEMENT BF16
#endif
#define AS_IT_IS 0
#define DIRECT_CAST 1   // e4m3fn
#define BLOCKWISE 2     // e4m3fn and one fp32 scale for a block of values
#ifndef WIRE
#define WIRE AS_IT_IS
#endif

typedef Element<ELEMENT> Rows;                              // of y and of the result
typedef Element<WIRE == AS_IT_IS ? ELEMENT : E4M3FN> Wired;  // of what peers read

DEVICE uint64_t* word_at(const CombineParams& p, int rank, uint64_t at, int source) { return (uint64_t*)(p.c.window[rank] + at) + source; }
DEVICE unsigned packet_ranks(const CombineParams& p) { return p.meta ? load_early(p.meta + META_PACKETS) & p.c.alive : 0; }
DEVICE size_t row_units(const CombineParams& p) { return p.payload_units; }

// ---- a token's rows ----

struct Summands {
  unsigned long long slots;  // 8 bits each: the slots of the token whose entries name rows
  int count;
};
DEVICE Summands summands_of(const CombineParams& p, size_t t) {
  const Common& c = p.c;
  Summands s = {0, 0};
  auto see = [&](int k, unsigned entry) {
    const int rank = rank_of_entry(c, entry);
    if (rank < c.world && is_alive(c, rank)) s.slots |= (unsigned long long)k << 8 * s.count++;
  };
  if (c.top_k == 8) {  // all entries at once
    const uint4* entries = (const uint4*)p.table + 2 * t;
    const uint4 a = entries[0], b = entries[1];
    see(0, a.x), see(1, a.y), see(2, a.z), see(3, a.w), see(4, b.x), see(5, b.y), see(6, b.z), see(7, b.w);
  } else {
    for (int k = 0; k < c.top_k; k++) see(k, p.table[t * c.top_k + k]);
  }
  return s;
}
struct Place {
  int rank;
  size_t row;
};
DEVICE Place place_of(const CombineParams& p, size_t t, const Summands& s, int i) {
  const unsigned entry = p.table[t * p.c.top_k + (s.slots >> 8 * i & 0xff)];
  const int rank = rank_of_entry(p.c, entry);
  return {rank, entry - rank * rows_a_rank(p.c)};
}

template <int N>
DEVICE void add(float* sum, const float* term, bool first) {
#pragma unroll
  for (int i = 0; i < N; i++) sum[i] = first ? term[i] : sum[i] + term[i];
}

// ---- serving the others ----

struct Call {
  unsigned e;
  unsigned sign;     // of this rank
  unsigned pullers;  // ranks that read rows in their peers' windows
};
// All threads of a block, for the first `world` of them.
DEVICE void tell_all(const CombineParams& p, uint64_t at, const Call& call, bool after_my_stores) {
  if (threadIdx.x >= p.c.world || !is_alive(p.c, threadIdx.x)) return;
  uint64_t* word = word_at(p, threadIdx.x, at, p.c.rank);
  const uint64_t said = (uint64_t)call.e << 32 | call.sign;
  if (after_my_stores)
    store_release_sys_64(word, said);
  else
    store_relaxed_sys_64(word, said);
}
DEVICE bool go_together(unsigned a, unsigned b) {
  return !((a ^ b) & SIGN_ROWS) && !(a & SIGN_WEIGHTS && b & SIGN_NO_WEIGHTS) && !(b & SIGN_WEIGHTS && a & SIGN_NO_WEIGHTS);
}
// Two ranks bring what does not go together. Ends this rank's waits.
DEVICE void write_difference(const CombineParams& p, int rank, unsigned sign, int other, unsigned theirs) {
  write_fault(p.c, other, DIFFERENT_COMBINE, rank, theirs, sign);
  *(volatile unsigned*)(p.c.state + GAVE_UP) = 1;
}
// A warp, each lane with the sign of its rank: any two may differ, also of others than this one.
DEVICE void compare_all(const CombineParams& p, unsigned sign, unsigned theirs) {
  const unsigned others = __ballot_sync(~0u, (theirs ^ sign) & SIGN_ROWS), with = __ballot_sync(~0u, theirs & SIGN_WEIGHTS);
  const unsigned without = __ballot_sync(~0u, theirs & SIGN_NO_WEIGHTS);
  if (!others && !(with && without)) return;
  const int a = others ? p.c.rank : __ffs(with) - 1, b = __ffs(others ? others : without) - 1;
  const unsigned of_a = __shfl_sync(~0u, theirs, a), of_b = __shfl_sync(~0u, theirs, b);
  if (threadIdx.x == 0) write_difference(p, a, of_a, b, of_b);
}
// All threads of a block: the words of these ranks, their signs compared.
DEVICE void await_all(const CombineParams& p, uint64_t at, const Call& call, unsigned ranks, unsigned what) {
  if (threadIdx.x >= 32) return;
  unsigned theirs = threadIdx.x == p.c.rank ? call.sign : call.sign & SIGN_ROWS;  // which goes with everything of its kind
  if (threadIdx.x < p.c.world && ranks >> threadIdx.x & 1) {
    const uint64_t said = wait_called(p.c, word_at(p, p.c.rank, at, threadIdx.x), call.e, threadIdx.x, what);
    if (said >> 32 == call.e) theirs = (unsigned)said;
  }
  compare_all(p, call.sign, theirs);
}
// Whether a peer has begun this call with what does not go with mine: packets of it may never come.
DEVICE bool found_difference(const CombineParams& p, const Call& call, int peer) {
  const uint64_t said = load_acquire_sys_64(word_at(p, p.c.rank, p.at_entered, peer));
  if (said >> 32 != call.e || go_together(call.sign, (unsigned)said)) return false;
  write_difference(p, p.c.rank, call.sign, peer, (unsigned)said);
  return true;
}

// Rows that the caller has not given are a fault (see serve); what is read in their place is one that he has.
DEVICE size_t given_row(const CombineParams& p, size_t row) { return row < (size_t)p.y_rows ? row : 0; }

// A row of y as units, its weights behind it.
DEVICE uint4 load_y(const CombineParams& p, size_t row, int u) {
  row = given_row(p, row);
  if (u < p.payload_units) return load_once((const uint4*)p.y + row * row_units(p) + u);
  const int k = 4 * (u - p.payload_units), n = p.c.top_k;
  const unsigned* w = (const unsigned*)p.weights + row * n;
  return make_uint4(k < n ? w[k] : 0, k + 1 < n ? w[k + 1] : 0, k + 2 < n ? w[k + 2] : 0, k + 3 < n ? w[k + 3] : 0);
}
DEVICE Group load_y_group(const CombineParams& p, size_t row, int g, int size) {
  const uint4 none = make_uint4(0, 0, 0, 0);
  const int u = group_unit(g);
  return {load_y(p, row, u), size > 1 ? load_y(p, row, u + 32) : none, size > 2 ? load_y(p, row, u + 64) : none};
}
DEVICE int packet_units(const CombineParams& p) { return p.payload_units + (p.weights ? (p.c.top_k + 3) / 4 : 0); }
// Slots have room for weights whether there are any or not: a rank without rows may be given none.
DEVICE char* slot_of(const CombineParams& p, int at_rank, int from, size_t t, unsigned e) {
  const int stride = slot_bytes(p.payload_units + (p.c.top_k + 3) / 4);
  return p.c.window[at_rank] + p.at_slots + ((e & 1) * (size_t)p.c.world + from) * p.slots_a_source + t * stride;
}

// All threads: my rows of the owners that want packets.
DEVICE void push_rows(const CombineParams& p, unsigned e, unsigned packet_owners, int count, unsigned first_source) {
  const Common& c = p.c;
  const unsigned to = packet_owners & ~(1u << c.rank);
  const int units = packet_units(p), groups = groups_of(units);
  const int width = c.threads_a_row, lanes = blockDim.x / width, lane = threadIdx.x / width, me = threadIdx.x % width;
  if (!to || lane >= lanes) return;
  unsigned source = first_source;
  for (int row = blockIdx.x + lane * gridDim.x; row < count; row += gridDim.x * lanes, source = row < count ? p.source[row] : 0) {
    const int owner = rank_of_entry(c, source);
    if (!(to >> owner & 1)) continue;
    char* slot = slot_of(p, owner, c.rank, source - owner * rows_a_rank(c), e);
    for (int g = me; g < groups; g += width) {
      const int size = group_size(g, units);
      if (size) send_group(slot, g, size, load_y_group(p, row, g, size), e);
    }
  }
}

#if WIRE != AS_IT_IS
DEVICE float larger(float a, float b) { return bits_float(max(__float_as_uint(a), __float_as_uint(b))); }  // NaN counts as largest
#define PER_WIRE_UNIT (16 / Rows::PER_UNIT)  // units of y that make one unit of the wire
// A warp: one row of y as e4m3, for peers to read; in blocks each scaled by what its largest value needs.
DEVICE void stage_row(const CombineParams& p, size_t row) {
  const int lane = threadIdx.x & 31;
  const uint4* from = (const uint4*)p.y + given_row(p, row) * row_units(p);
  uint4* to = (uint4*)(p.c.window[p.c.rank] + p.at_y) + row * p.wire_units;
  float* scales = (float*)(p.c.window[p.c.rank] + p.at_y_scales) + row * p.scale_units;
  const int block = WIRE == BLOCKWISE ? p.wire_units / p.scale_units : 1;  // units of one scale: a power of two up to 32
  for (int u0 = 0; u0 < p.wire_units; u0 += 32) {
    const int u = u0 + lane;
    float f[16];
#pragma unroll
    for (int i = 0; i < PER_WIRE_UNIT; i++) {
      const uint4 v = u < p.wire_units ? load_once(from + (size_t)u * PER_WIRE_UNIT + i) : make_uint4(0, 0, 0, 0);
      Rows::unpack(f + i * Rows::PER_UNIT, v);
    }
    if (WIRE == BLOCKWISE) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < 16; i++) most = larger(most, fabsf(f[i]));
      for (int o = block / 2; o; o >>= 1) most = larger(most, __shfl_xor_sync(~0u, most, o));
      float scale = most == 0 ? 1.0f : __fdiv_rn(most, 448.0f), factor = most == 0 ? 1.0f : __fdiv_rn(448.0f, most);
      if (!(most < bits_float(0x7f800000))) scale = bits_float(0x7fc00000), factor = 0;
      if (!(factor < bits_float(0x7f800000))) scale = 1, factor = 1;  // too small for a factor: the codes are 0
#pragma unroll
      for (int i = 0; i < 16; i++) f[i] = __fmul_rn(f[i], factor);
      if (u < p.wire_units && u % block == 0) scales[u / block] = scale;
    }
    if (u < p.wire_units) to[u] = Wired::pack(f);
  }
}
#else
// A warp: a copy of one row of y.
DEVICE void stage_row(const CombineParams& p, size_t row) {
  const int lane = threadIdx.x & 31, units = p.payload_units;
  const uint4* from = (const uint4*)p.y + given_row(p, row) * units;
  uint4* to = (uint4*)(p.c.window[p.c.rank] + p.at_y) + row * units;
  int u = lane;
  for (; u - lane + 7 * 32 <= units; u += 7 * 32) {
    uint4 v[7];
#pragma unroll
    for (int k = 0; k < 7; k++) v[k] = load_once(from + u + 32 * k);
#pragma unroll
    for (int k = 0; k < 7; k++) to[u + 32 * k] = v[k];
  }
  for (; u < units; u += 32) to[u] = load_once(from + u);
}
#endif

// All threads: tell the others that this rank is here; copy what pulling ranks are to read, and say that it is ready.
DEVICE void stage_rows(const CombineParams& p, const Call& call, int count) {
  const Common& c = p.c;
  const unsigned readers = call.pullers & (WIRE == AS_IT_IS ? ~(1u << c.rank) : ~0u);  // I read my own where they are
  const bool copies = readers && (p.stages || p.weights);
  if (blockIdx.x == 0) {
    if (readers && !copies) tell_all(p, p.at_ready, call, true);  // first: a release waits for all stores before it
    tell_all(p, p.at_entered, call, false);
  }
  if (!copies) return;
  await_all(p, p.at_entered, call, c.alive, WAIT_ENTERED);
  __syncthreads();
  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  float* weights = (float*)(c.window[c.rank] + p.at_y_weights);
  for (int row = blockIdx.x + (threadIdx.x >> 5) * gridDim.x; row < count; row += gridDim.x * warps) {
    if (!(readers >> rank_of_entry(c, p.source[row]) & 1)) continue;
    if (p.stages) stage_row(p, row);
    if (p.weights && lane < c.top_k) weights[(size_t)row * c.top_k + lane] = ((const float*)p.weights)[given_row(p, row) * c.top_k + lane];
  }
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = last_to_leave(c.state + STAGED, gridDim.x);
  __syncthreads();
  if (last) tell_all(p, p.at_ready, call, true);
}

// All threads, at the end: with `guard`, nobody reads my rows any more.
DEVICE void await_readers(const CombineParams& p, const Call& call) {
  const unsigned me = 1u << p.c.rank, readers = call.pullers;
  if (!p.guard || !readers) return;
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = last_to_leave(p.c.state + LEFT, gridDim.x);
  __syncthreads();
  if (!last) return;
  if (readers & me) tell_all(p, p.at_finished, call, true);
  await_all(p, p.at_finished, call, readers & ~me, WAIT_FINISHED);
}

// All threads. The loads that lead to the first row go out together: one after the other they took as long as the row
// itself.
DEVICE Call serve(const CombineParams& p, unsigned e) {
  const Common& c = p.c;
  const int first = blockIdx.x + threadIdx.x / c.threads_a_row * gridDim.x;
  const unsigned packet_owners = packet_ranks(p);
  const int count = (int)load_early(p.count);
  const unsigned source = load_early(p.source + min(first, c.capacity - 1));
  const unsigned rows_only = count && !(p.sign & SIGN_WEIGHTS) ? SIGN_NO_WEIGHTS : 0;
  const Call call = {e, p.sign | rows_only, c.alive & ~packet_owners};
  if (c.phases & SEND) {
    push_rows(p, e, packet_owners, count, source);
    stage_rows(p, call, count);
    if (blockIdx.x == 0 && threadIdx.x == 0 && count > p.y_rows) write_fault(c, c.rank, TOO_FEW_ROWS, 0, p.y_rows, count);
  }
  return call;
}

// ---- few tokens ----

#if WIRE == AS_IT_IS
struct Sum {  // of one unit: values of the payload, or weights
  float f[Rows::PER_UNIT < 4 ? 4 : Rows::PER_UNIT];
  DEVICE void add_unit(uint4 v, bool first, bool is_payload) {
    if (is_payload) {
      float term[Rows::PER_UNIT];
      Rows::unpack(term, v);
      add<Rows::PER_UNIT>(f, term, first);
    } else {
      const float term[4] = {bits_float(v.x), bits_float(v.y), bits_float(v.z), bits_float(v.w)};
      add<4>(f, term, first);
    }
  }
  DEVICE void store(const CombineParams& p, size_t t, int u) const {
    if (u < p.payload_units) {
      ((uint4*)p.out)[t * row_units(p) + u] = Rows::pack(f);
      return;
    }
    const int k = 4 * (u - p.payload_units);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (k + i < p.c.top_k) p.out_weights[t * p.c.top_k + k + i] = f[i];
  }
};

extern "C" __global__ void __launch_bounds__(640) combine_packets(const __grid_constant__ CombineParams p) {
  const Common& c = p.c;
  const unsigned e = this_call(c);
  const int units = packet_units(p), groups = groups_of(units);
  const int width = c.threads_a_row, lanes = blockDim.x / width, lane = threadIdx.x / width, me = threadIdx.x % width;
  const Call call = serve(p, e);
  if (!(c.phases & RECEIVE)) return;
  if (lane < lanes)
    for (int t = blockIdx.x + lane * gridDim.x; t < c.tokens; t += gridDim.x * lanes) {
      const Summands from = summands_of(p, t);
      for (int g = me; g < groups; g += width) {
        const int u = group_unit(g), size = group_size(g, units);
        if (!size) continue;
        Sum a = {}, b = {}, d = {};
        for (int i = 0; i < from.count; i++) {
          const Place at = place_of(p, t, from, i);
          const Group v = at.rank == c.rank ? load_y_group(p, at.row, g, size)
                                            : wait_group(c, slot_of(p, c.rank, at.rank, t, e), g, size, e, at.rank, WAIT_SUMMANDS, t,
                                                         [&] { return found_difference(p, call, at.rank); });
          a.add_unit(v.a, i == 0, u < p.payload_units);
          b.add_unit(v.b, i == 0, u + 32 < p.payload_units);
          d.add_unit(v.c, i == 0, u + 64 < p.payload_units);
        }
        a.store(p, t, u);
        if (size > 1) b.store(p, t, u + 32);
        if (size > 2) d.store(p, t, u + 64);
      }
    }
  __syncthreads();
  leave_call(c, e);
  if (blockIdx.x == 0) await_all(p, p.at_entered, call, c.alive, WAIT_ENTERED);
  await_readers(p, call);
}
#endif

// ---- many tokens ----

#define IN_FLIGHT (Wired::PER_UNIT == 16 ? 3 : 7)  // units of a row a thread; 7 x 128 threads are a row of 7168 bf16

struct Pulled {
  const uint4* units;
  const float* scales;
};
DEVICE Pulled row_at(const CombineParams& p, const Place& at) {
  if (WIRE == AS_IT_IS && at.rank == p.c.rank) return {(const uint4*)p.y + given_row(p, at.row) * row_units(p), nullptr};
  const char* w = p.c.window[at.rank];
  return {(const uint4*)(w + p.at_y) + at.row * p.wire_units, (const float*)(w + p.at_y_scales) + at.row * p.scale_units};
}
DEVICE Pulled row_of(const CombineParams& p, size_t t, const Summands& from, int i) {
  return i < from.count ? row_at(p, place_of(p, t, from, i)) : Pulled{nullptr, nullptr};
}
DEVICE void add_pulled(const CombineParams& p, float* sum, uint4 v, const Pulled& from, int u, bool first) {
  float term[Wired::PER_UNIT];
  Wired::unpack(term, v);
  if (WIRE == BLOCKWISE) {
    const float scale = from.scales[u / (p.wire_units / p.scale_units)];
#pragma unroll
    for (int i = 0; i < Wired::PER_UNIT; i++) term[i] = __fmul_rn(term[i], scale);
  }
  add<Wired::PER_UNIT>(sum, term, first);
}
DEVICE void store_sum(const CombineParams& p, size_t t, int u, const float* sum) {
  constexpr int PER = Wired::PER_UNIT / Rows::PER_UNIT;
  uint4* out = (uint4*)p.out + t * row_units(p) + (size_t)u * PER;
#pragma unroll
  for (int i = 0; i < PER; i++) out[i] = Rows::pack(sum + i * Rows::PER_UNIT);
}

// The threads of one group. Two rows are under way at a time.
DEVICE void pull_token(const CombineParams& p, size_t t, int me, int width) {
  const Summands from = summands_of(p, t);
  const Pulled a0 = row_of(p, t, from, 0), b0 = row_of(p, t, from, 1);
  for (int u0 = me; u0 < p.wire_units; u0 += width * IN_FLIGHT) {
    float sum[IN_FLIGHT][Wired::PER_UNIT] = {};
    for (int i = 0; i < from.count; i += 2) {
      const bool two = i + 1 < from.count;
      const Pulled a = i ? row_of(p, t, from, i) : a0, b = i ? row_of(p, t, from, i + 1) : b0;
      uint4 va[IN_FLIGHT], vb[IN_FLIGHT];
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; k++)
        if (u0 + width * k < p.wire_units) va[k] = load_once(a.units + u0 + width * k);
      if (two)
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
          if (u0 + width * k < p.wire_units) vb[k] = load_once(b.units + u0 + width * k);
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; k++)
        if (u0 + width * k < p.wire_units) {
          add_pulled(p, sum[k], va[k], a, u0 + width * k, i == 0);
          if (two) add_pulled(p, sum[k], vb[k], b, u0 + width * k, false);
        }
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (u0 + width * k < p.wire_units) store_sum(p, t, u0 + width * k, sum[k]);
  }
  if (!p.weights) return;
  for (int k = me; k < p.c.top_k; k += width) {
    float sum = 0;
    for (int i = 0; i < from.count; i++) {
      const Place at = place_of(p, t, from, i);
      const bool mine = at.rank == p.c.rank;
      const float* w = mine ? (const float*)p.weights : (const float*)(p.c.window[at.rank] + p.at_y_weights);
      const float term = *(const volatile float*)(w + (mine ? given_row(p, at.row) : at.row) * p.c.top_k + k);
      sum = i == 0 ? term : sum + term;
    }
    p.out_weights[t * p.c.top_k + k] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) combine_pull(const __grid_constant__ CombineParams p) {
  const Common& c = p.c;
  const unsigned e = this_call(c);
  const int width = c.threads_a_row, lanes = blockDim.x / width, lane = threadIdx.x / width, me = threadIdx.x % width;
  const Call call = serve(p, e);
  if (!(c.phases & RECEIVE)) return;
  await_all(p, p.at_ready, call, WIRE == AS_IT_IS ? c.alive & ~(1u << c.rank) : c.alive, WAIT_READY);
  __syncthreads();
  leave_call(c, e);
  if (lane < lanes)
    for (int t = blockIdx.x + lane * gridDim.x; t < c.tokens; t += gridDim.x * lanes) pull_token(p, t, me, width);
  await_readers(p, call);
}

extern "C" __device__ const unsigned combine_params_bytes = sizeof(CombineParams);
