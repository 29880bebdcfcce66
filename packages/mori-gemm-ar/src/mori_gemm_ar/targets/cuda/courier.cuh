// Warps 1 and 2, one thread each: the courier of a consumer warpgroup. It brings inbox tiles into staging, stores what the
// consumer has left there, and counts; the last to count a band signals its flag.
#pragma once
#include "order.cuh"
#include "signal.cuh"

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

DEVICE void run_courier(int wg, uint32_t shared, uint32_t bars, int cta, unsigned epoch, const Maps& maps, const Params& p) {
  const int tiles = num_tiles(p);
  uint32_t parity = 0;
  Owed owed = {0, 0, 0};
  for (int i_tile = 0;; ++i_tile) {
    const int t = number_of(i_tile, bars);
    if (t >= tiles) break;
    const Tile tile = tile_at(t, cta, p);
    const Items items = items_of(tile, p);
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
    // A buffer is offered as soon as the previous tile's store has read it: the link must not run dry between tiles.
    stores_wait_read();
    for (int i = 0; i < HALVES; ++i) offer_item(i, wg, items, tile, shared, bars, p);
    if (owed.total && !barrier_test(TAKEN(wg, 0), parity)) {  // the consumer still multiplies: settle now
      stores_wait();
      settle(owed, epoch, p);
    }
    for (int i = 0; i < items.total; ++i) {
      const int buffer = i % HALVES;
      barrier_wait(TAKEN(wg, buffer), parity);
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
    if (p.world > 1) owed.total = parts_of_band(tile.owner, tile.band, p), owed.owner = tile.owner, owed.band = tile.band;
  }
  stores_wait();
  settle(owed, epoch, p);
}
