// What strict mode remembers of memory: who wrote which bytes of a line last, and who has read them since.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "coherence/clock.hpp"
#include "exec/machine.hpp"
#include "isa/decode.hpp"

namespace mori_sim::strict {

constexpr unsigned kLine = 128;

enum class Scope : uint8_t { plain, agent, system };
inline Scope scope_of(const Op& op, bool atomic) {
  if (atomic) return op.sc1 ? Scope::system : Scope::agent;
  return op.sc0 && op.sc1 ? Scope::system : op.sc1 ? Scope::agent : Scope::plain;
}

struct ByteMask {
  uint64_t w[2] = {0, 0};
  void set(unsigned first, unsigned n) {  // n >= 1, first + n <= 128
    const auto half = [](unsigned from, unsigned to) { return from >= to ? 0 : (to - from == 64 ? ~0ull : ((1ull << (to - from)) - 1) << from); };
    w[0] |= half(std::min(first, 64u), std::min(first + n, 64u));
    w[1] |= half(std::max(first, 64u) - 64, std::max(first + n, 64u) - 64);
  }
  bool meets(const ByteMask& o) const { return (w[0] & o.w[0]) | (w[1] & o.w[1]); }
  bool empty() const { return !(w[0] | w[1]); }
  void add(const ByteMask& o) { w[0] |= o.w[0]; w[1] |= o.w[1]; }
  void drop(const ByteMask& o) { w[0] &= ~o.w[0]; w[1] &= ~o.w[1]; }
};

struct Record {
  uint32_t actor;
  uint32_t clock;
  ByteMask bytes;
  Scope scope;           // how the store was made
  bool in_memory;        // reached memory by itself (scope bits that suffice, uncached, engine, atomic)
  bool atomic;
  int16_t device, home;  // who stored, whose memory
  uint16_t xcd;
  const Code* code;
  uint64_t pc;
  ClockPtr released;     // what a reader with scope bits learns; null for plain stores
};
struct Reader {  // a cached read, or an engine's: a later store must be ordered after it
  uint32_t actor;
  uint32_t clock;
  ByteMask bytes;
  const Code* code;
  uint64_t pc;
};
struct Line {
  std::vector<Record> records;
  std::vector<Reader> readers;

  template <class Entry>
  static void drop(std::vector<Entry>& entries, const ByteMask& bytes) {
    for (size_t i = 0; i < entries.size();) {
      entries[i].bytes.drop(bytes);
      if (entries[i].bytes.empty()) entries[i] = std::move(entries.back()), entries.pop_back();
      else ++i;
    }
  }
};
constexpr size_t kReaders = 8;  // remembered per line

struct Actor {
  std::string name;      // for reports
  bool wave = false;
  uint64_t end_seq = 0;  // of its kernel; 0 while it runs
  int device = 0;
  unsigned xcd = 0, cu = 0;
  const void* group = nullptr;
  Clock clock;           // agents only
  uint32_t now = 0;
};

struct Touched {  // a line that the instruction being carried out reads or writes
  uint64_t line;
  ByteMask bytes;
  MemoryKind kind;
  int home;
  bool shared;
};

}  // namespace mori_sim::strict
