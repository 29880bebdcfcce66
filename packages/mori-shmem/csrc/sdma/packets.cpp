// The one place that knows how SDMA 4.4 packets are laid out.
//
// Each packet has a row in `layouts`: how many dwords it takes before any payload, and which bits of them carry
// something. decode() refuses every other bit, so what it accepts encodes back to the same dwords. COPY leaves out the
// swap and high-availability bits of dword 2 on purpose: they must stay 0 on these engines.
//
// Sizes are stored less one: COPY as bytes - 1, WRITE as dwords - 1, NOP as dwords to skip. A FILL of dwords is stored by
// some senders as bytes - 1 and by others as bytes - 4; both are read as the same number of bytes.
#include <mori_sdma.h>

namespace {

constexpr uint32_t kCopyBytesLog2 = 30;
constexpr uint32_t kOldCopyBytesLog2 = 22;
constexpr uint32_t kMaxFillBytes = 1u << 22;
constexpr uint32_t kMaxWriteDwords = 1u << 20;
constexpr uint32_t kForever = 0xfff;

struct Layout {
  uint32_t op;
  const char* name;
  uint32_t num_dwords;
  uint32_t used[8];
};

constexpr uint32_t kAll = 0xffffffffu;
constexpr Layout layouts[] = {
    {MORI_SDMA_NOP, "NOP", 1, {0x3fff00ff}},
    {MORI_SDMA_COPY, "COPY_LINEAR", 7, {0x000000ff, 0x3fffffff, 0, kAll, kAll, kAll, kAll}},
    {MORI_SDMA_WRITE, "WRITE_LINEAR", 4, {0x000000ff, kAll, kAll, 0x000fffff}},
    {MORI_SDMA_FENCE, "FENCE", 4, {0x000000ff, kAll, kAll, kAll}},
    {MORI_SDMA_TRAP, "TRAP", 2, {0x000000ff, 0x0fffffff}},
    {MORI_SDMA_POLL, "POLL_REGMEM", 6, {0xf00000ff, kAll, kAll, kAll, kAll, 0x0fffffff}},
    {MORI_SDMA_ATOMIC, "ATOMIC", 8, {0xfe0000ff, kAll, kAll, kAll, kAll, kAll, kAll, 0}},
    {MORI_SDMA_FILL, "CONST_FILL", 5, {0xc00000ff, kAll, kAll, kAll, 0x003fffff}},
    {MORI_SDMA_TIMESTAMP, "TIMESTAMP", 3, {0x0000ffff, kAll, kAll}},
};

// Known by name, so that a report can say what arrived; none of them is executed.
constexpr struct {
  uint32_t op;
  const char* name;
} refused[] = {{MORI_SDMA_INDIRECT, "INDIRECT"}, {7, "SEM"},         {9, "COND_EXE"}, {12, "PTEPDE"},
               {14, "SRBM_WRITE"},               {15, "PRE_EXE"},    {16, "DUMMY_TRAP"}};

const Layout* layout_of(uint32_t op) {
  for (const Layout& layout : layouts)
    if (layout.op == op) return &layout;
  return nullptr;
}

const char* refused_name(uint32_t op) {
  for (const auto& entry : refused)
    if (entry.op == op) return entry.name;
  return nullptr;
}

uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }
uint32_t high(uint64_t value) { return static_cast<uint32_t>(value >> 32); }
uint64_t join(const uint32_t* dwords) { return dwords[0] | static_cast<uint64_t>(dwords[1]) << 32; }

bool is_atomic(uint32_t operation) {
  const uint32_t wide = operation | MORI_SDMA_ATOMIC_32;
  return wide == MORI_SDMA_ATOMIC_SWAP || wide == MORI_SDMA_ATOMIC_CMPSWAP ||
         (wide >= MORI_SDMA_ATOMIC_ADD && wide <= MORI_SDMA_ATOMIC_DEC);
}

uint32_t fill_element(const mori_sdma_packet& packet) { return 1u << packet.func; }

// What encode and decode both insist on, so that neither can make what the other refuses.
mori_sdma_reason check(const mori_sdma_packet& p, uint32_t flags) {
  const uint32_t copy_log2 = flags & MORI_SDMA_COPY_22BIT ? kOldCopyBytesLog2 : kCopyBytesLog2;
  if (p.op != MORI_SDMA_TIMESTAMP && p.sub_op != 0) return MORI_SDMA_UNKNOWN_OP;
  switch (p.op) {
    case MORI_SDMA_NOP:
      return p.func > 0x3fff ? MORI_SDMA_BAD_SIZE : MORI_SDMA_OK;
    case MORI_SDMA_COPY:
      return p.nbytes == 0 || p.nbytes > 1ull << copy_log2 ? MORI_SDMA_BAD_SIZE : MORI_SDMA_OK;
    case MORI_SDMA_WRITE:
      if (!p.data) return MORI_SDMA_BAD_FIELD;
      if (p.nbytes == 0 || p.nbytes % 4 || p.nbytes / 4 > kMaxWriteDwords) return MORI_SDMA_BAD_SIZE;
      return p.dst % 4 ? MORI_SDMA_MISALIGNED : MORI_SDMA_OK;
    case MORI_SDMA_FENCE:
      if (p.value > UINT32_MAX) return MORI_SDMA_BAD_FIELD;
      return p.dst % 4 ? MORI_SDMA_MISALIGNED : MORI_SDMA_OK;
    case MORI_SDMA_TRAP:
      return p.value > 0x0fffffff ? MORI_SDMA_BAD_FIELD : MORI_SDMA_OK;
    case MORI_SDMA_POLL:
      if (p.func > MORI_SDMA_GREATER || p.value > UINT32_MAX || p.compare > UINT32_MAX || p.interval > 0xffff)
        return MORI_SDMA_BAD_FIELD;
      if (p.retry != kForever) return MORI_SDMA_UNSUPPORTED;
      return p.dst % 4 ? MORI_SDMA_MISALIGNED : MORI_SDMA_OK;
    case MORI_SDMA_ATOMIC:
      if (!is_atomic(p.func)) return MORI_SDMA_BAD_FIELD;
      return p.dst % (p.func & MORI_SDMA_ATOMIC_32 ? 8 : 4) ? MORI_SDMA_MISALIGNED : MORI_SDMA_OK;
    case MORI_SDMA_FILL:
      if (p.func > MORI_SDMA_FILL_DWORD) return MORI_SDMA_BAD_FIELD;
      if (p.nbytes == 0 || p.nbytes % fill_element(p) || p.nbytes > kMaxFillBytes) return MORI_SDMA_BAD_SIZE;
      if (p.value > UINT32_MAX) return MORI_SDMA_BAD_FIELD;
      return p.dst % fill_element(p) ? MORI_SDMA_MISALIGNED : MORI_SDMA_OK;
    case MORI_SDMA_TIMESTAMP:
      if (p.sub_op == MORI_SDMA_TIMESTAMP_SET) return MORI_SDMA_UNSUPPORTED;
      return p.sub_op > MORI_SDMA_TIMESTAMP_GET_GLOBAL ? MORI_SDMA_UNKNOWN_OP : MORI_SDMA_OK;
  }
  return refused_name(p.op) ? MORI_SDMA_UNSUPPORTED : MORI_SDMA_UNKNOWN_OP;
}

void write_fields(const mori_sdma_packet& p, uint32_t* out) {
  out[0] = p.op | p.sub_op << 8;
  switch (p.op) {
    case MORI_SDMA_NOP:
      out[0] |= p.func << 16;
      for (uint32_t i = 1; i <= p.func; ++i) out[i] = 0;
      return;
    case MORI_SDMA_COPY:
      out[1] = low(p.nbytes - 1);
      out[2] = 0;
      out[3] = low(p.src), out[4] = high(p.src);
      out[5] = low(p.dst), out[6] = high(p.dst);
      return;
    case MORI_SDMA_TRAP:
      out[1] = low(p.value);
      return;
    default:
      out[1] = low(p.dst), out[2] = high(p.dst);
  }
  switch (p.op) {
    case MORI_SDMA_WRITE:
      out[3] = low(p.nbytes / 4 - 1);
      for (uint64_t i = 0; i < p.nbytes / 4; ++i) out[4 + i] = p.data[i];
      return;
    case MORI_SDMA_FENCE:
      out[3] = low(p.value);
      return;
    case MORI_SDMA_POLL:
      out[0] |= p.func << 28 | 1u << 31;
      out[3] = low(p.value), out[4] = low(p.compare);
      out[5] = p.interval | p.retry << 16;
      return;
    case MORI_SDMA_ATOMIC:
      out[0] |= p.func << 25;
      out[3] = low(p.value), out[4] = high(p.value);
      out[5] = low(p.compare), out[6] = high(p.compare);
      out[7] = 0;
      return;
    case MORI_SDMA_FILL:
      out[0] |= p.func << 30;
      out[3] = low(p.value);
      out[4] = low(p.nbytes - 1);
      return;
  }
}

void read_fields(const uint32_t* in, mori_sdma_packet& p) {
  if (p.op != MORI_SDMA_NOP && p.op != MORI_SDMA_COPY && p.op != MORI_SDMA_TRAP) p.dst = join(in + 1);
  switch (p.op) {
    case MORI_SDMA_NOP:
      p.func = in[0] >> 16;
      p.num_dwords += p.func;
      return;
    case MORI_SDMA_COPY:
      p.nbytes = 1ull + in[1];
      p.src = join(in + 3);
      p.dst = join(in + 5);
      return;
    case MORI_SDMA_WRITE:
      p.nbytes = 4 * (1ull + in[3]);
      p.num_dwords += 1 + in[3];
      p.data = in + 4;
      return;
    case MORI_SDMA_FENCE:
      p.value = in[3];
      p.nbytes = 4;
      return;
    case MORI_SDMA_TRAP:
      p.value = in[1];
      return;
    case MORI_SDMA_POLL:
      p.func = in[0] >> 28 & 7;
      p.value = in[3];
      p.compare = in[4];
      p.interval = in[5] & 0xffff;
      p.retry = in[5] >> 16;
      p.nbytes = 4;
      return;
    case MORI_SDMA_ATOMIC:
      p.func = in[0] >> 25;
      p.value = join(in + 3);
      p.compare = join(in + 5);
      p.nbytes = p.func & MORI_SDMA_ATOMIC_32 ? 8 : 4;
      return;
    case MORI_SDMA_FILL:
      p.func = in[0] >> 30;
      p.value = in[3];
      // The low bits of the count only say which sender wrote it: n elements may come as n * size - 1 or (n - 1) * size.
      p.nbytes = p.func > MORI_SDMA_FILL_DWORD ? 0 : (in[4] & ~(fill_element(p) - 1)) + fill_element(p);
      return;
    case MORI_SDMA_TIMESTAMP:
      p.dst &= ~7ull;  // the engine ignores the low bits
      p.nbytes = 8;
      return;
  }
}

}  // namespace

uint32_t mori_sdma_abi_version(void) { return MORI_SDMA_ABI_VERSION; }

uint64_t mori_sdma_max_copy(uint32_t flags) {
  // A multiple of 32 just below the limit keeps every chunk after the first as well aligned as the first.
  return flags & MORI_SDMA_COPY_22BIT ? 0x3fffe0 : 0x3fffffe0;
}

const char* mori_sdma_op_name(uint32_t op, uint32_t sub_op) {
  const Layout* layout = layout_of(op);
  if (layout && (sub_op == 0 || op == MORI_SDMA_TIMESTAMP)) return layout->name;
  const char* name = refused_name(op);
  return name ? name : "unknown";
}

const char* mori_sdma_reason_name(uint32_t reason) {
  static const char* const names[] = {"ok",         "unknown_op", "unsupported", "must_be_zero", "truncated",   "bad_size",
                                      "bad_field", "misaligned", "out_of_range", "bad_pointer", "no_room"};
  return reason < sizeof names / sizeof *names ? names[reason] : "unknown_reason";
}

mori_sdma_reason mori_sdma_encode(const mori_sdma_packet* packet, uint32_t flags, uint32_t* out, uint32_t room_dwords,
                                  uint32_t* num_dwords) {
  *num_dwords = 0;
  if (const mori_sdma_reason reason = check(*packet, flags)) return reason;
  uint64_t needed = layout_of(packet->op)->num_dwords;
  if (packet->op == MORI_SDMA_NOP) needed += packet->func;
  if (packet->op == MORI_SDMA_WRITE) needed += packet->nbytes / 4;
  if (needed > room_dwords) return MORI_SDMA_NO_ROOM;
  write_fields(*packet, out);
  *num_dwords = low(needed);
  return MORI_SDMA_OK;
}

mori_sdma_reason mori_sdma_decode(const uint32_t* dwords, uint64_t available, uint32_t flags, mori_sdma_packet* packet) {
  *packet = mori_sdma_packet{};
  if (available == 0) return MORI_SDMA_TRUNCATED;
  packet->op = dwords[0] & 0xff;
  packet->sub_op = dwords[0] >> 8 & 0xff;
  const Layout* layout = layout_of(packet->op);
  if (!layout) return refused_name(packet->op) ? MORI_SDMA_UNSUPPORTED : MORI_SDMA_UNKNOWN_OP;
  if (packet->op != MORI_SDMA_TIMESTAMP && packet->sub_op != 0) return MORI_SDMA_UNKNOWN_OP;
  packet->num_dwords = layout->num_dwords;
  if (available < layout->num_dwords) return MORI_SDMA_TRUNCATED;
  for (uint32_t i = 0; i < layout->num_dwords; ++i)
    if (dwords[i] & ~(layout->used[i] | (i == 0 ? 0xff00u : 0u))) return MORI_SDMA_MUST_BE_ZERO;
  if (packet->op == MORI_SDMA_POLL && !(dwords[0] >> 31)) return MORI_SDMA_UNSUPPORTED;  // polls a register
  read_fields(dwords, *packet);
  if (available < packet->num_dwords) return MORI_SDMA_TRUNCATED;
  return check(*packet, flags);
}
