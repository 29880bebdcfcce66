// One fp8 GEMM whose epilogue is the all-reduce (sm_90a, persistent, one CTA an SM, clusters of two along n).
//
// A tile is ROWS x 128 of the sum over k; a rank computes every tile, its rows belong to an owner:
//   remote tile (owner is another rank): rounded to bf16 and sent to the owner's inbox;
//   local tile: rounded to bf16 too, then the inboxes are added in fp32 in rank order, rounded once, and sent to all outputs.
// Tiles come in bands (`band` row blocks over all of n). Remote bands go first; local ones follow `lag` bands behind.
//
// Roles of the 384 threads:
//   warp 0, one thread     loads stages: a (half by each CTA of the pair, multicast) and b
//   warps 1 and 2, a thread each   the courier of one consumer warpgroup: inbox tiles in, finished tiles out, flags
//   warp 3                 widens arrived fp8 blocks to bf16 in the output (fp8 gather), or waits for the last arrivals
//   warpgroups 1 and 2     HALVES x 64 rows each: wgmma, promotion to fp32 every 128 of k, epilogue into shared memory
// Consumers touch neither flags nor global memory: a flag costs 5 us from the store on, a tile takes 6.
//
// Protocol, for one band of owner o from source s:
//   1. each courier stores its part of each tile, waits until the stores are done, counts itself in count[o][band] (of s);
//      the last one, by then nobody's stores are missing, signals `scatter_flag[o][band]`; the counter has wrapped to 0.
//   2. the courier of o waits for arrived[s][band] of every s, loads the inbox tiles, the consumer adds, the result is
//      stored to all outputs; counted in count[o][band] of o; the last one signals every listener's gather flag.
//   3. warp 3 of CTA 0 (fp8: of every CTA) sees gathered[s][band] of all s before the kernel ends.
// Why nothing needs a barrier or a reset: a rank ends call e only after all gather flags of e have come, so all inboxes of
// e have been read; nobody stores a gathered band of e + 1 before this rank, whose kernel e + 1 starts behind the readers of
// its output on its stream, has sent its part of that band. Flags carry the epoch e, kept in `step` on the device, so a
// captured graph stays right. Bands are per call, epochs are not: any m may follow any other.
// No cycle: a courier never blocks on an inbox with a count of its own outstanding, and what it waits for stands earlier
// in every rank's order than what it holds up; all CTAs are resident.
#include "async.cuh"
#include "params.cuh"
#include "signal.cuh"
#include "wgmma.cuh"

#define BLOCKSCALE 0
#define PTPC 1
#define MXFP8 2
#ifndef SCALES
#define SCALES BLOCKSCALE
#endif
#ifndef HALVES
#define HALVES 2  // 64-row halves of a consumer warpgroup: 2 is the 256x128 tile, 1 the 128x128 tile
#endif
#ifndef STAGES
#define STAGES (HALVES == 2 ? 3 : 5)
#endif
#ifndef FP8_GATHER
#define FP8_GATHER 0
#endif
#define NUMBERS 8         // tiles that may be under way in a CTA, see `number_of`
#ifndef PIECE_ROWS
#define PIECE_ROWS 16 // rows of 256 bytes that leave at a time
#endif
#ifndef PIECES_FLYING
#define PIECES_FLYING 1
#endif
#define PIECE_BYTES (PIECE_ROWS * 256)
#ifndef TRACE
#define TRACE 0  // 1: couriers write when things happened to p.trace
#endif

#define ROWS (128 * HALVES)
#define WG_ROWS (64 * HALVES)
#define A_BYTES (ROWS * 128)
#define B_BYTES (128 * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define HALF_BYTES (64 * 128 * 2)                  // 64 rows x 128 columns of bf16, as two swizzled boxes of 64 columns
#define Q_BYTES (64 * 128 + 64 * 4)                // the same as fp8 codes, then a scale a row
#define STAGING (STAGES * STAGE_BYTES)
#define BARRIERS (STAGING + 2 * HALVES * HALF_BYTES)
#define FULL(stage) (bars + 8 * (stage))
#define EMPTY(stage) (bars + 8 * (STAGES + (stage)))
#define OFFERED(wg, half) (bars + 8 * (2 * STAGES + 2 * (wg) + (half)))        // staging is free, or holds an inbox tile
#define TAKEN(wg, half) (bars + 8 * (2 * STAGES + 4 + 2 * (wg) + (half)))      // the consumer has read it, or written the result
#define DRAWN(slot) (bars + 8 * (2 * STAGES + 8 + (slot)))                      // the number of a tile has come
#define NUMBER(slot) (bars + 8 * (2 * STAGES + 8 + NUMBERS) + 4 * (slot))
#define TICKET (bars + 8 * (2 * STAGES + 8 + NUMBERS) + 4 * NUMBERS)
#define SHARED_BYTES (BARRIERS + 8 * (2 * STAGES + 9 + NUMBERS) + 4 * NUMBERS)

extern "C" __device__ const unsigned shared_bytes = SHARED_BYTES;   // read by the host from the loaded module
extern "C" __device__ const unsigned params_bytes = sizeof(Params);

extern "C" __device__ const unsigned piece_rows = PIECE_ROWS;

struct Tile {
  int owner, band, block, column;  // row block within the owner's rows, block of 128 columns
  bool exists;
};

// Cluster tile t of this rank's order. Bands: per i, the remote bands i of all other owners, then the local band i - lag.
DEVICE Tile tile_at(int t, int cta, const Params& p) {
  const int pairs = (p.n + 255) / 256, per_band = p.band * pairs;
  int slot = divide(t, p.by_band_tiles), in_band = t - slot * per_band;
  const int others = p.world - 1, head = p.lag * others, body = (p.bands - p.lag) * p.world;
  int distance = 0, band;
  if (slot < head) {
    band = divide(slot, p.by_others), distance = 1 + slot - band * others;
  } else if (slot < head + body) {
    const int i = divide(slot - head, p.by_world), v = slot - head - i * p.world;
    band = i + (v < others ? p.lag : 0), distance = v < others ? 1 + v : 0;
  } else {
    band = slot - head - body + p.bands - p.lag;
  }
  Tile tile;
  tile.owner = p.rank + distance, tile.owner -= tile.owner >= p.world ? p.world : 0;
  tile.band = band;
  const int pair = divide(in_band, p.by_band);
  tile.block = band * p.band + in_band - pair * p.band;
  tile.column = pair * 2 + cta;
  tile.exists = tile.block * ROWS < p.start[tile.owner + 1] - p.start[tile.owner];
  return tile;
}
DEVICE int num_tiles(const Params& p) { return p.world * p.bands * p.band * ((p.n + 255) / 256); }

// Which tiles a cluster computes is drawn as it goes: links are not fair to SMs, and with fixed shares some CTAs were 150 us
// ahead of others, whose bands everybody waited for. The first CTA's loader draws tile i + 1 while it loads tile i and sends
// its number to both CTAs. Nobody has to free a slot: the loader is at most STAGES steps ahead of the consumers of both CTAs,
// and these are at most a tile ahead of their couriers, so that fewer than NUMBERS tiles are under way.
DEVICE int draw(const Params& p) { return (int)(gridDim.x >> 1) + (int)atomicAdd(p.tickets, 1u); }

DEVICE void send_number(int i, int t, uint32_t bars, int cta, const Params& p) {
  const int slot = i % NUMBERS;
  barrier_arrive_expect(DRAWN(slot), 4);
  if (cta) return;
  const int tiles = num_tiles(p);
  while (t < tiles && !tile_at(t, 0, p).exists) t = draw(p);
  for (int to = 0; to < 2; ++to) store_async_cluster(NUMBER(slot), t, DRAWN(slot), to);
}

// The number of this cluster's tile i; past the end: there is none.
DEVICE int number_of(int i, uint32_t bars) {
  const int slot = i % NUMBERS;
  barrier_wait(DRAWN(slot), i / NUMBERS & 1);
  int t;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(t) : "r"(NUMBER(slot)) : "memory");
  return t;
}

// Parts of a band of `owner` that couriers count: row blocks x columns (of both CTAs) x 2 warpgroups.
DEVICE unsigned parts_of_band(int owner, int band, const Params& p) {
  const int blocks = (p.start[owner + 1] - p.start[owner] + ROWS - 1) / ROWS - band * p.band;
  return (blocks < p.band ? blocks : p.band) * ((p.n + 255) / 256) * 4;
}

// Where the half tile lies in an inbox: whole tiles in order, so a band is contiguous and a store is one bulk copy.
DEVICE int64_t half_index(const Tile& tile, int wg, int half, const Params& p) {
  return (((int64_t)tile.block * ((p.n + 255) / 256 * 2) + tile.column) * 2 + wg) * HALVES + half;
}

// ---------------------------------------------------------------------------------------------- loads
DEVICE void load_stages(uint32_t shared, uint32_t bars, int cta, const Maps& maps, const Params& p) {
  const int num_steps = (p.k + 127) / 128, tiles = num_tiles(p), drawing_step = max(0, num_steps - 8);
  int stage = 0, drawn = 0;
  uint32_t parity = 1;
  send_number(0, blockIdx.x >> 1, bars, cta, p);
  for (int i = 0;; ++i) {
    const int t = number_of(i, bars);
    if (t >= tiles) return;
    const Tile tile = tile_at(t, cta, p);
    const int row = p.start[tile.owner] + tile.block * ROWS + cta * (ROWS / 2);
    for (int step = 0; step < num_steps; ++step) {
      if (step == drawing_step && cta == 0) drawn = draw(p);  // on its way for a few steps: a loader that waits starves the consumers
      if (step == min(drawing_step + 3, num_steps - 1)) send_number(i + 1, drawn, bars, cta, p);
      barrier_wait(EMPTY(stage), parity);
      const uint32_t to = shared + stage * STAGE_BYTES;
      barrier_arrive_expect(FULL(stage), STAGE_BYTES);
      tensor_load_multicast(to + cta * (A_BYTES / 2), &maps.a, FULL(stage), step * 128, row, 3);
      tensor_load(to + A_BYTES, &maps.b, FULL(stage), step * 128, tile.column * 128);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}

// -------------------------------------------------------------------------------------------- courier
struct Owed {  // a tile whose stores may still be on their way
  unsigned total;
  int owner, band;
};

// Its stores are done: count the tile; the last of its band tells who waits for the band.
DEVICE void settle(Owed& owed, unsigned epoch, const Params& p) {
  if (!owed.total) return;
  if (last_of(p.count + owed.owner * MAX_BANDS + owed.band, owed.total)) {
    if (owed.owner != p.rank) {
      store_release_sys(p.scatter_flag[owed.owner] + owed.band, epoch);
    } else {
      if (p.toggles)
        for (int s = 0; s < p.world; ++s)
          if (s != p.rank) store_relaxed_sys(p.arrived[s] + owed.band, 0);
      for (int i = 0; i < p.num_listeners; ++i) store_release_sys(p.gather_flag[i] + owed.band, epoch);
    }
  }
  owed.total = 0;
}

// What passes between a courier and its consumer for one tile, as items, each in staging buffer i % HALVES:
//   reduce   item h * rounds + r: source r (in rank order, without mine) of half h; the last round leaves the half's result
//   else     item h: half h's result
// OFFERED: the buffer is free, or holds the source. TAKEN: the consumer has read it, or has left a result.
struct Items {
  int rounds, total;
  bool local, reduces;
};
DEVICE Items items_of(const Tile& tile, const Params& p) {
  Items items;
  items.local = tile.owner == p.rank, items.reduces = items.local && p.world > 1;
  items.rounds = items.reduces ? p.world - 1 : 1;
  items.total = HALVES * items.rounds;
  return items;
}

DEVICE void offer_item(int i, int wg, const Items& items, const Tile& tile, uint32_t shared, uint32_t bars, const Params& p) {
  const int buffer = i % HALVES;
  if (items.reduces) {
    const int h = i / items.rounds, round = i - h * items.rounds, source = round + (round >= p.rank);
    barrier_arrive_expect(OFFERED(wg, buffer), HALF_BYTES);
    bulk_load(shared + STAGING + (wg * HALVES + buffer) * HALF_BYTES, p.inbox[source] + half_index(tile, wg, h, p) * HALF_BYTES, HALF_BYTES,
              OFFERED(wg, buffer));
  } else {
    barrier_arrive(OFFERED(wg, buffer));
  }
}

DEVICE void stores_wait_but_half() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(64 / PIECE_ROWS) : "memory"); }

// Stores go out in pieces, few at a time: an SM's loads queue behind its stores, and a link that is full holds up 16 KB for 6 us.
DEVICE void next_piece() {
  stores_commit();
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PIECES_FLYING - 1) : "memory");
}
DEVICE void push(char* dst, uint32_t src, int nbytes) {
  for (int at = 0; at < nbytes; at += PIECE_BYTES) {
    bulk_store(dst + at, src + at, min(PIECE_BYTES, nbytes - at));
    next_piece();
  }
}

// Store what the consumer left as item i; false if it had only read.
DEVICE bool store_item(int i, int wg, const Items& items, const Tile& tile, uint32_t shared, const Maps& maps, const Params& p) {
  const uint32_t half = shared + STAGING + (wg * HALVES + i % HALVES) * HALF_BYTES;
  const int h = i / items.rounds, row = tile.block * ROWS + wg * WG_ROWS + h * 64;
  if (i - h * items.rounds != items.rounds - 1) return false;
  if (!items.local) {
    push(p.sink[tile.owner] + half_index(tile, wg, h, p) * HALF_BYTES, half, HALF_BYTES);
  } else if (FP8_GATHER && items.reduces) {
    for (int o = 0; o < p.num_q_sinks; ++o) push(p.q_sink[o] + half_index(tile, wg, h, p) * Q_BYTES, half, Q_BYTES);
  } else {
    for (int o = 0; o < p.num_outs; ++o)
      for (int r = 0; r < 64; r += PIECE_ROWS) {
        tensor_store(&maps.out[o], half + r * 128, tile.column * 128, row + r);
        tensor_store(&maps.out[o], half + HALF_BYTES / 2 + r * 128, tile.column * 128 + 64, row + r);
        if (o) next_piece();
      }
    stores_commit();
  }
  return true;
}

#if TRACE
#define MARK(event) p.trace[(((int64_t)blockIdx.x * 2 + wg) * 64 + round_of_tiles) * 8 + (event)] = now_ns()
#else
#define MARK(event)
#endif

DEVICE void run_courier(int wg, uint32_t shared, uint32_t bars, int cta, unsigned epoch, const Maps& maps, const Params& p) {
  const int tiles = num_tiles(p);
  uint32_t parity = 0;
  Owed owed = {0, 0, 0};
  for (int round_of_tiles = 0;; ++round_of_tiles) {
    const int t = number_of(round_of_tiles, bars);
    if (t >= tiles) break;
    const Tile tile = tile_at(t, cta, p);
    const Items items = items_of(tile, p);
    MARK(0);
    if (items.reduces) {
      bool ready = true;
      for (int s = 0; s < p.world; ++s) ready = ready && (s == p.rank || has_come(p.arrived[s] + tile.band, epoch));
      if (!ready) {
        stores_wait();
        settle(owed, epoch, p);  // never block on an inbox with a count of mine outstanding
        for (int s = 0; s < p.world; ++s)
          if (s != p.rank) wait_flag(p.arrived[s] + tile.band, epoch, p.fault, p.timeout_ns, p.rank, s, 1, tile.band);
      }
      fence_async();
    }
    MARK(1);
    // A buffer is offered as soon as the previous tile's store has read it: the link must not run dry between tiles.
    stores_wait_read();
    for (int i = 0; i < HALVES; ++i) offer_item(i, wg, items, tile, shared, bars, p);
    MARK(2);
    if (owed.total && !barrier_test(TAKEN(wg, 0), parity)) {  // the consumer still multiplies: settle now
      stores_wait();
      settle(owed, epoch, p);
    }
    MARK(3);
    for (int i = 0; i < items.total; ++i) {
      const int buffer = i % HALVES;
      barrier_wait(TAKEN(wg, buffer), parity);
      if (i == 0) MARK(4);
      const bool stored = store_item(i, wg, items, tile, shared, maps, p);
      if (i == 0 && owed.total) {  // the consumer was faster than the link: its data first, then the count of the tile before
        if (stored) stores_wait_but_half();
        else stores_wait();
        settle(owed, epoch, p);
      }
      if (i + HALVES < items.total) {
        if (stored) stores_wait_read();
        offer_item(i + HALVES, wg, items, tile, shared, bars, p);
      }
      if (buffer == HALVES - 1) parity ^= 1;
    }
    MARK(5);
    if (p.world > 1) owed.total = parts_of_band(tile.owner, tile.band, p), owed.owner = tile.owner, owed.band = tile.band;
  }
  stores_wait();
  settle(owed, epoch, p);
}

// ----------------------------------------------------------------------------------- arrivals from peers
// All warps that come here share the CTA's part of the work by a ticket; a unit is 16 rows x 128 columns of codes.
DEVICE void widen(uint32_t ticket, unsigned epoch, const Params& p) {
  const int lane = threadIdx.x & 31, columns = (p.n + 255) / 256 * 2;
  const int units = p.band * columns * 2 * HALVES * 4, per_cta = (units + gridDim.x - 1) / gridDim.x;
  const int slots = p.bands * (p.world - 1);
  int awaited = -1;
#if TRACE
  if (lane == 0) p.trace[(((int64_t)blockIdx.x * 2 + 0) * 64 + 40 + (threadIdx.x >> 5)) * 8] = now_ns();
#endif
  for (;;) {
    int mine = 0;
    if (lane == 0) asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(mine) : "r"(ticket) : "memory");
    mine = __shfl_sync(~0u, mine, 0);
    const int slot = mine / per_cta, unit = (mine - slot * per_cta) * gridDim.x + blockIdx.x;
#if TRACE
    if (lane == 0) {
      uint64_t* at = p.trace + (((int64_t)blockIdx.x * 2 + 0) * 64 + 40 + (threadIdx.x >> 5)) * 8;
      at[1] = now_ns(), at[2] += 1;
      if (at[2] == 1) at[3] = mine;
    }
#endif
    if (slot >= slots) return;
    const int band = slot / (p.world - 1);
    int source = p.rank + 1 + slot - band * (p.world - 1);
    source -= source >= p.world ? p.world : 0;
    const int rows = p.start[source + 1] - p.start[source];
    const int quarter = unit & 3, half = (unit >> 2) % (2 * HALVES), tile = (unit >> 2) / (2 * HALVES);
    const int block = band * p.band + tile / columns, column = tile % columns;
    const int row = block * ROWS + half * 64 + quarter * 16 + (lane >> 3), x = column * 128 + (lane & 7) * 16;
    if (unit >= units || block * ROWS >= rows) continue;
    if (slot != awaited) {
      if (lane == 0) wait_flag(p.gathered[source] + band, epoch, p.fault, p.timeout_ns, p.rank, source, 2, band);
      __syncwarp();
      awaited = slot;
#if TRACE
      if (lane == 0) p.trace[(((int64_t)blockIdx.x * 2 + 0) * 64 + 40 + (threadIdx.x >> 5)) * 8 + 4] = now_ns();
#endif
    }
    const char* codes = p.q_inbox[source] + (((int64_t)block * columns + column) * 2 * HALVES + half) * Q_BYTES;
    uint4 v[4];
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = quarter * 16 + i * 4 + (lane >> 3);
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "l"(codes + r * 128 + (((lane & 7) ^ (r & 7)) << 4))
                   : "memory");
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale[i]) : "l"(codes + 64 * 128 + r * 4) : "memory");
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + 4 * i >= rows) break;
      uint16_t* to = p.out + (int64_t)(p.start[source] + row + 4 * i) * p.n + x;
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        uint32_t wide[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float low, high;
          from_e4m3x2((uint16_t)(words[2 * g + (j >> 1)] >> (16 * (j & 1))), low, high);
          wide[j] = to_bf16x2(low * scale[i], high * scale[i]);
        }
        if (x + 8 * g < p.n) *(uint4*)(to + 8 * g) = make_uint4(wide[0], wide[1], wide[2], wide[3]);
      }
    }
  }
}

// One warp: the kernel may end only when everything has come.
DEVICE void await_gathered(unsigned epoch, const Params& p) {
  for (int i = threadIdx.x & 31; i < p.bands * p.world; i += 32) {
    const int source = i / p.bands, band = i - source * p.bands;
    if (source != p.rank && band * p.band * ROWS < p.start[source + 1] - p.start[source])
      wait_flag(p.gathered[source] + band, epoch, p.fault, p.timeout_ns, p.rank, source, 2, band);
  }
}

// ------------------------------------------------------------------------------------------ consumers
// Read anew, so that addresses made from it are not kept in registers through the main loop.
DEVICE int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The scales that a thread needs for one step of k: of its rows (2 a half) and of its columns. Loaded a step ahead.
struct Scales {
#if SCALES == BLOCKSCALE
  float a[2 * HALVES], b;
#elif SCALES == MXFP8
  uint32_t a[2 * HALVES], b[4];
#endif
};

// Where they lie. Registers are short: one 32-bit distance from a uniform pointer.
struct ScaleSource {
  const char* a;   // this step
  uint32_t first;  // distance of the thread's first row in bytes
  int room;        // rows after it
  const char* b;
};

DEVICE ScaleSource scales_of(const Tile& tile, int wg, const Params& p) {
  const int thread = fresh_thread();
  const int first = p.start[tile.owner] + tile.block * ROWS + wg * WG_ROWS + ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2);
  const int block = SCALES == MXFP8 ? tile.column * 4 : min(tile.column, (p.n - 1) / 128);
  return {(const char*)p.a_scale, 4u * first, p.start[p.world] - 1 - first, (const char*)p.b_scale + 4 * p.b_scale_pitch * block};
}

DEVICE void load_word(uint32_t& to, const void* from) { asm volatile("ld.global.nc.u32 %0, [%1];" : "+r"(to) : "l"(from)); }
DEVICE void load_word(float& to, const void* from) { asm volatile("ld.global.nc.f32 %0, [%1];" : "+f"(to) : "l"(from)); }
template <typename T>
DEVICE void load_scale_of_row(T& to, const ScaleSource& from, int i) {
  const int distance = (i >> 1) * 64 + (i & 1) * 8;
  if (distance <= from.room) load_word(to, from.a + from.first + 4 * distance);  // past the end: any scale will do
}

DEVICE void load_scales(Scales& to, ScaleSource& from, const Tile& tile, const Params& p) {
#if SCALES != PTPC
  // 0, which the compiler cannot know: it would keep the scales of b in uniform registers, and wait for their loads at once
  uint32_t zero;
  asm volatile("shr.u32 %0, %1, 31;" : "=r"(zero) : "r"(from.first));
#pragma unroll
  for (int i = 0; i < 2 * HALVES; ++i) load_scale_of_row(to.a[i], from, i);
#endif
#if SCALES == BLOCKSCALE
  load_word(to.b, from.b + zero);
#elif SCALES == MXFP8
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const int inside = min(tile.column * 4 + g, (p.n - 1) / 32) - tile.column * 4;
    load_word(to.b[g], from.b + 4 * inside * p.b_scale_pitch + zero);
  }
#endif
  from.a += 4 * p.a_scale_pitch, from.b += 4;
}

// blockscale: what the products of a row are multiplied by.
DEVICE Scales times_b(Scales scales) {
#if SCALES == BLOCKSCALE
#pragma unroll
  for (int i = 0; i < 2 * HALVES; ++i) scales.a[i] *= scales.b;
#endif
  return scales;
}

// sum[half] += one step's products. `product` is the only wgmma accumulator: it leaves room for 128 sums a thread.
// `next`, the scales of the step after, are on their way from here on.
DEVICE void multiply_step(float (&sum)[HALVES][64], float (&product)[64], uint32_t stage, uint32_t empty, int wg, const Scales& scales, Scales& next,
                          ScaleSource& from, bool more, const Tile& tile, const Params& p) {
  const int thread = threadIdx.x & 127;
  uint64_t a = operand(stage + wg * (WG_ROWS * 128));
  const uint64_t b = operand(stage + A_BYTES);
  const Scales now = times_b(scales);
#pragma unroll
  for (int h = 0; h < HALVES; ++h, a += 64 * 128 / 16) {
#if SCALES == MXFP8
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WGMMA_FENCE();
      wgmma_64x128x32(product, a + 2 * k, b + 2 * k, 0);
      WGMMA_COMMIT();
      WGMMA_WAIT(0);
      if (h == HALVES - 1 && k == 3 && thread < 2) barrier_arrive_cluster(empty, thread);
      const float a0 = from_e8m0(now.a[2 * h] >> (8 * k) & 255), a1 = from_e8m0(now.a[2 * h + 1] >> (8 * k) & 255);
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float bg = from_e8m0(now.b[g] >> (8 * k) & 255), c0 = a0 * bg, c1 = a1 * bg;
#pragma unroll
        for (int i = 16 * g; i < 16 * g + 16; i += 4) {
          sum[h][i] += product[i] * c0, sum[h][i + 1] += product[i + 1] * c0;
          sum[h][i + 2] += product[i + 2] * c1, sum[h][i + 3] += product[i + 3] * c1;
        }
      }
    }
    if (h == HALVES - 1 && more) load_scales(next, from, tile, p);  // into this step's registers: there are not enough for two sets
#else
    WGMMA_FENCE();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_64x128x32(product, a + 2 * k, b + 2 * k, k > 0);
    WGMMA_COMMIT();
    if (h == 0 && more) load_scales(next, from, tile, p);  // behind the wgmma: it need not wait for their addresses
    WGMMA_WAIT(0);
    if (h == HALVES - 1 && thread < 2) barrier_arrive_cluster(empty, thread);
#if SCALES == BLOCKSCALE
    const float c0 = now.a[2 * h], c1 = now.a[2 * h + 1];  // times that of b
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      sum[h][i] += product[i] * c0, sum[h][i + 1] += product[i + 1] * c0;
      sum[h][i + 2] += product[i + 2] * c1, sum[h][i + 3] += product[i + 3] * c1;
    }
#else
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[h][i] += product[i];
#endif
#endif
  }
}

// ptpc: the scales factor out of the sum.
DEVICE void scale_rows_and_columns(float (&sum)[HALVES][64], const ScaleSource& from, const Tile& tile, const Params& p) {
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float a0 = 0.f, a1 = 0.f;
    load_scale_of_row(a0, from, 2 * h), load_scale_of_row(a1, from, 2 * h + 1);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int x = tile.column * 128 + 8 * j + 2 * (threadIdx.x & 3);
      const float2 b = x < p.n ? __ldg((const float2*)((const float*)p.b_scale + x)) : make_float2(0.f, 0.f);
      sum[h][4 * j] = sum[h][4 * j] * a0 * b.x, sum[h][4 * j + 1] = sum[h][4 * j + 1] * a0 * b.y;
      sum[h][4 * j + 2] = sum[h][4 * j + 2] * a1 * b.x, sum[h][4 * j + 3] = sum[h][4 * j + 3] * a1 * b.y;
    }
  }
}

// Thread's address in a staged half for the 16 columns `group` (0..7): what ldmatrix.x4 and stmatrix.x4 take.
DEVICE uint32_t matrix_address(uint32_t half, int group, int thread) {
  const int lane = thread & 31, q = lane >> 3;
  const int row = ((thread >> 5) & 3) * 16 + (q & 1) * 8 + (lane & 7);
  return half + (group >> 2) * (HALF_BYTES / 2) + row * 128 + (((2 * (group & 3) + (q >> 1)) ^ (lane & 7)) << 4);
}

// values (+)= the staged half
template <bool ADD>
DEVICE void read_half(float (&values)[64], uint32_t half) {
  const int thread = fresh_thread();
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    uint32_t v[4];
    load_matrix_x4(matrix_address(half, group, thread), v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* to = values + group * 8 + 2 * i;
      to[0] = (ADD ? to[0] : 0.f) + bf16_low(v[i]), to[1] = (ADD ? to[1] : 0.f) + bf16_high(v[i]);
    }
  }
}
DEVICE void write_half(const float (&values)[64], uint32_t half) {
  const int thread = fresh_thread();
#pragma unroll
  for (int group = 0; group < 8; ++group) {
    const float* f = values + group * 8;
    store_matrix_x4(matrix_address(half, group, thread), to_bf16x2(f[0], f[1]), to_bf16x2(f[2], f[3]), to_bf16x2(f[4], f[5]), to_bf16x2(f[6], f[7]));
  }
}

// A half through e4m3: `values` become what their codes stand for, so that all ranks hold the same output. A row and 128
// columns share a scale; scale[i] is that of the thread's row i. The codes themselves are not kept, registers are short:
// value / scale rounds to the same code again.
DEVICE float inverse_of(float scale) { return scale > 0.f ? 1.f / scale : 0.f; }
DEVICE void quantise_half(float (&scale)[2], float (&values)[64]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float &low = values[4 * j + 2 * i], &high = values[4 * j + 2 * i + 1];
      const uint32_t pair = to_bf16x2(low, high);  // the sum is a bf16 number before it is quantised
      low = bf16_low(pair), high = bf16_high(pair);
      largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    scale[i] = largest / 448.f;
    const float inverse = inverse_of(scale[i]);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float &low = values[4 * j + 2 * i], &high = values[4 * j + 2 * i + 1];
      from_e4m3x2(to_e4m3x2(low * inverse, high * inverse), low, high);
      low *= scale[i], high *= scale[i];
    }
  }
}
// Rows of 128 bytes, the 16-byte pieces of row r at piece ^ (r & 7); after them a scale a row.
DEVICE void write_codes(const float (&scale)[2], const float (&values)[64], uint32_t half) {
  const int thread = fresh_thread(), lane = thread & 31;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = ((thread >> 5) & 3) * 16 + (lane >> 2) + 8 * i;
    const float inverse = inverse_of(scale[i]);
    if ((lane & 3) == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(half + 64 * 128 + 4 * r), "f"(scale[i]) : "memory");
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint16_t codes = to_e4m3x2(values[4 * j + 2 * i] * inverse, values[4 * j + 2 * i + 1] * inverse);
      const uint32_t address = half + r * 128 + (((j >> 1) ^ (r & 7)) << 4) + (j & 1) * 8 + (lane & 3) * 2;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(codes) : "memory");
    }
  }
}

DEVICE void give_back(int wg, int& buffer, uint32_t& parity, uint32_t bars) {  // all threads of the warpgroup
  fence_async_shared();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(TAKEN(wg, buffer));
  if (++buffer == HALVES) buffer = 0, parity ^= 1;
}

// All threads of the warpgroup: the staged half to my rows of the output, 256 bytes of a row side by side.
DEVICE void copy_half_out(uint32_t half, const Tile& tile, int wg, int h, const Params& p) {
  const int thread = fresh_thread() & 127, piece = thread & 15, x = tile.column * 128 + piece * 8;
  const int first = tile.block * ROWS + wg * WG_ROWS + h * 64, height = p.start[p.rank + 1] - p.start[p.rank];
  asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = i * 8 + (thread >> 4);
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(half + (piece >> 3) * (HALF_BYTES / 2) + r * 128 + (((piece & 7) ^ (r & 7)) << 4))
                 : "memory");
    if (first + r < height && x < p.n) *(uint4*)(p.out + (int64_t)(p.start[p.rank] + first + r) * p.n + x) = v;
  }
  asm volatile("bar.sync %0, 128;" ::"r"(1 + wg) : "memory");
}

DEVICE void finish_tile(float (&sum)[HALVES][64], const Tile& tile, int wg, uint32_t shared, uint32_t bars, uint32_t& parity, const Params& p) {
  const Items items = items_of(tile, p);
  const uint32_t staging = shared + STAGING + wg * HALVES * HALF_BYTES;
  int buffer = 0;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    uint32_t own[32];  // my partial, rounded. Always set: set under a condition, it would hold registers through the main loop
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      own[i] = to_bf16x2(sum[h][2 * i], sum[h][2 * i + 1]);
      sum[h][2 * i] = bf16_low(own[i]), sum[h][2 * i + 1] = bf16_high(own[i]);
    }
    for (int round = 0; round < items.rounds; ++round) {
      const uint32_t half = staging + buffer * HALF_BYTES;
      barrier_wait(OFFERED(wg, buffer), parity);
      if (items.reduces) {
        if (round == 0 && p.rank > 1) read_half<false>(sum[h], half);  // ranks 0 and 1: two addends have no order
        else read_half<true>(sum[h], half);
        if (round == p.rank - 1 && p.rank > 1) {
#pragma unroll
          for (int i = 0; i < 32; ++i) sum[h][2 * i] += bf16_low(own[i]), sum[h][2 * i + 1] += bf16_high(own[i]);
        }
      }
      if (round == items.rounds - 1) {
#if FP8_GATHER
        if (items.reduces) {
          float scale[2];
          quantise_half(scale, sum[h]);
          write_half(sum[h], half);
          copy_half_out(half, tile, wg, h, p);
          write_codes(scale, sum[h], half);
        } else {
          write_half(sum[h], half);
        }
#else
        write_half(sum[h], half);
#endif
      }
      give_back(wg, buffer, parity, bars);
    }
  }
}

DEVICE void consume(int wg, uint32_t shared, uint32_t bars, int cta, const Params& p) {
  const int num_steps = (p.k + 127) / 128, tiles = num_tiles(p);
  int stage = 0;
  uint32_t full_parity = 0, parity = 0;
  float sum[HALVES][64], product[64];
  int i = 0, t = number_of(0, bars);
  Tile tile = tile_at(min(t, tiles - 1), cta, p);
  ScaleSource from = scales_of(tile, wg, p);
  Scales even = {}, odd = {};
  load_scales(even, from, tile, p);
  auto multiply_next = [&](const Scales& scales, Scales& next, bool more) {
    barrier_wait(FULL(stage), full_parity);
    multiply_step(sum, product, shared + stage * STAGE_BYTES, EMPTY(stage), wg, scales, next, from, more, tile, p);
    if (++stage == STAGES) stage = 0, full_parity ^= 1;
  };
  while (t < tiles) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int j = 0; j < 64; ++j) sum[h][j] = 0.f;
    // Two steps a turn, each with scales of its own: with one set ptxas moves the loaded ones over before the next wgmma,
    // and so waits for the load in every step (1.17 times slower).
    for (int step = 0;;) {
      multiply_next(even, SCALES == MXFP8 ? even : odd, step + 1 < num_steps);
      if (++step == num_steps) break;
      multiply_next(SCALES == MXFP8 ? even : odd, even, step + 1 < num_steps);
      if (++step == num_steps) break;
    }
#if SCALES == PTPC
    scale_rows_and_columns(sum, scales_of(tile, wg, p), tile, p);
#endif
    const Tile done = tile;  // the scales of the next tile travel during the epilogue
    t = number_of(++i, bars);
    tile = tile_at(min(t, tiles - 1), cta, p);
    from = scales_of(tile, wg, p);
    load_scales(even, from, tile, p);
    finish_tile(sum, done, wg, shared, bars, parity, p);
  }
}

// --------------------------------------------------------------------------------------------- kernel
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    gemm_allreduce(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  const uint32_t shared = shared_address(dynamic_shared), bars = shared + BARRIERS;
  const int cta = cluster_rank(), thread = threadIdx.x;
  const int group = __shfl_sync(~0u, thread >> 7, 0);  // uniform, so that descriptors stay in uniform registers
  const unsigned epoch = p.toggles ? 1 : load_relaxed_gpu(p.step) + 1;
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(FULL(s), 1), barrier_init(EMPTY(s), 4);
    for (int i = 0; i < 4; ++i) barrier_init(OFFERED(i >> 1, i & 1), 1), barrier_init(TAKEN(i >> 1, i & 1), 4);
    for (int i = 0; i < NUMBERS; ++i) barrier_init(DRAWN(i), 1);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(TICKET), "r"(0) : "memory");
    barrier_init_fence();
  }
  cluster_sync();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (thread == 0) load_stages(shared, bars, cta, maps, p);
    else if (thread == 32 || thread == 64) run_courier(thread / 32 - 1, shared, bars, cta, epoch, maps, p);
    else if (thread >= 96 && p.world > 1) {
      if (FP8_GATHER && p.widens) widen(TICKET, epoch, p);
      else if (blockIdx.x == 0) await_gathered(epoch, p);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    consume(group - 1, shared, bars, cta, p);
    if (FP8_GATHER && p.widens && p.world > 1) widen(TICKET, epoch, p);
  }
  cluster_sync();
  if (thread == 0 && last_to_leave(p.exits, gridDim.x)) {
    store_relaxed_sys(p.tickets, 0);
    if (p.toggles)
      for (int i = 0; i < p.world * p.bands; ++i)
        if (i / p.bands != p.rank) store_relaxed_sys(p.gathered[i / p.bands] + i % p.bands, 0);
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p.step) : "memory");
  }
}
