// How the ranks of a call meet. Every word here has one writer and only grows, or carries the number of its call.
//
// Epoch. An op counts its calls in device memory, dispatches and combines apart: a block reads e = epoch + 1, draws a
//   ticket once all its threads have, and the last block of the grid stores e. Nothing of it is counted by the host, so
//   a captured graph can be replayed any number of times between eager calls.
// Packets. 16 bytes: 12 of data and e, stored and loaded by one b128 access, which arrives whole; so a packet needs
//   neither flag nor fence. Packet memory is written by packets only and starts as zero; e starts at 1 and wraps after
//   2^32 calls. It exists twice, by parity of e.
// Header. Each dispatch, also one of 0 tokens, sends a header of packets to every rank and waits for one of every rank:
//   tokens, flags, how many rows go to each rank, and (if the rows come as packets) one bit a token. All ranks then
//   derive the same row numbers: rows of a rank are ordered by (source rank, token).
//   A rank that starts e + 2 knows that all ranks have finished e, and what their streams ran before e + 1.
// Deadline. A wait that runs out of time leaves a fault record (signal.cuh), and sets `gave_up` of its direction: every
//   wait of this rank returns from then on, the kernels end, and the host raises. Masked ranks (a bit of Common::alive
//   is 0) are neither sent to nor waited for: masks.py.
#pragma once
#include "params.cuh"

// Words of Common::state
#define EPOCH 0
#define TICKET 1
#define BARRIER 2                         // blocks that have come to grid_meet; 0 between calls
#define STAGED 3
#define LEFT 4
#define GAVE_UP 5
#define TOKENS_SENT 8                     // [MAX_RANKS] as rows to each rank, so far: what `done` there will reach

// Flags in a header
#define ROWS_AS_PACKETS 1u
#define COMBINE_BY_PACKETS 2u
#define CALL_DIGEST 0xffffff00u           // of the shape of the call, which has to be the same on all ranks

// What a rank brings to a combine, told in the low half of `entered` and `ready`: signs.py
#define SIGN_WEIGHTS (1u << 31)
#define SIGN_NO_WEIGHTS (1u << 30)        // although it has rows
#define SIGN_ROWS (SIGN_NO_WEIGHTS - 1)

// Words of `meta`: rows of source s are those from word META_FIRST + s up to the next; bit s of META_PACKETS: s wants its
// rows back as packets; my rows at rank r begin at word META_MINE + r and are word META_SENT + r many
#define META_FIRST 0
#define META_PACKETS 15
#define META_MINE 16
#define META_SENT 24

// What a wait was for; targets/cuda/faults.py has the words
#define WAIT_HEADER 0xE0001
#define WAIT_ROWS 0xE0002
#define WAIT_PACKETS 0xE0003
#define WAIT_GRID 0xE0004
#define WAIT_ENTERED 0xE0005
#define WAIT_READY 0xE0006
#define WAIT_FINISHED 0xE0007
#define WAIT_SUMMANDS 0xE0008
#define OVERFLOW 0xE0009
#define DIFFERENT_CALL 0xE000A
#define TOO_FEW_ROWS 0xE000B
#define DIFFERENT_COMBINE 0xE000C

DEVICE unsigned load_relaxed_sys(const unsigned* p) {
  unsigned v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// A load whose result is needed later: issued here, wherever the compiler would like it to be.
DEVICE unsigned load_early(const void* p) {
  unsigned v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE uint64_t load_acquire_sys_64(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release_sys_64(uint64_t* p, uint64_t v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void store_relaxed_sys_64(uint64_t* p, uint64_t v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void add_release_sys(unsigned* p, unsigned v) { asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// ---- deadlines ----

DEVICE void write_fault(const Common& c, unsigned peer, unsigned what, unsigned index, unsigned seen, unsigned wanted) {
  if (atomicCAS(&c.fault->code, 0u, 0x80000000u) != 0u) return;
  Fault* f = c.fault;
  f->rank = c.rank, f->peer = peer, f->what = what, f->index = index, f->seen = seen, f->wanted = wanted, f->block = blockIdx.x;
  store_release_sys(&f->code, 1);
}

struct Patience {  // of one wait
  unsigned looks = 0;
  uint64_t start = 0;

  // After each look that found nothing. True: give up. Looks come without a pause at first: a pause is time lost.
  DEVICE bool is_over(const Common& c, unsigned peer, unsigned what, unsigned index, unsigned seen, unsigned wanted) {
    if (++looks < 512) return false;
    __nanosleep(50);
    if (looks & 63) return false;
    if (*(volatile unsigned*)(c.state + GAVE_UP)) return true;
    if (!start) start = now_ns();
    if (now_ns() - start < c.timeout_ns) return false;
    write_fault(c, peer, what, index, seen, wanted);
    *(volatile unsigned*)(c.state + GAVE_UP) = 1;
    return true;
  }
  // After that: time to look for a reason why it never comes.
  DEVICE bool is_long() const { return looks >= 512 && !(looks & 63); }
};

// One thread. Returns when the flag has come (what was stored before it is then visible), or late.
DEVICE void wait_reached(const Common& c, const unsigned* flag, unsigned wanted, unsigned peer, unsigned what) {
  Patience patience;
  for (unsigned seen; (int)((seen = load_acquire_sys(flag)) - wanted) < 0;)
    if (patience.is_over(c, peer, what, 0, seen, wanted)) return;
}

// One thread. The same for a word that holds the number of a call in its high half; returns the word.
DEVICE uint64_t wait_called(const Common& c, const uint64_t* word, unsigned e, unsigned peer, unsigned what) {
  Patience patience;
  uint64_t seen;
  while ((int)((unsigned)((seen = load_acquire_sys_64(word)) >> 32) - e) < 0)
    if (patience.is_over(c, peer, what, 0, (unsigned)(seen >> 32), e)) break;
  return seen;
}

// ---- epochs ----

DEVICE unsigned this_call(const Common& c) { return load_relaxed_sys(c.state + EPOCH) + 1; }

// All threads of each block, once its block has read the epoch and left grid_meet: the last block advances the epoch.
DEVICE void leave_call(const Common& c, unsigned e) {
  if (threadIdx.x != 0) return;
  if (atomicInc(c.state + TICKET, gridDim.x - 1) != gridDim.x - 1) return;
  *(volatile unsigned*)(c.state + BARRIER) = 0;
  *(volatile unsigned*)(c.state + EPOCH) = e;
}

// All threads of all blocks, which must be resident together; once a call. What any block stored before is visible to
// all after.
DEVICE void grid_meet(const Common& c) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned* here = c.state + BARRIER;
    unsigned seen;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(seen) : "l"(here) : "memory");
    Patience patience;
    for (++seen; seen < gridDim.x;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(here) : "memory");
      if (seen < gridDim.x && patience.is_over(c, c.rank, WAIT_GRID, 0, seen, gridDim.x)) break;
    }
  }
  __syncthreads();
}

// ---- packets ----

struct Packet {
  unsigned x, y, z, tag;
};

DEVICE void store_packet(char* at, unsigned x, unsigned y, unsigned z, unsigned tag) {
  const uint64_t low = (uint64_t)y << 32 | x, high = (uint64_t)tag << 32 | z;
  asm volatile("{\n.reg .b128 q;\nmov.b128 q, {%1, %2};\nst.relaxed.sys.global.b128 [%0], q;\n}" ::"l"(at), "l"(low), "l"(high) : "memory");
}
DEVICE Packet load_packet(const char* at) {
  uint64_t low, high;
  asm volatile("{\n.reg .b128 q;\nld.relaxed.sys.global.b128 q, [%2];\nmov.b128 {%0, %1}, q;\n}" : "=l"(low), "=l"(high) : "l"(at) : "memory");
  return {(unsigned)low, (unsigned)(low >> 32), (unsigned)high, (unsigned)(high >> 32)};
}

// A row travels in groups of three units (48 bytes), four packets each: 96 units of a warp become 2048 bytes, of which
// lane l carries the units l, l + 32 and l + 64. So loads, remote stores and polls of a warp are contiguous. (A lane's
// packets side by side cost a factor of 2 to 3.)
struct Group {
  uint4 a, b, c;
};
DEVICE int groups_of(int units) { return (units + 95) / 96 * 32; }
DEVICE int slot_bytes(int units) { return (units + 95) / 96 * 2048; }
DEVICE int group_unit(int g) { return (g >> 5) * 96 + (g & 31); }
DEVICE int group_size(int g, int units) {
  const int u = group_unit(g);
  return (u < units) + (u + 32 < units) + (u + 64 < units);
}
DEVICE char* group_at(char* slot, int g) { return slot + (g >> 5) * 2048 + (g & 31) * 16; }

DEVICE void send_group(char* slot, int g, int size, const Group& v, unsigned e) {
  char* q = group_at(slot, g);
  store_packet(q, v.a.x, v.a.y, v.a.z, e);
  store_packet(q + 512, v.a.w, v.b.x, v.b.y, e);
  if (size > 1) store_packet(q + 1024, v.b.z, v.b.w, v.c.x, e);
  if (size > 2) store_packet(q + 1536, v.c.y, v.c.z, v.c.w, e);
}

// hopeless()  asked now and then in a long wait: whether they will not come
template <typename Hopeless>
DEVICE Group wait_group(const Common& c, char* slot, int g, int size, unsigned e, unsigned peer, unsigned what, unsigned token, Hopeless hopeless) {
  const char* q = group_at(slot, g);
  Packet p0, p1, p2 = {0, 0, 0, e}, p3 = p2;
  Patience patience;
  for (;;) {
    p0 = load_packet(q), p1 = load_packet(q + 512);
    if (size > 1) p2 = load_packet(q + 1024);
    if (size > 2) p3 = load_packet(q + 1536);
    if (p0.tag == e && p1.tag == e && p2.tag == e && p3.tag == e) break;
    if (patience.is_over(c, peer, what, token, p0.tag, e) || (patience.is_long() && hopeless())) break;
  }
  return {make_uint4(p0.x, p0.y, p0.z, p1.x), make_uint4(p1.y, p1.z, p2.x, p2.y), make_uint4(p2.z, p3.x, p3.y, p3.z)};
}
