// A value for each 128-byte line of memory that anything was noted of, found by page: neighbours are near.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>

namespace mori_sim {

template <class Line>
class LineTable {
 public:
  Line& at(uint64_t line) {
    if (Line* l = find(line)) return *l;
    last_number_ = line / kLines;
    auto& page = pages_[last_number_];
    if (!page) page = std::make_unique<Page>();
    last_ = page.get();
    return (*last_)[line % kLines];
  }
  Line* find(uint64_t line) {
    if (line / kLines != last_number_) {
      auto it = pages_.find(line / kLines);
      if (it == pages_.end()) return nullptr;
      last_number_ = line / kLines;
      last_ = it->second.get();
    }
    return &(*last_)[line % kLines];
  }
  void erase(uint64_t first, uint64_t last) {  // both included
    const uint64_t from = first / kLines, to = last / kLines;
    const auto clear = [&](uint64_t number, Page& page) {
      for (uint64_t i = 0; i < kLines; ++i)
        if (number * kLines + i >= first && number * kLines + i <= last) page[i] = Line{};
    };
    const auto drop = [&](auto it) {
      if (it->first != from && it->first != to) return pages_.erase(it);
      clear(it->first, *it->second);
      return ++it;
    };
    last_number_ = ~0ull;
    if (to - from > pages_.size()) {
      for (auto it = pages_.begin(); it != pages_.end();) it = it->first >= from && it->first <= to ? drop(it) : std::next(it);
      return;
    }
    for (uint64_t number = from; number <= to; ++number)
      if (auto it = pages_.find(number); it != pages_.end()) drop(it);
  }
  bool empty() const { return pages_.empty(); }

 private:
  static constexpr uint64_t kLines = 32;  // 4 KiB
  using Page = std::array<Line, kLines>;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  uint64_t last_number_ = ~0ull;
  Page* last_ = nullptr;
};

}  // namespace mori_sim
