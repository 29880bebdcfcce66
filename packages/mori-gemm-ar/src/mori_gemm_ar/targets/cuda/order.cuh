// Which tiles there are, in which order a rank computes them, and which cluster gets which.
#pragma once
#include "async.cuh"
#include "smem.cuh"

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
