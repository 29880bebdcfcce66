// Code: a copy of one text segment with a decoded slot per dword, filled when first reached.
#include <algorithm>

#include "exec/machine.hpp"
#include "isa/decode.hpp"

namespace mori_sim {

Code::Code(uint64_t base, const void* bytes, size_t nbytes) : base_(base), nbytes_(nbytes & ~size_t{3}) {
  const auto* p = static_cast<const uint8_t*>(bytes);
  words_.resize(nbytes_ / 4);
  std::copy(p, p + nbytes_, reinterpret_cast<uint8_t*>(words_.data()));
  ops_ = std::make_unique<Op[]>(words_.size());
}
Code::~Code() = default;

Op* Code::at(uint64_t pc) const {
  const uint64_t off = pc - base_;
  if (off >= nbytes_ || (off & 3)) return nullptr;
  Op* op = &ops_[off / 4];
  if (!op->info && op->word[0] == 0) decode(&words_[off / 4], static_cast<unsigned>(std::min<size_t>(words_.size() - off / 4, 4)), op);
  return op;
}

std::string Code::text(uint64_t pc, unsigned* nbytes) const {
  const Op* op = at(pc);
  if (nbytes) *nbytes = op ? op->nbytes : 4;
  return op ? mori_sim::text(*op, pc) : "outside the code";
}
const char* Code::category(uint64_t pc) const {
  const Op* op = at(pc);
  return category_name(op ? op->category : Category::unknown);
}
std::string Code::unsupported(uint64_t pc) const {
  Op* op = at(pc);
  if (!op) return "outside the code";
  if (op->run) return "";
  return bind(op);
}

void Code::add_symbol(uint64_t addr, std::string name) {
  symbols_.emplace_back(addr, std::move(name));
  std::sort(symbols_.begin(), symbols_.end());
}
void Code::add_line(uint64_t addr, std::string file_and_line) { lines_.emplace_back(addr, std::move(file_and_line)); }
std::string Code::line_of(uint64_t pc) const {
  std::string best;
  uint64_t at = 0;
  for (const auto& l : lines_)
    if (l.first <= pc && l.first >= at) at = l.first, best = l.second;
  return best;
}

}  // namespace mori_sim
