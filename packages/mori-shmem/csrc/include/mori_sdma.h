/* SDMA packets of gfx94x/gfx950 (SDMA 4.4): encoding, decoding, execution, and the ring they travel in.
 *
 * A packet is a row of little-endian dwords. Dword 0 holds the opcode in bits 7:0 and a sub-opcode in bits 15:8.
 * Bits that the tables of packets.cpp do not name must be 0; a packet that breaks this is malformed, and so is one with
 * a wrong size, alignment or opcode. What is malformed is never executed, not even in part.
 *
 * To run a queue: look at its head with mori_sdma_ring_next, hand the dwords to mori_sdma_decode, the decoded packet to
 * mori_sdma_execute, and give the space back with mori_sdma_ring_retire. mori_sdma_ring_step does the four together.
 * Memory is reached only through the caller's `resolve`, so a packet cannot touch what the caller did not offer.
 *
 * All functions may be called from several threads; only one thread at a time may consume a ring.
 * Structures grow at their end only, and then MORI_SDMA_ABI_VERSION grows too.
 */
#ifndef MORI_SDMA_H
#define MORI_SDMA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MORI_SDMA_ABI_VERSION 1u
#define MORI_SDMA_API __attribute__((visibility("default")))

/* Opcodes. INDIRECT is known by name and refused. */
enum {
  MORI_SDMA_NOP = 0,
  MORI_SDMA_COPY = 1, /* COPY_LINEAR */
  MORI_SDMA_WRITE = 2, /* WRITE_LINEAR */
  MORI_SDMA_INDIRECT = 4,
  MORI_SDMA_FENCE = 5,
  MORI_SDMA_TRAP = 6,
  MORI_SDMA_POLL = 8, /* POLL_REGMEM, memory only */
  MORI_SDMA_ATOMIC = 10,
  MORI_SDMA_FILL = 11, /* CONST_FILL */
  MORI_SDMA_TIMESTAMP = 13
};

/* FILL element sizes, POLL comparisons and TIMESTAMP sub-opcodes, as encoded. */
enum { MORI_SDMA_FILL_BYTE = 0, MORI_SDMA_FILL_WORD = 1, MORI_SDMA_FILL_DWORD = 2 };
enum {
  MORI_SDMA_ALWAYS = 0,
  MORI_SDMA_LESS = 1,
  MORI_SDMA_LESS_EQUAL = 2,
  MORI_SDMA_EQUAL = 3,
  MORI_SDMA_NOT_EQUAL = 4,
  MORI_SDMA_GREATER_EQUAL = 5,
  MORI_SDMA_GREATER = 6
};
enum { MORI_SDMA_TIMESTAMP_SET = 0, MORI_SDMA_TIMESTAMP_GET = 1, MORI_SDMA_TIMESTAMP_GET_GLOBAL = 2 };

/* ATOMIC operations on 64-bit words; minus MORI_SDMA_ATOMIC_32 they act on 32-bit words. Values are the texture-cache
 * opcodes. SUB is memory - operand; INC and DEC wrap at the operand; the S forms compare as signed numbers. */
enum {
  MORI_SDMA_ATOMIC_SWAP = 0x27,
  MORI_SDMA_ATOMIC_CMPSWAP = 0x28,
  MORI_SDMA_ATOMIC_ADD = 0x2f,
  MORI_SDMA_ATOMIC_SUB = 0x30,
  MORI_SDMA_ATOMIC_SMIN = 0x31,
  MORI_SDMA_ATOMIC_UMIN = 0x32,
  MORI_SDMA_ATOMIC_SMAX = 0x33,
  MORI_SDMA_ATOMIC_UMAX = 0x34,
  MORI_SDMA_ATOMIC_AND = 0x35,
  MORI_SDMA_ATOMIC_OR = 0x36,
  MORI_SDMA_ATOMIC_XOR = 0x37,
  MORI_SDMA_ATOMIC_INC = 0x38,
  MORI_SDMA_ATOMIC_DEC = 0x39,
  MORI_SDMA_ATOMIC_32 = 0x20
};

/* Flags for encode, decode, step and max_copy. */
enum { MORI_SDMA_COPY_22BIT = 1 /* refuse COPY sizes above 2^22, as engines before SDMA 4.4 would truncate them */ };

/* Why a packet or a ring is refused. MORI_SDMA_OK is 0. */
typedef enum {
  MORI_SDMA_OK = 0,
  MORI_SDMA_UNKNOWN_OP, /* no such opcode or sub-opcode */
  MORI_SDMA_UNSUPPORTED, /* a known packet or mode that is not executed here */
  MORI_SDMA_MUST_BE_ZERO, /* a bit is set that has no meaning, or one that must stay 0 */
  MORI_SDMA_TRUNCATED, /* the packet reaches past the published dwords or the ring's end */
  MORI_SDMA_BAD_SIZE, /* a size that cannot be encoded or is not a whole number of elements */
  MORI_SDMA_BAD_FIELD, /* a comparison, operation or element size that does not exist */
  MORI_SDMA_MISALIGNED, /* an address that is not a multiple of the access size */
  MORI_SDMA_OUT_OF_RANGE, /* resolve refused the address range */
  MORI_SDMA_BAD_POINTER, /* a ring pointer that is not a multiple of 4, runs backwards, or leaves no byte of the ring free */
  MORI_SDMA_NO_ROOM /* encode: the packet does not fit the space given */
} mori_sdma_reason;

/* A decoded packet. Fields that a packet lacks are 0. */
typedef struct {
  uint32_t op;
  uint32_t sub_op;
  uint32_t num_dwords; /* set by decode; encode computes it */
  uint32_t func; /* POLL comparison, ATOMIC operation, FILL element size, NOP: dwords to skip */
  uint64_t dst; /* the address written; POLL: the address read */
  uint64_t src; /* COPY */
  uint64_t nbytes; /* COPY, WRITE, FILL; else the bytes accessed at dst */
  uint64_t value; /* FENCE and WRITE-like data: FENCE, ATOMIC operand, POLL reference, FILL pattern, TRAP context */
  uint64_t compare; /* ATOMIC CMPSWAP: expected value; POLL: mask */
  uint32_t interval; /* POLL: carried, not obeyed */
  uint32_t retry; /* POLL: 0xfff, for ever */
  const uint32_t* data; /* WRITE payload; points into the decoded dwords */
} mori_sdma_packet;

typedef struct {
  uint32_t reason; /* mori_sdma_reason */
  uint32_t num_dwords; /* valid entries of dwords */
  uint64_t address, nbytes; /* the refused access; 0 where the packet itself is malformed */
  uint32_t dwords[16]; /* the packet, cut off at 16 */
} mori_sdma_fault;

enum { MORI_SDMA_READ = 1, MORI_SDMA_READWRITE = 2, MORI_SDMA_OVERWRITE = 3 };

/* What a packet may reach. resolve must be given; the rest may be null. */
typedef struct {
  void* user;
  /* A pointer to [address, address + nbytes) for this access, or null. nbytes is never 0. */
  void* (*resolve)(void* user, uint64_t address, uint64_t nbytes, uint32_t access);
  /* After a packet has written: address, bytes, opcode. */
  void (*written)(void* user, uint64_t address, uint64_t nbytes, uint32_t op);
  uint64_t (*now)(void* user); /* TIMESTAMP; without it CLOCK_MONOTONIC in ns */
  void (*trap)(void* user, uint32_t context);
} mori_sdma_memory;

enum { MORI_SDMA_DONE = 0, MORI_SDMA_BLOCKED = 1 /* a POLL does not hold yet */, MORI_SDMA_FAULT = 2, MORI_SDMA_EMPTY = 3 };

MORI_SDMA_API uint32_t mori_sdma_abi_version(void);
MORI_SDMA_API const char* mori_sdma_reason_name(uint32_t reason); /* "out_of_range" and so on */
MORI_SDMA_API const char* mori_sdma_op_name(uint32_t op, uint32_t sub_op);
MORI_SDMA_API uint64_t mori_sdma_max_copy(uint32_t flags); /* what senders put into one COPY at most */

/* Write the packet to out, of room_dwords; *num_dwords is what it took. Nothing is written unless MORI_SDMA_OK. */
MORI_SDMA_API mori_sdma_reason mori_sdma_encode(const mori_sdma_packet* packet, uint32_t flags, uint32_t* out,
                                                uint32_t room_dwords, uint32_t* num_dwords);
/* Read the packet at dwords, of which `available` may be looked at. */
MORI_SDMA_API mori_sdma_reason mori_sdma_decode(const uint32_t* dwords, uint64_t available, uint32_t flags,
                                                mori_sdma_packet* packet);
/* Execute one decoded packet: DONE, BLOCKED (nothing changed; try again) or FAULT (*fault is filled, except dwords). */
MORI_SDMA_API int mori_sdma_execute(const mori_sdma_packet* packet, const mori_sdma_memory* memory,
                                    mori_sdma_fault* fault);

/* A ring. The first seven words are the handle that device code is given: pointers to the 64-bit queue words, all of
 * them monotonic byte offsets (never wrapped; position = offset % nbytes), and the producer's last look at rptr. */
typedef struct {
  uint32_t* base; /* 256-byte aligned */
  uint64_t* rptr; /* consumed so far */
  uint64_t* wptr; /* published so far */
  uint64_t* doorbell; /* written last with the new wptr; what the consumer looks at */
  uint64_t* reserved; /* producers: handed out so far */
  uint64_t* committed; /* producers: published in order so far */
  uint64_t seen_rptr;
  uint64_t nbytes; /* a power of two, 256 or more */
} mori_sdma_ring;

/* Producer side. reserve: 1 and [*begin, *end) with nbytes of unbroken space at *start (padding before it, made of NOPs,
 * is written), 0 and nothing changed if the ring is full now, -1 if nbytes is 0, no multiple of 4, or more than half the ring. */
MORI_SDMA_API int mori_sdma_ring_reserve(mori_sdma_ring* ring, uint64_t nbytes, uint64_t* begin, uint64_t* start,
                                         uint64_t* end);
MORI_SDMA_API uint32_t* mori_sdma_ring_at(const mori_sdma_ring* ring, uint64_t offset);
/* Publish [begin, end) once everything reserved before it is published (waits for those threads). */
MORI_SDMA_API void mori_sdma_ring_commit(mori_sdma_ring* ring, uint64_t begin, uint64_t end);

/* Consumer side. next: OK with *available unbroken dwords at *dwords (0: empty), or BAD_POINTER. */
MORI_SDMA_API mori_sdma_reason mori_sdma_ring_next(const mori_sdma_ring* ring, const uint32_t** dwords,
                                                   uint64_t* available);
MORI_SDMA_API void mori_sdma_ring_retire(mori_sdma_ring* ring, uint64_t num_dwords);
/* Execute the packet at the head: DONE and retired, BLOCKED, FAULT (*fault with dwords; not retired) or EMPTY. */
MORI_SDMA_API int mori_sdma_ring_step(mori_sdma_ring* ring, uint32_t flags, const mori_sdma_memory* memory,
                                      mori_sdma_fault* fault);
/* Fill fault->dwords from the packet at dwords. */
MORI_SDMA_API void mori_sdma_fault_dwords(mori_sdma_fault* fault, const uint32_t* dwords, uint64_t available);

#ifdef __cplusplus
}
#endif
#endif
