// The plan of a call, made by one block on each rank: who sends how many rows where, and which tiles that makes.
//
// Protocol of call e (counted in Tiles::counts[EPOCH], so a captured graph may be replayed between eager calls):
//   1. My rows for each expert of all ranks are counted and stored in every rank's counts[e % 2][me]; then told[me] = e there
//      (release). Meanwhile my routes are put in order: by (expert, token, slot), the same in every run.
//   2. When told[s] of all s is e (acquire), all ranks hold the same matrix of counts and derive the same layout from it: at each
//      rank its experts one after the other, padded to whole tiles, in an expert the sources' rows in the order of ranks. So a
//      source's rows for an expert are one run of rows, and nobody has to ask where they go.
//   3. Stage1 (or dispatch) sends rows and adds their number to arrived[expert][source] at the receiver; what that will be when
//      all have come, due[expert][source], is counted up here. Nothing is cleared between calls.
// Why nothing is overwritten too early. A rank tells its counts of e behind everything that read its landing memory in e - 1 (its
//   stream's order), and a sender has heard them before it stores a row of e there: the counts say that the landing is free. The
//   matrix exists twice, by parity: a rank tells e + 2 only after it has heard e + 1 of all, which they tell behind their plan of e.
// Why nobody waits for ever. A plan waits for the plans of the peers, which come first in their calls and wait for nothing else.
//   Senders wait for nobody (send.cuh). A GEMM waits for senders, and in the order of readiness for the warp that publishes,
//   which waits for senders only; these are in the lowest blocks of the grid, which start first, and the grid has one block an SM
//   at most (`most_blocks` in limits.py). So no chain of waits comes back to itself. It asks that every rank makes every call, with
//   0 tokens too, and that no other kernel holds all SMs for ever. All waits have a deadline.
// A rank that would receive more rows than its landing has: all ranks see that in the matrix, write the fault record and plan
//   nothing, so that the call ends at once everywhere.
#pragma once
#include "send.cuh"

#define PLAN_THREADS 1024
#define PLAN_WARPS (PLAN_THREADS / 32)
#define NO_EXPERT 0xffffffffu

struct PlanMemory {              // shared; experts of all ranks
  unsigned total[MAX_EXPERTS];   // my rows for an expert
  unsigned first[MAX_EXPERTS];   // where they begin in `order`
  unsigned to[MAX_EXPERTS];      // .. and at their rank
  unsigned rows[MAX_EXPERTS];    // of all sources
  unsigned scan[PLAN_WARPS + 1];
  unsigned most[MAX_RANKS];      // padded rows of a rank
  // Behind it [PLAN_WARPS][experts of all]: routes of a warp, then those of the warps before it and its own so far.
  DEVICE unsigned* in_warps() { return (unsigned*)(this + 1); }
};

// All threads of the block: the sum of the threads before this one; `all` the sum of all.
DEVICE unsigned sum_before(unsigned value, unsigned& all, PlanMemory& m) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned sum = value;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) m.scan[warp] = sum;
  __syncthreads();
  unsigned before = 0;
  all = 0;
  for (int w = 0; w < PLAN_WARPS; ++w) before += w < warp ? m.scan[w] : 0, all += m.scan[w];
  __syncthreads();
  return before + sum - value;
}

// A warp's routes, 32 at a time, in order. All lanes: visit(route, expert or NO_EXPERT, how many of these 32 before it name the
// same expert, how many of all 32 do).
template <typename Visit>
DEVICE void visit_routes(const PlanParams& p, Visit visit) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, routes = p.tokens * p.top_k;
  const int each = (routes + PLAN_THREADS - 1) / PLAN_THREADS * 32, end = min(routes, (warp + 1) * each);
  for (int r0 = warp * each; r0 < end; r0 += 32) {
    const int route = r0 + lane;
    unsigned expert = route < end ? (unsigned)p.ids[route] : NO_EXPERT;
    if (expert >= (unsigned)(p.world * p.experts)) expert = NO_EXPERT;
    const unsigned same = __match_any_sync(~0u, expert), before = same & ((1u << lane) - 1);
    visit(route, expert, __popc(before), __popc(same));
    __syncwarp();
  }
}

DEVICE void count_routes(const PlanParams& p, PlanMemory& m) {
  const int all = p.world * p.experts;
  unsigned* in_warps = m.in_warps();
  for (int i = threadIdx.x; i < all * PLAN_WARPS; i += PLAN_THREADS) in_warps[i] = 0;
  __syncthreads();
  unsigned* in_mine = in_warps + (threadIdx.x >> 5) * all;
  visit_routes(p, [&](int, unsigned expert, int before, int number) {
    if (expert != NO_EXPERT && before == 0) in_mine[expert] += number;
  });
  __syncthreads();
  const int expert = threadIdx.x;
  unsigned total = 0;
  if (expert < all)
    for (int w = 0; w < PLAN_WARPS; ++w) {
      const unsigned number = in_warps[w * all + expert];
      in_warps[w * all + expert] = total, total += number;
    }
  unsigned routes;
  const unsigned first = sum_before(total, routes, m);
  if (expert < all) m.total[expert] = total, m.first[expert] = first;
  __syncthreads();
}
DEVICE void order_routes(const PlanParams& p, PlanMemory& m) {
  unsigned* placed = m.in_warps() + (threadIdx.x >> 5) * p.world * p.experts;
  visit_routes(p, [&](int route, unsigned expert, int before, int number) {
    const bool exists = expert != NO_EXPERT;
    if (exists) p.order[m.first[expert] + placed[expert] + before] = route;
    __syncwarp();
    if (exists && before == 0) placed[expert] += number;
  });
  __syncthreads();
}

DEVICE unsigned* counts_of(const PlanParams& p, int at_rank, int source, unsigned epoch) {
  return (unsigned*)(p.landing.window[at_rank] + p.landing.at_counts) + ((size_t)(epoch & 1) * p.world + source) * (p.world * p.experts + 1);
}
DEVICE void tell_counts(const PlanParams& p, const PlanMemory& m, unsigned epoch) {
  const int all = p.world * p.experts;
  for (int i = threadIdx.x; i < p.world * (all + 1); i += PLAN_THREADS) {
    const int to = i / (all + 1), expert = i - to * (all + 1);
    counts_of(p, to, p.rank, epoch)[expert] = expert < all ? m.total[expert] : p.slots.rows;
  }
  __syncthreads();
  if (threadIdx.x < p.world) {
    fence_sys();
    store_release_sys((unsigned*)(p.landing.window[threadIdx.x] + p.landing.at_told) + p.rank, epoch);
  }
}
DEVICE bool hear_counts(const PlanParams& p, unsigned epoch) {
  bool came = true;
  if (threadIdx.x < p.world) {
    const unsigned* told = (const unsigned*)(p.landing.window[p.rank] + p.landing.at_told) + threadIdx.x;
    came = wait_flag(told, epoch, p.fault, p.timeout_ns, p.rank, threadIdx.x, WAIT_COUNTS, epoch);
  }
  return __syncthreads_and(came);
}

// Rows of all sources for each expert, and where mine go. False: more than a rank has room for.
DEVICE bool lay_out(const PlanParams& p, PlanMemory& m, unsigned epoch) {
  const int all = p.world * p.experts, expert = threadIdx.x, owner = expert / p.experts;
  unsigned rows = 0, before = 0;
  if (expert < all)
    for (int s = 0; s < p.world; ++s) {
      const unsigned number = __ldcg(counts_of(p, p.rank, s, epoch) + expert);
      before += s < p.rank ? number : 0, rows += number;
    }
  const unsigned padded = (rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows;
  unsigned sum;
  const unsigned base = sum_before(padded, sum, m);
  if (expert < all) m.to[expert] = base, m.rows[expert] = rows;
  __syncthreads();
  const unsigned first_of_owner = expert < all ? m.to[owner * p.experts] : 0;
  if (expert < all && expert % p.experts == p.experts - 1) m.most[owner] = base + padded - first_of_owner;
  __syncthreads();
  if (expert < all) m.to[expert] = base - first_of_owner + before;
  bool fits = true;
  if (threadIdx.x < p.world && m.most[threadIdx.x] > (unsigned)p.capacity) {
    write_fault(p.fault, p.rank, threadIdx.x, TOO_MANY_ROWS, 0, m.most[threadIdx.x], p.capacity);
    fits = false;
  }
  return __syncthreads_and(fits);
}

// In the order of experts, and in an expert of ranks: those behind mine first, I am the last.
DEVICE unsigned list_units(const PlanParams& p, PlanMemory& m) {
  const int all = p.world * p.experts;
  unsigned expert = 0, rows = 0, before = 0, fits = 0;
  if (threadIdx.x < all) {
    const int owner = (p.rank + 1 + threadIdx.x % p.world) % p.world, local = threadIdx.x / p.world;
    expert = owner * p.experts + local, rows = m.total[expert];
    if (p.slots.experts && owner != p.rank) {
      before = m.first[expert] - m.first[owner * p.experts + first_of_slot(local, p.slots)];
      fits = fitting_rows(before, rows, p.slots.rows);
      if (fits) atomicAdd(p.slots.left + slot_of(owner, local, p.slots), (fits + UNIT_ROWS - 1) / UNIT_ROWS);
    }
  }
  unsigned units;
  unsigned at = sum_before((rows + UNIT_ROWS - 1) / UNIT_ROWS, units, m);
  for (unsigned i = 0; i < rows; i += UNIT_ROWS, ++at)
    p.units[at] = {m.first[expert] + i, min(rows - i, (unsigned)UNIT_ROWS), expert, m.to[expert] + i, i < fits ? before + i : NO_SLOT};
  return units;
}

// The same of what others have for me in slots: expert by expert, in an expert the sources.
DEVICE unsigned list_moves(const PlanParams& p, PlanMemory& m, unsigned epoch) {
  if (!p.slots.experts) return 0;
  const int all = p.world * p.experts, expert = threadIdx.x / p.world, source = threadIdx.x % p.world;
  unsigned before = 0, fits = 0, to = 0;
  if (threadIdx.x < all && source != p.rank) {
    const unsigned* number = counts_of(p, p.rank, source, epoch) + p.rank * p.experts;  // [experts]
    const unsigned room = __ldcg(counts_of(p, p.rank, source, epoch) + all);
    for (int e = first_of_slot(expert, p.slots); e < expert; ++e) before += __ldcg(number + e);
    fits = fitting_rows(before, __ldcg(number + expert), room);
    to = m.to[p.rank * p.experts + expert];  // where my own rows go; from there to the source's
    for (int s = min(source, p.rank); s < max(source, p.rank); ++s) {
      const unsigned rows = __ldcg(counts_of(p, p.rank, s, epoch) + p.rank * p.experts + expert);
      to += source > p.rank ? rows : 0u - rows;
    }
  }
  unsigned moves;
  unsigned at = sum_before((fits + UNIT_ROWS - 1) / UNIT_ROWS, moves, m);
  for (unsigned i = 0; i < fits; i += UNIT_ROWS, ++at)
    p.moves[at] = {(unsigned)source, (unsigned)expert, before + i, min(fits - i, (unsigned)UNIT_ROWS), to + i};
  return moves;
}

// The last of the `count` entries of `first` that is <= x; first[0] is.
DEVICE int find(const unsigned* first, int count, unsigned x) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) >> 1;
    if (first[middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}

DEVICE unsigned list_tiles(const PlanParams& p, PlanMemory& m, unsigned epoch) {
  const int e = threadIdx.x;
  const unsigned *rows = m.rows + p.rank * p.experts;
  unsigned* first_tile = m.in_warps();  // [experts]: the routes are done with
  const unsigned mine = e < p.experts ? (rows[e] + p.tile_rows - 1) / p.tile_rows : 0;
  unsigned tiles;
  const unsigned first = sum_before(mine, tiles, m);
  if (e < p.experts) first_tile[e] = first;
  __syncthreads();
  for (unsigned tile = threadIdx.x; tile < tiles; tile += PLAN_THREADS) {
    const int expert = find(first_tile, p.experts, tile);
    const unsigned begin = (tile - first_tile[expert]) * p.tile_rows;  // in the expert's rows
    unsigned sources = 0, at = 0;
    for (int s = 0; s < p.world; ++s) {
      const unsigned number = __ldcg(counts_of(p, p.rank, s, epoch) + p.rank * p.experts + expert);
      if (number && at < begin + p.tile_rows && at + number > begin) sources |= 1u << s;
      at += number;
    }
    p.tiles.expert[tile] = expert, p.tiles.sources[tile] = sources;
    p.tiles.row_base[tile] = p.tiles.input_base[tile] = tile * p.tile_rows;
  }
  for (unsigned i = threadIdx.x; i < tiles * p.pairs; i += PLAN_THREADS) {
    const int expert = find(first_tile, p.experts, i / p.pairs);
    const unsigned begin = first_tile[expert], number = (expert + 1 < p.experts ? first_tile[expert + 1] : tiles) - begin;
    const unsigned of_expert = i - begin * p.pairs, pair = of_expert / number;
    p.tiles.items[i] = (begin + of_expert - pair * number) | pair << 20;
  }
  unsigned* source = (unsigned*)(p.landing.window[p.rank] + p.landing.at_source);
  for (int i = threadIdx.x; i < p.experts * p.tile_rows; i += PLAN_THREADS) {  // padding
    const int expert = i / p.tile_rows;
    const unsigned end = (rows[expert] + p.tile_rows - 1) / p.tile_rows * p.tile_rows, row = rows[expert] + i % p.tile_rows;
    if (row < end) source[first_tile[expert] * p.tile_rows + row] = p.world * p.max_tokens;
  }
  return tiles;
}

DEVICE void count_due(const PlanParams& p, unsigned epoch) {
  for (int i = threadIdx.x; i < p.experts * p.world; i += PLAN_THREADS)
    p.due[i] += __ldcg(counts_of(p, p.rank, i % p.world, epoch) + p.rank * p.experts + i / p.world);
}

// All threads of one block of PLAN_THREADS.
DEVICE void make_plan(const PlanParams& p, PlanMemory& m) {
  const unsigned epoch = *(volatile unsigned*)(p.tiles.counts + EPOCH) + 1;
  __syncthreads();
  count_routes(p, m);
  for (int i = threadIdx.x; i < p.slots.number; i += PLAN_THREADS) p.slots.left[i] = 0, p.slots.came[i] = 0;
  tell_counts(p, m, epoch);
  order_routes(p, m);
  unsigned units = 0, moves = 0, tiles = 0;
  if (hear_counts(p, epoch) && lay_out(p, m, epoch)) {
    units = list_units(p, m);
    moves = list_moves(p, m, epoch);
    tiles = list_tiles(p, m, epoch);
    count_due(p, epoch);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.slots.number; i += PLAN_THREADS) p.slots.packed[i] = p.slots.left[i] == 0;
  if (threadIdx.x == 0) {
    unsigned* counts = p.tiles.counts;
    counts[NUM_ITEMS] = tiles * p.pairs, counts[NUM_TILES] = tiles, counts[NUM_ROWS] = tiles * p.tile_rows;
    counts[NUM_UNITS] = units, counts[SEND_HEAD] = 0, counts[TICKETS] = 0, counts[EPOCH] = epoch;
    counts[NUM_MOVES] = moves, counts[MOVE_HEAD] = 0;
  }
}
