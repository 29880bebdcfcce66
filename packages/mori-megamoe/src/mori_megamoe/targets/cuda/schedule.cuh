// Which item a cluster computes next, and whether its rows are there.
//
//   NEVER    item i of a cluster is number cluster + i * clusters of the list: loader and consumers read it themselves.
//   SIGNALS  items are drawn in the order of the list. The loader waits until, for each source with rows in the tile,
//            arrived[expert][source] has reached due[expert][source].
//   QUEUE    what is drawn is a place in the ready queue: place t / pairs, pair t % pairs. One warp of the grid
//            (publish_ready_tiles) looks at the tiles in order, 32 at a time, and writes each to the end of the queue when its
//            sources' rows have come; loaders wait for their place to be filled.
//
// Drawing. The first CTA's loader draws (one atomic on Tiles::counts[TICKETS]) and sends the ticket to both CTAs: DRAWN,
//   TICKET. Each loader then finds the item by itself, acquires what the item waits for (the acquire has to be its own: its
//   tensor loads follow it), and tells the item to its CTA's consumers: KNOWN, ITEM. Nobody frees a slot of these rings: a
//   loader is at most STAGES K blocks ahead of the consumers of both CTAs, so at most STAGES / 2 + 2 items are under way.
// Late. A wait whose deadline passes writes the fault record and goes on with whatever is there (rows of an earlier call, tile
//   0): both CTAs of a cluster still run the same number of steps, the kernel ends, and the host raises.
#pragma once
#include "tile.cuh"

#define NO_ITEM 0xffffffffu

DEVICE unsigned num_items(const Gemm1Params& p) { return __ldg(p.tiles.counts + NUM_ITEMS); }

// ---- tickets: lane 0 of both loaders
DEVICE unsigned draw(const Gemm1Params& p) { return atomicAdd(p.tiles.counts + TICKETS, 1u); }
DEVICE void send_ticket(int i, unsigned ticket, uint32_t shared, int cta) {
  const int slot = i % RING;
  barrier_arrive_expect(DRAWN(slot), 4);
  if (cta == 0)
    for (int to = 0; to < 2; ++to) store_async_cluster(TICKET(slot), ticket, DRAWN(slot), to);
}
DEVICE unsigned ticket_of(int i, uint32_t shared) {
  barrier_wait(DRAWN(i % RING), i / RING & 1);
  return load_shared_word(TICKET(i % RING));
}
DEVICE void tell_item(int i, unsigned item, uint32_t shared) {
  store_shared_word(ITEM(i % RING), item);
  barrier_arrive(KNOWN(i % RING));
}

// ---- arrivals: all lanes of a warp
DEVICE bool rows_have_come(int tile, int source, const Gemm1Params& p) {
  const int at = p.tiles.expert[tile] * p.arrivals.world + source;
  return has_come(p.arrivals.arrived + at, p.arrivals.due[at]);
}
DEVICE void await_rows(int tile, int lane, const Gemm1Params& p) {
  const Arrivals& a = p.arrivals;
  if (lane < a.world && p.tiles.sources[tile] >> lane & 1) {
    const int expert = p.tiles.expert[tile], at = expert * a.world + lane;
    wait_flag(a.arrived + at, a.due[at], a.fault, a.timeout_ns, a.rank, lane, WAIT_ROWS, expert);
  }
  __syncwarp();
}
DEVICE unsigned await_ready(unsigned ticket, const Gemm1Params& p) {
  const Arrivals& a = p.arrivals;
  const unsigned place = p.pairs_inverse ? __umulhi(ticket, p.pairs_inverse) : ticket;
  const uint64_t wanted = (uint64_t)p.tiles.counts[EPOCH] << 32;
  const Limits limits = {a.fault, 2 * a.timeout_ns, (uint32_t)a.rank};  // the publishing warp gives up first: it knows who is late
  const bool came = wait_word<DEVICE_SCOPE>(a.ready + place, wanted, limits, a.rank, WAIT_TILE, place);
  const unsigned tile = came ? (unsigned)load_word<DEVICE_SCOPE>(a.ready + place) : 0;
  return tile | (ticket - place * p.pairs) << 20;
}
DEVICE void publish_ready_tiles(int lane, const Gemm1Params& p) {
  const Arrivals& a = p.arrivals;
  const int num_tiles = p.tiles.counts[NUM_TILES];
  int first = 0, tail = 0;                    // `first` is the first tile that is not in the queue; tail tiles are
  unsigned published = 0;                     // bit i: tile first + i is
  unsigned since = (unsigned)(now_ns() >> 10);  // when a tile was last found ready, in units of 1024 ns: registers are short
  unsigned idle = 0;  // looks that found nothing
  bool late = false;
  while (first < num_tiles) {
    const int tile = first + lane;
    bool ready = tile < num_tiles && !(published >> lane & 1);
    if (ready && !late)
      for (unsigned sources = p.tiles.sources[tile]; sources && ready; sources &= sources - 1) ready = rows_have_come(tile, __ffs(sources) - 1, p);
    const unsigned now = __ballot_sync(~0u, ready);
    if (ready) set_word<DEVICE_SCOPE>(a.ready + tail + __popc(now & ((1u << lane) - 1)), (uint64_t)p.tiles.counts[EPOCH] << 32 | (unsigned)tile);
    tail += __popc(now), published |= now;
    const int done = published == ~0u ? 32 : __ffs(~published) - 1;
    first += done, published = done == 32 ? 0 : published >> done;
    if (now) {
      since = (unsigned)(now_ns() >> 10);
    } else if ((++idle & 63) == 0) {  // seldom: the record lies in host memory
      const bool over = (unsigned)(now_ns() >> 10) - since > (unsigned)(a.timeout_ns >> 10);
      late = __any_sync(~0u, over || load_relaxed_gpu(&a.fault->code) != 0);
    }
    if (late && first < num_tiles && lane < a.world && p.tiles.sources[first] >> lane & 1 && !rows_have_come(first, lane, p)) {
      const int at = p.tiles.expert[first] * a.world + lane;
      write_fault(a.fault, a.rank, lane, WAIT_ROWS, p.tiles.expert[first], load_acquire_sys(a.arrived + at), a.due[at]);
    }
    __syncwarp();
  }
}

// ---- items, as the consumers see them
DEVICE unsigned item_of(int i, unsigned count, uint32_t shared, const Gemm1Params& p) {
#if WAIT == NEVER
  const unsigned number = (blockIdx.x >> 1) + i * (gridDim.x >> 1);
  return number < count ? __ldg(p.tiles.items + number) : NO_ITEM;
#else
  barrier_wait(KNOWN(i % RING), i / RING & 1);
  return load_shared_word(ITEM(i % RING));
#endif
}
