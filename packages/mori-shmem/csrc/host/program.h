// Steps turned into packets. Addresses are checked here, when a step is added; the processor checks them again when it runs.
//
// A put becomes COPY packets of at most mori_sdma_max_copy bytes, none if it is empty. A 64-bit signal `set` becomes two
// FENCEs, low half first: of a value that only grows, a reader between the two sees the old one or a smaller one, never one
// that has not been reached. `add` is one 64-bit ATOMIC. A wait is a POLL of the low 32 bits.
#pragma once
#include <mori_sdma.h>

#include <vector>

#include "host/memory.h"

namespace mori {

enum class SignalOp { kSet, kAdd };

struct Packets {
  std::vector<uint32_t> dwords;
  std::vector<uint64_t> ends;  // in dwords, one for each packet

  void append(const mori_sdma_packet& packet);
};

class Program {
 public:
  explicit Program(const AddressSpace& space) : space_(space) {}

  void put(uint64_t dst, uint64_t src, uint64_t nbytes);
  void put_2d(uint64_t dst, uint64_t src, uint64_t row_bytes, uint64_t num_rows, uint64_t dst_pitch, uint64_t src_pitch);
  void fill(uint64_t dst, uint32_t pattern, uint64_t nbytes);
  void signal(uint64_t where, uint64_t value, SignalOp op);
  void wait(uint64_t where, uint64_t value, uint32_t comparison);
  void timestamp(uint64_t where);

  const Packets& packets() const { return packets_; }

 private:
  void copy(uint64_t dst, uint64_t src, uint64_t nbytes);

  const AddressSpace& space_;
  Packets packets_;
};

}  // namespace mori
