// Several ranks in one process, each with its own Fabric and its own mapping of the shared window.
#pragma once
#include <mori_sdma.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "check.h"
#include "host/fabric.h"

inline mori::Settings small_settings() {
  mori::Settings settings;
  settings.timeout_ns = 20'000'000'000;
  return settings;
}

class Ranks {
 public:
  explicit Ranks(int world_size, uint64_t nbytes = 1 << 20, mori::Settings settings = small_settings(),
                 std::vector<int> pidfds = {}) {
    std::vector<int> pages, parts;
    for (int rank = 0; rank < world_size; ++rank) {
      pages.push_back(mori::create_memory(mori::kControlBytes, "page"));
      parts.push_back(mori::create_memory(nbytes, "part"));
    }
    settings.world_size = world_size;
    pidfds.resize(static_cast<size_t>(world_size), -1);
    for (settings.rank = 0; settings.rank < world_size; ++settings.rank) {
      fabrics.push_back(std::make_shared<mori::Fabric>(settings, pages, pidfds));
      windows.push_back(fabrics.back()->map_window(parts, nbytes));
    }
    for (const int fd : pages) close(fd);
    for (const int fd : parts) close(fd);
  }

  mori::Fabric& operator[](int rank) { return *fabrics[static_cast<size_t>(rank)]; }
  // Where rank `of` keeps offset_bytes, as rank `me` sees it.
  uint64_t at(int me, int of, uint64_t offset_bytes) const {
    const mori::Mapping& window = *windows[static_cast<size_t>(me)];
    return window.base + static_cast<uint64_t>(of) * window.stride + offset_bytes;
  }
  char* bytes(int me, int of, uint64_t offset_bytes) const { return reinterpret_cast<char*>(at(me, of, offset_bytes)); }

  std::vector<std::shared_ptr<mori::Fabric>> fabrics;
  std::vector<std::shared_ptr<const mori::Mapping>> windows;
};

inline mori::Queue& queue_of(mori::Fabric& fabric, int peer, int index = 0) { return *fabric.open_queues(peer, {index})[0]; }

template <class Fill>
void submit(mori::Queue& queue, Fill fill) {
  mori::Program program(queue.node.space);
  fill(program);
  queue.submit(program.packets());
}

inline void put(mori::Queue& queue, uint64_t dst, uint64_t src, uint64_t nbytes) {
  submit(queue, [&](mori::Program& p) { p.put(dst, src, nbytes); });
}

inline void signal(mori::Queue& queue, uint64_t where, uint64_t value, mori::SignalOp op = mori::SignalOp::kSet) {
  submit(queue, [&](mori::Program& p) { p.signal(where, value, op); });
}

// The error that `call` throws; fails if it throws none.
template <class Call>
mori::Error error_of(Call call) {
  try {
    call();
  } catch (const mori::Error& error) {
    return error;
  }
  CHECK(!"an error was expected");
  std::abort();
}

template <class T>
T fact(const mori::Error& error, const std::string& name) {
  for (const auto& [key, value] : error.facts)
    if (key == name) return std::get<T>(value);
  std::fprintf(stderr, "no fact %s in %s\n", name.c_str(), error.kind.c_str());
  std::exit(1);
}
